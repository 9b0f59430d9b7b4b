"""Writing a model's weights for inference engines: the bytes that a forward pass now would read."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint import fp8_block, fp8_block_ue8m0, nvfp4_modelopt, nvfp4_packed
from torchao_blockwise.checkpoint.files import Folder
from torchao_blockwise.checkpoint.gathering import agreed, is_shared, wholes
from torchao_blockwise.checkpoint.names import Part, all_parts_on_disk, tensors_of, unwrapped
from torchao_blockwise.checkpoint.plain_layers import (
    Written,
    check_read,
    has_power_of_2_scales,
    is_converted,
    plain_layers,
    warn_of_fused,
    warn_of_ragged,
    weights_of_embeddings,
    written,
)
from torchao_blockwise.checkpoint.tensor_scales import shared_amaxes
from torchao_blockwise.formats import BlockFormat, Operand
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor

FORMATS: dict[str, Any] = {made.NAME: made for made in (fp8_block, fp8_block_ue8m0, nvfp4_packed, nvfp4_modelopt)}
SHARD_BYTES = 5 * 2**30


def export(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = fp8_block.NAME,
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` as inference engines and transformers load it, its converted weights quantized.

    Of a converted weight the payload and scales are the bytes that a layer's product would read now: a master weight
    quantized, a quantized Parameter as it is. All else is written in its dtype. Tensors are named as transformers
    names them, experts one by one; torch.compile, checkpoint_wrapper, DDP or a module of yours around the model do not
    change names.
    directory: is made whole or not at all: safetensors files, an index of several, and where `model` has a config its
        config.json with `quantization_config`.
    format: "fp8_block", blocks of 128×128 as in DeepSeek-V3's files, with `scale_fmt: "ue8m0"` in config.json where all
        weights train with `power_of_2_scales`; "fp8_block_ue8m0", these scales in e8m0, for DeepSeek-V4 and models
        without a config; "nvfp4_compressed_tensors" and "nvfp4_modelopt", as vLLM reads NVFP4 weights beside
        activations in high precision.
    tokenizer_from: a folder whose tokenizer's files are copied; default the one that the model was loaded from.
    shard_bytes: how large a file may become before the next one is begun; so much is held on the CPU, and no more.
    Where FSDP2, tensor or expert parallelism shard the model, all ranks call it, and the first one writes: weights are
    gathered a few at a time, and the bytes are those of the model on one device.

    An expert's up projection that begins inside of a block, as its width is no multiple of 128, has no blocks of its
    own: it is quantized anew, from the weight's values, and a warning says so. So are, in NVFP4, weights that engines
    run as one (q, k and v; gate and up; all experts') where their tensor scales differ: all get the largest one's; and
    weights whose amax is below 3.2e-35, which get the least tensor scale that engines can read.
    Raises ValueError for another format, for one that engines do not read for this model ("fp8_block_ue8m0" of a
    Llama), for a model without weights of that format, for weights of another one, for
    experts of a layer in one tensor under a name that no reader quantizes (GraniteMoe's input_linear), for
    converted weights with NaN or Inf, and for a directory that is the working one or a mount point; FileExistsError
    for one that is not empty; OSError where it cannot be written. On all ranks.
    """
    chosen, shared = _chosen("export", unwrapped("export", model), format), is_shared(model)
    model = unwrapped("export", model)
    tensors = tensors_of(model)
    on_disk = all_parts_on_disk(model, tensors)
    check_read("export", model, written(model, tensors, on_disk))
    folder = agreed(shared, lambda: Folder(directory, shard_bytes))
    anew: list[str] = []
    if tied := [n for n in weights_of_embeddings(model) if is_converted(tensors[n])]:
        warnings.warn(
            f"export: {tied[0]} is an embedding's as well, and engines read these in high precision, so that it is "
            "written in it; leave the layer that shares it unconverted (recommended_layers(model))",
            stacklevel=2,
        )
    failed: Exception | None = None
    try:
        for name, x in named_tensors(model, on_disk, chosen, anew, check_finite):
            # A rank whose disk is full goes on with the others, who wait for its parts, and says so at the end.
            if folder is not None and failed is None:
                try:
                    folder.add(name, x)
                except Exception as error:
                    failed = error
    except BaseException:
        if folder is not None:
            folder.discard()
        raise

    def finish() -> None:
        assert folder is not None
        with folder:
            if failed is not None:
                raise failed
            _write_others(model, folder, chosen, tokenizer_from, [*written(model, tensors, on_disk)])

    agreed(shared, finish)
    if anew:
        why = "begin inside of a block of the Parameter that they are a part of"
        if chosen.FORMAT.has_global_scale:
            why += ", or are run by engines as one with others of another tensor scale, or are too small for one,"
        names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in anew))
        warnings.warn(f"export: {len(anew)} weights {why} and are quantized anew: {names}", stacklevel=2)


def _write_others(
    model: nn.Module,
    folder: Folder,
    chosen: Any,
    tokenizer_from: str | os.PathLike[str] | None,
    tensors: Sequence[Written],
) -> None:
    """What is there beside the tensors: configs, and the tokenizer's files."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        with folder.writing():
            config.save_pretrained(folder.path)
        written_config = json.loads((folder.path / "config.json").read_text())
        weights = [_compat.local_of(x) for x in tensors_of(model).values() if is_converted(x)]
        write_settings(folder, written_config, chosen, tensors, all(map(has_power_of_2_scales, weights)))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        with folder.writing():
            generation.save_pretrained(folder.path)
    source = tokenizer_from if tokenizer_from is not None else getattr(config, "_name_or_path", "")
    if source and Path(source).is_dir():
        folder.copy_tokenizer(Path(source))


class QuantizedWeights:
    """What `quantized_weights` gives: an iterable of (name, tensor), which may be gone through again."""

    def __init__(self, given: nn.Module, format: str) -> None:
        self._given, self._model = given, unwrapped("quantized_weights", given)
        self._chosen = _chosen("quantized_weights", self._model, format)
        tensors = tensors_of(self._model)
        self._on_disk = all_parts_on_disk(self._model, tensors)
        check_read("quantized_weights", self._model, written(self._model, tensors, self._on_disk))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_shared(self._given)
        return named_tensors(self._model, self._on_disk, self._chosen, [])

    def metadata(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """{name: (dtype, shape)} in the order of the tensors, which nobody gathers for it."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tensors = tensors_of(self._model)
        for x in written(self._model, tensors, self._on_disk):
            plain = {x.name: (tensors[x.own[0]].dtype, x.shape)}
            found |= self._chosen.described(x.name, x.shape) if x.is_quantized else plain
        return found


def quantized_weights(model: nn.Module, format: str = fp8_block.NAME) -> QuantizedWeights:
    """What `export` would write, without files: (name, tensor) one by one, for an engine that takes weights over.

    Tensors are whole and on the model's device; each is one's own, or the Parameter's memory. Where ranks share the
    model all of them go through the iterable in lockstep, and what FSDP2 shards is gathered quantized. `metadata()` of
    it has names, dtypes and shapes beforehand, `checksums` of it what a receiver can compare. Nothing waits for a look
    at values, so that a weight with NaN is given as one.
    Raises ValueError as `export` does.
    """
    return QuantizedWeights(model, format)


def _chosen(op: str, model: nn.Module, format: str) -> Any:
    """The format of this name; raises ValueError for another, and for a model that it cannot hold."""
    if format not in FORMATS:
        raise ValueError(
            f"{op}: format must be one of {', '.join(FORMATS)}, got {format!r}{did_you_mean(format, FORMATS)}"
        )
    chosen, found = FORMATS[format], 0
    if chosen is fp8_block_ue8m0:
        fp8_block_ue8m0.check_model(op, model)
    for name, x in tensors_of(model).items():
        weight: Any = _compat.local_of(x)
        if isinstance(weight, (MasterWeightTensor, QuantizedTensor)):
            fmt = weight.fmt if weight.config is None else weight.config.weight_format
            if fmt is not chosen.FORMAT:
                raise ValueError(
                    f"{op}: {name} trains in {fmt.name}, and {chosen.NAME} holds {chosen.FORMAT.name}; convert the "
                    "model with another config, or unconvert it and call save_pretrained"
                )
            if chosen.POWER_OF_2_SCALES and not has_power_of_2_scales(weight):
                raise ValueError(
                    f"{op}: {name} trains with scales that are no powers of two, and {chosen.NAME} holds such alone; "
                    f"convert the model with power_of_2_scales=True, or export it as {fp8_block.NAME}"
                )
            if weight.dim() > 2 and _has_scales_of_experts(weight):
                raise ValueError(
                    f"{op}: each expert of {name} trains with a tensor scale of its own (scale_per_expert), and "
                    "engines run all experts with one; unconvert(model), and convert it with scale_per_expert=False"
                )
            found += 1
    if not found:
        raise ValueError(
            f"{op}: no weight of {type(model).__name__} is converted; call quantize_ first, or save_pretrained"
        )
    return chosen


def check_finite(name: str, weight: Operand) -> None:
    """Raise ValueError where a quantized weight does not stand for numbers; its device is waited for."""
    scale = weight.scale if weight.global_scale is None else weight.global_scale
    # A quantized Parameter may have got codes from files, with scales of their own.
    if bool(weight.format.element.has_nan(weight.qdata) | ~scale.float().isfinite().all()):
        raise ValueError(
            f"export: {name} has NaN or Inf among its values, so that what they are quantized to decodes to NaN; "
            "export an earlier state of the model, or repair the weight"
        )


def named_tensors(
    model: nn.Module,
    on_disk: Mapping[str, list[Part]],
    chosen: Any,
    anew: list[str],
    check: Callable[[str, Operand], None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the files have, one weight at a time. anew: gets the names of weights that are quantized for the file.

    on_disk: `all_parts_on_disk` of the tensors of `model`.
    check: is called with each weight that is quantized, before parts of it are given.
    """
    has_tensor_scales = chosen.FORMAT.has_global_scale
    amaxes = shared_amaxes(model) if has_tensor_scales else {}
    tensors = tensors_of(model)
    embeddings = weights_of_embeddings(model)
    wanted = (
        (held, name in embeddings or name in amaxes or any(part.cuts(chosen.BLOCK) for part in on_disk[name]))
        for name, held in tensors.items()
    )
    for name, x in zip(tensors, wholes(wanted), strict=True):
        parts = on_disk[name]
        if name in embeddings or not isinstance(x, (MasterWeightTensor, QuantizedTensor)):
            plain = _values(x).to(tensors[name].dtype) if isinstance(x, (MasterWeightTensor, QuantizedTensor)) else x
            yield from ((part.name, part.of(plain.detach())) for part in parts)
            continue
        if name in amaxes:
            anew.extend(part.name for part in parts)
            weight = _quantized_anew(_values(x), x, chosen.FORMAT, amaxes[name])
        else:
            weight = x.quantized() if isinstance(x, MasterWeightTensor) else x.operand()
        if check is not None:
            check(name, weight)
        for part in parts:
            if part.cuts(chosen.BLOCK):
                anew.append(part.name)
                own = _quantized_anew(part.of(_values(x)), x, chosen.FORMAT, amaxes.get(name))
                yield from chosen.named(part._replace(expert=None, start=None), own)
            else:
                yield from chosen.named(part, weight)


def _values(weight: Any) -> torch.Tensor:
    return weight.hp if isinstance(weight, MasterWeightTensor) else weight.dequantize()


def _has_scales_of_experts(weight: Any) -> bool:
    if isinstance(weight, QuantizedTensor):
        return weight.global_scale is not None and weight.global_scale.dim() > 0
    return bool(weight.config.scale_per_expert)


def _quantized_anew(values: torch.Tensor, weight: Any, fmt: BlockFormat, tensor_amax: torch.Tensor | None) -> Operand:
    power_of_2 = has_power_of_2_scales(weight)
    made = ops.quantize(values.detach(), fmt, power_of_2_scales=power_of_2, tensor_amax=tensor_amax).rowwise
    assert made is not None
    return made


def write_settings(
    folder: Folder, config: dict[str, Any], chosen: Any, tensors: Sequence[Written], power_of_2_scales: bool
) -> None:
    """config.json with what engines must know of the format, and what else of files they ask for.

    tensors: all of the files. Warns of those that engines refuse or transformers misreads.
    power_of_2_scales: whether all quantized weights have them.
    """
    # NVFP4's files have scales for each row.
    block = None if chosen.FORMAT.has_global_scale else chosen.BLOCK
    warn_of_fused(tensors, block)
    if block is not None:
        warn_of_ragged(tensors, block)
    plain = plain_layers(tensors)
    settings = chosen.settings(plain) | (fp8_block.SCALE_FMT if power_of_2_scales else {})
    folder.write_json("config.json", config | {"quantization_config": settings})
    if hasattr(chosen, "other_files"):
        for name, content in chosen.other_files(plain).items():
            folder.write_json(name, content)
