"""Load checkpoints into a model, converted or not: the quantized payload itself, or the values that it decodes to."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint.files import shown
from torchao_blockwise.checkpoint.fused_layers import TENSOR_MAX
from torchao_blockwise.checkpoint.gathering import on_all_ranks, reshard, shard_of
from torchao_blockwise.checkpoint.layouts import FP8
from torchao_blockwise.checkpoint.model_tensors import (
    ENGINE_SCALES,
    Part,
    format_of,
    has_power_of_2_scales,
    parts_on_disk,
    tensors_of,
    unwrapped,
)
from torchao_blockwise.checkpoint.stored_weights import StoredWeights
from torchao_blockwise.ops.quantization.reference import expand_blocks
from torchao_blockwise.tensors import MasterWeightTensor, NVFP4Tensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.state_values import plain_values

# Prefixes of dtypes as files spell them.
_INTEGERS = ("I", "U", "BOOL")


def load(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load a checkpoint in blockwise FP8, NVFP4 or high precision into `model`, in place, one tensor at a time.

    FP8: blocks of 128×128 with scales in f32 (DeepSeek-V3), e8m0 (DeepSeek-V4), or f32 or bf16 (compressed-tensors).
    A scale of zero is accepted if all codes of its block are zero. NVFP4: the formats of compressed-tensors and of
    NVIDIA's Model Optimizer.
    A quantized Parameter takes payload and scales unchanged if the files have the same blocks: 128×128, or in NVFP4
    one scale for 16 rows and one tensor scale for the whole Parameter. Otherwise a weight gets the decoded values, in
    its dtype.
    `load` followed by `export` in the same format reproduces every byte of files that `export` wrote for this model if
      - the model's `power_of_2_scales` matches the files, whether or not these have `scale_fmt`; otherwise a warning
        names the right config. Quantized Parameters with other scales take powers of two unchanged;
      - master weights are in fp32, or in the dtype of the exported ones. Master weights in bf16 or fp16 reproduce files
        of fp32 ones, except that fp32 scales which are not powers of two may change in the last place;
      - the rows of experts' projections are multiples of 128: otherwise two projections share a block;
      - in NVFP4, each block of a master weight has a value above 3.5e-5 of the largest value under its tensor scale;
        otherwise the block's scale is subnormal.
    For files of other tools, quantized Parameters are reproduced except for scales of zero, and master weights in
    blocks whose scale follows from the largest value.
    Names are those that transformers writes. Tied weights may be missing. Files may have further tensors that
    transformers ignores, such as layers for multi-token prediction, and scales of activations and of an engine's cache.
    If FSDP2, tensor or expert parallelism shard the model, all ranks must call it: each reads the files and keeps its
    shards, one weight at a time.
    Everything is checked, on all ranks, before the first value changes.
    Raises ValueError for other quantization methods, truncated files, scales that are missing, not finite or of a wrong
    shape, and tensors of a wrong shape; KeyError for names that do not match; NotImplementedError for rows that
    transformers permutes in files. All ranks raise the error of the first rank that fails.
    """
    inner, weights, parts = on_all_ranks(reshard(model), lambda: _prepared(unwrapped("load", model), directory))
    fill(inner, weights, parts)


def _prepared(
    model: nn.Module, directory: str | os.PathLike[str]
) -> tuple[nn.Module, StoredWeights, dict[str, list[Part]]]:
    weights = StoredWeights(directory)
    parts = parts_in_files(model, weights)
    warn_of_scales(model, weights, parts, check(model, weights, parts))
    return model, weights, parts


def parts_in_files(model: nn.Module, weights: StoredWeights) -> dict[str, list[Part]]:
    """Return the parts in the files of each tensor of `model`, by the tensor's name."""
    tensors = tensors_of(model)
    return {
        # Files may store experts as the model does, in one tensor.
        name: [Part(name, tuple(tensors[name].shape))]
        if name in weights.names and weights.names.isdisjoint(x.name for x in parts)
        else parts
        for name, parts in parts_on_disk(model).items()
    }


def check(model: nn.Module, weights: StoredWeights, parts: Mapping[str, list[Part]]) -> dict[str, bool | None]:
    """Raise unless the files hold the tensors of `model`, which may be on the meta device, and nothing else.

    Returns {name in the files: whether the scales of an FP8 weight are powers of two, None for other weights}.
    """
    ignored_on_load = hugging_face.ignored_on_load(model) | {ENGINE_SCALES}
    _check_names(weights, {part.name for found in parts.values() for part in found}, ignored_on_load)
    powers_of_2 = {}
    for name, x in tensors_of(model).items():
        for part in parts[name]:
            powers_of_2[part.name] = weights.check(part.name, part.shape)
            _check_kind(weights, part.name, x)
    return powers_of_2


@torch.no_grad()
def fill(model: nn.Module, weights: StoredWeights, parts: Mapping[str, list[Part]]) -> None:
    """Copy the values in the files, which were checked, to the tensors of `model`, one at a time."""
    for name, x in tensors_of(model).items():
        _fill(x, parts[name], weights)


def _check_kind(weights: StoredWeights, name: str, x: torch.Tensor) -> None:
    """Raise ValueError if files have integers (codes of an unknown format) for a floating-point tensor, or reverse."""
    if weights.format(name) is not None:
        return
    if (dtype := weights.files.dtype(name)).startswith(_INTEGERS) == x.is_floating_point():
        remedy = "such a format is not supported, dequantize the files first"
        raise ValueError(
            f"load: {weights.files.where(name)} is in {dtype}, but the model needs {x.dtype}; "
            f"{remedy if x.is_floating_point() else 'use files of this model'}"
        )


def _check_names(weights: StoredWeights, wanted: set[str], ignored_on_load: set[str]) -> None:
    path, there = weights.files.path, weights.names
    others = (name for name in there - wanted if not any(re.search(pattern, name) for pattern in ignored_on_load))
    missing, unknown = sorted(wanted - there), sorted(others)
    if missing:
        near = did_you_mean(missing[0], unknown) or "; do the files belong to another model?"
        raise KeyError(f"load: {path} has no {shown(missing)}{near}")
    if unknown:
        raise KeyError(f"load: the model has no place for {shown(unknown)} of {path}{did_you_mean(unknown[0], wanted)}")


def _fill(x: torch.Tensor, parts: list[Part], weights: StoredWeights) -> None:
    """Copy the values of its parts in the files to `x`, a tensor of the model or this rank's shard of one."""
    local: Any = _compat.local_of(x)
    is_whole = local is x or (isinstance(local, QuantizedShard) and local.part.shape == x.shape)
    if isinstance(local, QuantizedTensor) and is_whole and why_requantized(local, parts, weights) is None:
        local.copy_(_payload(local, x.shape, parts, weights))
        return
    is_master = isinstance(local, MasterWeightTensor)
    target = local.hp if is_master else x if local is x else local.detach()
    in_place = local is x and not isinstance(x, QuantizedTensor)
    values = target if in_place else torch.empty(x.shape, dtype=x.dtype, device="cpu")
    for part in parts:
        read: Any = weights.read(part.name, values.dtype)
        if isinstance(read, QuantizedTensor):
            read = _master_values(read) if is_master else read.dequantize()
        part.of(values).copy_(read.to(values.dtype))
    if not in_place:
        target.copy_(values.to(x.device) if local is x else shard_of(values, x))


def why_requantized(x: torch.Tensor, parts: list[Part], weights: StoredWeights) -> str | None:
    """Return why the converted weight `x` cannot have the payload that the files have for its parts, or None.

    x: a quantized Parameter, a shard of one, or a master weight, whose scales `warn_of_scales` checks.
    """
    fmt, tensor_scale = format_of(x), None
    assert fmt is not None
    needs_powers_of_2 = has_power_of_2_scales(x) and not isinstance(_compat.local_of(x), MasterWeightTensor)
    for part in parts:
        stored_as, factor, are_powers_of_2 = weights.blocks(part.name) or (None, None, False)
        if stored_as is not fmt:
            found = "in high precision" if stored_as is None else f"in {stored_as.name}"
            return f"{part.name} is stored {found}, but the weight has blocks of {fmt.name}"
        if part.cuts(fmt.block[0]):
            return f"{part.name} begins inside of a block of {fmt.block[0]} rows of the weight that holds it"
        if needs_powers_of_2 and not are_powers_of_2:
            return f"scales of {part.name} are not powers of two"
        tensor_scale = factor if tensor_scale is None else tensor_scale
        if factor != tensor_scale:
            return f"{part.name} and {parts[0].name} have different tensor scales, but are one weight"
    return None


def _payload(x: Any, shape: torch.Size, parts: list[Part], weights: StoredWeights) -> QuantizedTensor:
    """Return the payload in the files for `x`, a quantized Parameter of this shape or this rank's rows of one."""
    fmt, factor = x.fmt, None
    qdata = torch.empty(fmt.qdata_shape(*shape), dtype=fmt.element.storage_dtype, device="cpu")
    scale = torch.empty(fmt.scale_shape(*shape), dtype=fmt.scale_dtype, device="cpu")
    for part in parts:
        read: Any = weights.read(part.name, x.dtype)
        part.of(qdata).copy_(read.qdata)
        part.in_blocks(fmt.block[0]).of(scale).copy_(read.scale)
        factor = read.global_scale
    if factor is not None:
        # One for each expert with `scale_per_expert`.
        factor = factor.expand(x.global_scale.shape).clone()
    if isinstance(x, QuantizedShard):
        rows = slice(x.part.start, x.part.start + x.part.local_shape[0])
        return QuantizedShard(qdata[rows], scale, x.part, x.dtype, factor)
    made: QuantizedTensor = x._make(qdata=qdata, scale=scale, global_scale=factor)
    return made


def _master_values(x: Any) -> torch.Tensor:
    """Return values for a master weight, in the dtype of `x`, that quantize to `x` again.

    In NVFP4 that holds with the tensor scale of the files, which may come from a larger weight that an engine fuses
    with this one. Blocks of 1×16, which weights in training do not have, are only decoded.
    """
    if isinstance(x, NVFP4Tensor):
        return plain_values(x, lambda values: _quantized_as(x, values)) if x.fmt.is_square else x.dequantize()
    values = plain_values(x)
    if not x.power_of_2_scales:
        return values
    # If the largest value of a block was rounded down to 224, half of the largest code, quantizing it again would halve
    # the scale. Adding one unit in the last place keeps the code 224 and the scale.
    again = ops.quantize(values, x.fmt, power_of_2_scales=True).rowwise
    assert again is not None
    is_half = x.qdata.float().abs() == x.fmt.element.max / 2
    moved = is_half & expand_blocks(again.scale < x.scale, x.fmt, *values.shape[-2:])
    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    return (bits + moved.to(bits.dtype)).view(values.dtype)


def _quantized_as(x: NVFP4Tensor, values: torch.Tensor) -> NVFP4Tensor:
    """Quantize `values` in the blocks of `x` and with its tensor scale."""
    made = ops.quantize(values, x.fmt, tensor_amax=x.global_scale * TENSOR_MAX).rowwise
    assert made is not None and made.global_scale is not None
    return NVFP4Tensor(made.qdata, made.scale, made.global_scale, x.columns, x.block_size, x.dtype)


def warn_of_scales(
    model: nn.Module, weights: StoredWeights, parts: Mapping[str, list[Part]], powers_of_2: Mapping[str, bool | None]
) -> None:
    """Warn if the files have power-of-two scales and the model trains with other scales, or the reverse.

    powers_of_2: what `check` returned.
    """
    # {(whether scales of the files are powers of two, whether those of the model are): one of these weights}
    kinds: dict[tuple[bool, bool], str] = {}
    for name, x in tensors_of(model).items():
        in_model = has_power_of_2_scales(x)
        # Without power_of_2_scales a quantized Parameter accepts any scales.
        decides = in_model or isinstance(_compat.local_of(x), MasterWeightTensor)
        for part in parts[name]:
            in_files = powers_of_2[part.name]
            if in_files is not None and format_of(x) is FP8.format and decides:
                kinds.setdefault((in_files, in_model), part.name)
    # The scales of a single weight may be powers of two by chance.
    if (True, False) in kinds and (False, False) not in kinds:
        name, theirs, option = kinds[True, False], "powers of two", True
    elif (False, True) in kinds:
        name, theirs, option = kinds[False, True], "not powers of two", False
    else:
        return
    warnings.warn(
        f"load: scales of {weights.files.where(name)} are {theirs}, and those that the model trains with are"
        f"{' not' * option}, so GEMMs and exports use other codes than the files have; to keep the codes, convert the "
        f"model with BlockwiseFP8TrainingConfig(power_of_2_scales={option})",
        stacklevel=2,
    )
