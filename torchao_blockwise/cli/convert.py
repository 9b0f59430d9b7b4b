"""Quantize a checkpoint of a Hugging Face model on disk, tensor by tensor, for inference engines.

IN is a folder with config.json and safetensors files, plain or quantized. OUT is a new folder. The command quantizes
the `recommended_layers` (in NVFP4 also those in the last blocks); --skip excludes more layers by name. Quantized
weights in IN are decoded first; with --to plain, they are written in bfloat16. Scales in IN for activations and for an
engine's cache (input_scale, k_scale) are not written. One tensor is quantized at a time, and files of 5 GB are written.
NVFP4 reads each tensor twice, because layers that engines fuse share a tensor scale. OUT appears when it is complete.
Until then, finished files are in a hidden folder next to it. If the command is interrupted, run it again to continue.

exit code: 0 success, 2 invalid arguments or files
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import conversion, ops
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.checkpoint.engine_layers import fused_layers
from torchao_blockwise.checkpoint.files import Folder
from torchao_blockwise.checkpoint.layouts import FP8, FP8_UE8M0, LAYOUTS, clamp_to_normal_scale
from torchao_blockwise.checkpoint.model_tensors import ENGINE_SCALES, Part, parts_on_disk, tensors_of
from torchao_blockwise.checkpoint.stored_weights import StoredWeights
from torchao_blockwise.checkpoint.writing import SHARD_BYTES, QuantizedWeights, check_finite
from torchao_blockwise.cli.inputs import UsageError, meta_model
from torchao_blockwise.tensors import TrainingConfig

HELP = "quantize a checkpoint on disk for inference engines"
PLAIN = "plain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", type=Path)
    parser.add_argument("output", metavar="OUT", type=Path)
    parser.add_argument("--to", choices=(*LAYOUTS, PLAIN), default=FP8.name, help="format; default: %(default)s")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help='layers to exclude: "*.wo"')
    parser.add_argument("--shard-gb", type=float, default=SHARD_BYTES / 2**30, help="file size; default: %(default)g")
    parser.add_argument("--power-of-2-scales", action="store_true", help="use scales that are powers of two (FP8)")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.shard_gb < math.inf:
        raise UsageError(f"--shard-gb must be a positive number, got {args.shard_gb:g}")
    model, layout = meta_model(str(args.input)), LAYOUTS.get(args.to)
    if layout is not None:
        if layout.format.has_global_scale and args.power_of_2_scales:
            raise UsageError(f"--power-of-2-scales is only for {FP8.name}; leave it out")
        args.power_of_2_scales |= layout is FP8_UE8M0
        config: TrainingConfig = conversion.NVFP4TrainingConfig()
        if not layout.format.has_global_scale:
            config = conversion.BlockwiseFP8TrainingConfig(power_of_2_scales=args.power_of_2_scales)
        chosen = conversion.recommended_layers(model)
        chosen = chosen & conversion.skip_fqns(*args.skip) if args.skip else chosen
        quantize_(model, config, filter_fn=chosen)
    try:
        quantized, bits = _convert(args, model, StoredWeights(args.input))
    except (OSError, ValueError, NotImplementedError) as error:
        # The command's own name precedes the message.
        raise UsageError(str(error).removeprefix("export: ")) from None
    print(f"{quantized} tensors quantized, {bits:.2f} bits per element in {args.output}")
    return 0


def _convert(args: argparse.Namespace, model: nn.Module, weights: StoredWeights) -> tuple[int, float]:
    """Convert, and return (number of quantized tensors, bits per element in the files)."""
    layout, files = LAYOUTS.get(args.to), weights.files
    with hugging_face.prefixes_of(model, weights.names):
        of_layout = None if layout is None else QuantizedWeights("convert", model, args.to)
    written = itertools.chain(*parts_on_disk(model).values()) if of_layout is None else of_layout.written
    of_model = {x.name: x for x in written}
    names = sorted(name for name in weights.names if name in of_model or not re.search(ENGINE_SCALES, name))
    if missing := sorted({x.name for x in of_model.values() if x.is_quantized}.difference(names)):
        raise ValueError(f"{args.input} has no {missing[0]}, which its config.json needs; copy the files again")
    # Files may have layers that the model does not build, such as those for multi-token prediction.
    outputs = [
        Part(name, weights.shape(name), x.own if x else (), x is not None and x.is_quantized)
        for name, x in ((name, of_model.get(name)) for name in names)
    ]
    # Engines read some experts transposed.
    in_files = hugging_face.transposed_in_files(model, tensors_of(model))
    known = [x for x in outputs if in_files.intersection(x.own)]
    transposed = {x.name for x in known if weights.is_transposed(x.name, of_model[x.name].shape)}
    outputs = [x._replace(shape=of_model[x.name].shape) if x.name in transposed else x for x in outputs]
    quantized = [x.name for x in outputs if x.is_quantized]
    fused = fused_layers(quantized)
    amaxes = _group_amaxes(weights, fused) if layout is not None and layout.format.has_global_scale else {}
    sources = [(file, (args.input / file).stat()) for file in files.files]
    plan = {
        "from": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in sources],
        "quantized": quantized,
        "power_of_2_scales": args.power_of_2_scales,
        "to": args.to,
    }
    with Folder(args.output, int(args.shard_gb * 2**30), resume=plan) as folder:
        if done := folder.done:
            print(f"continuing after {len(done)} tensors that an interrupted run has written")
        for x in _with_progress(outputs):
            target = layout if x.is_quantized else None
            if done.keys() >= {*([x.name] if target is None else target.names(x.name))}:
                continue
            values, found = weights.values(x.name, torch.bfloat16 if target is None else torch.float32), {}
            values = values.mT.contiguous() if x.name in transposed else values
            if target is None:
                found = {x.name: values}
            else:
                options = {"power_of_2_scales": args.power_of_2_scales, "tensor_amax": amaxes.get(fused[x.name])}
                made = ops.quantize(values, target.format, **options).rowwise
                check_finite(x.name, made)
                found = dict(target.tensors(Part(x.name), made))
            for name, tensor in found.items():
                if name not in done:
                    folder.add(name, tensor)
        if of_layout is None:
            folder.write_json("config.json", weights.config)
        else:
            of_layout.written = outputs
            of_layout.write_settings(folder, weights.config)
        folder.copy_tokenizer(args.input)
    return len(quantized), 8 * folder.nbytes / max(1, sum(math.prod(x.shape) for x in outputs))


def _group_amaxes(weights: StoredWeights, fused: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the largest amax of each group of layers that engines fuse. fused: {name of a weight: its group}."""
    largest: dict[str, torch.Tensor] = {}
    for name in _with_progress([*fused]):
        amax, group = weights.values(name, torch.float32).abs().amax().float(), fused[name]
        # Python's max would lose a NaN.
        largest[group] = torch.maximum(amax, largest.get(group, amax))
    return {group: clamp_to_normal_scale(amax) for group, amax in largest.items()}


def _with_progress(items: Sequence[Any]) -> Any:
    """Return the items with a progress bar. tqdm is installed, since transformers needs it."""
    from tqdm import tqdm

    return tqdm(items, unit="tensor", disable=None)
