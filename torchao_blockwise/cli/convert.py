"""Quantize a checkpoint of a Hugging Face model on disk, tensor by tensor, for inference engines.

IN is a folder with config.json and safetensors files, plain or quantized, OUT a new one. The
`recommended_layers` are quantized, in NVFP4 those of the last blocks too; --skip leaves out more by name. What IN has
quantized is decoded first, and with --to plain left so, in bfloat16; its scales of activations and of an engine's cache
(input_scale, k_scale) belong to its format and are left out. One tensor is quantized at a time, and a file is
written when its 5 GB are there; NVFP4 reads each twice, as layers that engines run as one share a tensor scale. OUT is
made whole or not at all: until then finished files lie beside it, and the same command goes on behind them where it was
interrupted.

exit code: 0 done, 2 wrong arguments or files
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import conversion, ops
from torchao_blockwise.checkpoint import fp8_block, fp8_block_ue8m0, stored
from torchao_blockwise.checkpoint.files import Files, Folder
from torchao_blockwise.checkpoint.fused_layers import fused_layers
from torchao_blockwise.checkpoint.names import OF_AN_ENGINE, Part, all_parts_on_disk, tensors_of
from torchao_blockwise.checkpoint.plain_layers import PlainLayers, Written, check_read, written
from torchao_blockwise.checkpoint.tensor_scales import storable
from torchao_blockwise.checkpoint.writing import FORMATS, SHARD_BYTES, check_finite, write_settings
from torchao_blockwise.cli.models import meta_model
from torchao_blockwise.cli.terminal import UsageError
from torchao_blockwise.tensors import TrainingConfig

HELP = "quantize a checkpoint on disk for inference engines"
PLAIN = "plain"
# What tells formats of one method apart.
_KIND = ("quant_method", "format", "scale_fmt", "quant_algo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", type=Path)
    parser.add_argument("output", metavar="OUT", type=Path)
    parser.add_argument("--to", choices=(*FORMATS, PLAIN), default=fp8_block.NAME, help="default: %(default)s")
    parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help='names to leave out: "*.wo"')
    parser.add_argument("--shard-gb", type=float, default=SHARD_BYTES / 2**30, help="of a file; default: %(default)g")
    parser.add_argument("--power-of-2-scales", action="store_true")


def run(args: argparse.Namespace) -> int:
    model = meta_model(str(args.input))
    if args.to != PLAIN:
        args.power_of_2_scales |= FORMATS[args.to].POWER_OF_2_SCALES
        chosen = conversion.recommended_layers(model)
        quantize_(model, _config(args), filter_fn=chosen & conversion.skip_fqns(*args.skip) if args.skip else chosen)
    try:
        if args.to == fp8_block_ue8m0.NAME:
            fp8_block_ue8m0.check_model("convert", model)
        files = Files(args.input)
        _check_format(files, args.to, args.power_of_2_scales)
        quantized, bits = _convert(args, model, files)
    except (OSError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    print(f"{quantized} tensors quantized, {bits:.2f} bits an element in {args.output}")
    return 0


def _config(args: argparse.Namespace) -> TrainingConfig:
    if not FORMATS[args.to].FORMAT.has_global_scale:
        return conversion.BlockwiseFP8TrainingConfig(power_of_2_scales=args.power_of_2_scales)
    if args.power_of_2_scales:
        raise UsageError(f"--power-of-2-scales is for {fp8_block.NAME}; leave it out")
    return conversion.NVFP4TrainingConfig()


def _check_format(files: Files, to: str, power_of_2_scales: bool) -> None:
    """Raise UsageError for files that are in this format, ValueError for those that are not read."""
    config = files.config()
    if config and (reason := stored.why_not_read(config)) is not None:
        raise ValueError(f"{files.path}: {reason}")
    wanted = {} if to == PLAIN else FORMATS[to].settings(PlainLayers([], []))
    wanted = wanted | (fp8_block.SCALE_FMT if power_of_2_scales else {})
    # Both formats with powers of two say so, and one has them in a byte.
    in_bytes = any(files.dtype(name) == "F8_E8M0" for name in files.names())
    is_alike = to == PLAIN or in_bytes == (to == fp8_block_ue8m0.NAME)
    if is_alike and [config.get(key) for key in _KIND] == [wanted.get(key) for key in _KIND]:
        raise UsageError(f"{files.path} is in {to} already, as its config.json says; give others, or another --to")


def _convert(args: argparse.Namespace, model: nn.Module, files: Files) -> tuple[int, float]:
    """(tensors that were quantized, bits an element in the files)."""
    tensors = tensors_of(model)
    parts = all_parts_on_disk(model, tensors)
    of_model = [*written(model, tensors, parts)]
    check_read("convert", model, of_model)
    is_quantized = {x.name: x.is_quantized for x in of_model}
    there = stored.weights_in(files)
    names = sorted(name for name in there if name in is_quantized or not re.search(OF_AN_ENGINE, name))
    if missing := sorted({name for name, wanted in is_quantized.items() if wanted}.difference(names)):
        raise ValueError(f"{args.input} has no {missing[0]}, which its config.json asks for; copy the files anew")
    chosen: Any = FORMATS.get(args.to)
    quantized = [name for name in names if is_quantized.get(name)]
    fused = fused_layers(quantized)
    amaxes = _group_amaxes(files, fused) if chosen is not None and chosen.FORMAT.has_global_scale else {}
    sources = [(file, (args.input / file).stat()) for file in files.files]
    plan = {
        "from": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in sources],
        "quantized": quantized,
        "power_of_2_scales": args.power_of_2_scales,
        "to": args.to,
    }
    with Folder(args.output, int(args.shard_gb * 2**30), resume=plan) as folder:
        done, weights = folder.done, set(quantized)
        if done:
            print(f"goes on where it was interrupted, behind {len(done)} tensors")
        for name in _shown(names):
            described = chosen.described(name, tuple(stored.shape(files, name))) if name in weights else {name}
            if done.issuperset(described):
                continue
            x = _values(files, name, torch.float32 if name in weights else torch.bfloat16)
            outputs = [(name, x)]
            if name in weights:
                options = {"power_of_2_scales": args.power_of_2_scales, "tensor_amax": amaxes.get(fused[name])}
                made = ops.quantize(x, chosen.FORMAT, **options).rowwise
                check_finite(name, made)
                outputs = list(chosen.named(Part(name), made))
            for other, value in outputs:
                if other not in done:
                    folder.add(other, value)
        if chosen is None:
            folder.write_json("config.json", files.plain_config())
        else:
            # Files may have more than the model builds: layers that predict further tokens.
            own = {x.name: x.own for x in of_model}
            in_files = [
                Written(name, own.get(name, ()), tuple(stored.shape(files, name)), name in weights) for name in names
            ]
            write_settings(folder, files.plain_config(), chosen, in_files, args.power_of_2_scales)
        folder.copy_tokenizer(args.input)
    elements = sum(math.prod(stored.shape(files, name)) for name in names)
    return len(quantized), 8 * folder.nbytes / max(1, elements)


def _values(files: Files, name: str, dtype: torch.dtype) -> torch.Tensor:
    """`stored.values` of a tensor that the files have whole."""
    stored.check(files, name, torch.Size(stored.shape(files, name)))
    return stored.values(files, name, dtype)


def _group_amaxes(files: Files, fused: dict[str, str]) -> dict[str, torch.Tensor]:
    """The largest amax of each group of layers that engines run as one. fused: {name of a weight: its group}."""
    largest: dict[str, torch.Tensor] = {}
    for name in _shown([*fused]):
        amax, group = _values(files, name, torch.float32).abs().amax().float(), fused[name]
        # Not by Python's max, which loses a NaN.
        largest[group] = torch.maximum(amax, largest.get(group, amax))
    return {group: storable(amax) for group, amax in largest.items()}


def _shown(names: list[str]) -> Any:
    """The names, with a progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return names
    return tqdm(names, unit="tensor", disable=None)
