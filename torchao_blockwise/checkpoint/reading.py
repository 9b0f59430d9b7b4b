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
from torchao_blockwise._names import did_you_mean, shown
from torchao_blockwise.checkpoint.gathering import on_all_ranks, reshard
from torchao_blockwise.checkpoint.layouts import FP8, TENSOR_MAX
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
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.state_values import plain_values


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
        of fp32 ones, except that fp32 scales which are not powers of two may change in the last place of this dtype;
      - the rows of experts' projections are multiples of 128: otherwise two projections share a block;
      - in NVFP4, each block of a master weight has a value above 3.5e-5 of the largest value under its tensor scale;
        otherwise the block's scale is subnormal.
    For files of other tools, quantized Parameters are reproduced except for scales of zero, and master weights in
    blocks whose scale follows from the largest value.
    Names are those that transformers uses. Tied weights may be missing. Files may contain other tensors that
    transformers ignores, such as layers for multi-token prediction, and scales of activations and of an engine's cache.
    If the model is sharded by FSDP2, tensor or expert parallelism, all ranks must call it: each reads the files and
    keeps its shards, one weight at a time.
    Everything is checked, on all ranks, before the first value changes.
    Raises ValueError for other quantization methods, truncated files, scales that are missing, not finite or of a wrong
    shape, and tensors of a wrong shape; KeyError for names that do not match; NotImplementedError for rows that
    transformers permutes in files. All ranks raise the error of the first rank that fails.
    """

    def prepared() -> tuple[nn.Module, StoredWeights, dict[str, list[Part]]]:
        inner, weights = unwrapped("load", model), StoredWeights(directory)
        parts = check(inner, weights)
        warn_of_scales(inner, weights, parts)
        return inner, weights, parts

    fill(*on_all_ranks(reshard(model), prepared))


def check(model: nn.Module, weights: StoredWeights) -> dict[str, list[Part]]:
    """Return the parts in the files of each tensor of `model`, which may be on the meta device, by the tensor's name.

    Raises KeyError or ValueError unless the files hold these parts and nothing else.
    """
    with hugging_face.prefixes_of(model, weights.names):
        return _parts_in(weights, model)


def _parts_in(weights: StoredWeights, model: nn.Module) -> dict[str, list[Part]]:
    tensors, there = tensors_of(model), weights.names
    found = parts_on_disk(model)
    for name, parts in found.items():
        # Files may store experts as the model does, in one tensor.
        if name in there and there.isdisjoint(part.name for part in parts):
            found[name] = [Part(name, tuple(tensors[name].shape))]
    wanted = {part.name for parts in found.values() for part in parts}
    ignored = hugging_face.ignored_on_load(model) | {ENGINE_SCALES}
    others = (name for name in there - wanted if not any(re.search(pattern, name) for pattern in ignored))
    missing, unknown = sorted(wanted - there), sorted(others)
    if missing:
        near = did_you_mean(missing[0], unknown) or "; do the files belong to another model?"
        raise KeyError(f"load: {weights.files.path} has no {shown(missing)}{near}")
    if unknown:
        near = did_you_mean(unknown[0], wanted)
        raise KeyError(f"load: the model has no place for {shown(unknown)} of {weights.files.path}{near}")
    for name in hugging_face.transposed_in_files(model, tensors):
        found[name] = [x.transposed() if weights.is_transposed(x.name, x.shape) else x for x in found[name]]
    for name, parts in found.items():
        for part in parts:
            weights.check(part.name, part.shape, tensors[name].dtype)
    return found


@torch.no_grad()
def fill(model: nn.Module, weights: StoredWeights, parts: Mapping[str, list[Part]]) -> None:
    """Copy the values in the files, which were checked, to the tensors of `model` or this rank's shards, one by one."""
    x: Any
    for name, x in tensors_of(model).items():
        local: Any = _compat.local_of(x)
        is_whole = local is x or (isinstance(local, QuantizedShard) and local.part.shape == x.shape)
        if isinstance(local, QuantizedTensor) and is_whole and why_requantized(local, parts[name], weights) is None:
            local.copy_(_payload(local, x.shape, parts[name], weights))
            continue
        is_master = isinstance(local, MasterWeightTensor)
        target = local.hp if is_master else x if local is x else local.detach()
        in_place = local is x and not isinstance(x, QuantizedTensor)
        values = target if in_place else torch.empty(x.shape, dtype=x.dtype, device="cpu")
        for part in parts[name]:
            read: Any = weights.read(part.name, values.dtype)
            if isinstance(read, QuantizedTensor):
                read = _master_values(read) if is_master else read.dequantize()
            part.of(values).copy_(read.to(values.dtype))
        if local is not x:
            from torch.distributed.tensor import distribute_tensor

            # Without communication, since each rank has the values.
            values = distribute_tensor(values, x.device_mesh, x.placements, src_data_rank=None).to_local()
        if not in_place:
            target.copy_(values)


def why_requantized(x: torch.Tensor, parts: list[Part], weights: StoredWeights) -> str | None:
    """Return why the converted weight `x` cannot have the payload that the files have for its parts, or None.

    x: a quantized Parameter, a shard of one, or a master weight, whose scales `warn_of_scales` checks.
    """
    fmt, tensor_scale = format_of(x), None
    assert fmt is not None
    needs_powers_of_2 = has_power_of_2_scales(x) and not isinstance(_compat.local_of(x), MasterWeightTensor)
    for part in parts:
        read: Any = weights.read(part.name, x.dtype)
        if (stored_as := format_of(read)) is not fmt:
            found = "in high precision" if stored_as is None else f"in {stored_as.name}"
            return f"{part.name} is stored {found}, but the weight has blocks of {fmt.name}"
        if part.cuts(fmt.block[0]):
            return f"{part.name} begins inside a block of {fmt.block[0]} rows of the weight that holds it"
        if needs_powers_of_2 and not read.power_of_2_scales:
            return f"scales of {part.name} are not powers of two"
        tensor_scale = read.global_scale if tensor_scale is None else tensor_scale
        if read.global_scale != tensor_scale:
            return f"{part.name} and {parts[0].name} have different tensor scales, but are one weight"
    return None


def _payload(x: Any, shape: torch.Size, parts: list[Part], weights: StoredWeights) -> Any:
    """Return the payload in the files for `x`, a quantized Parameter of this shape or this rank's rows of one."""
    fmt, factor = x.fmt, None
    qdata, scale = fmt.new_empty(torch.empty(0, device="cpu"), *shape)
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
    return x._make(qdata=qdata, scale=scale, global_scale=factor)


def _master_values(x: Any) -> torch.Tensor:
    """Return values for a master weight, in the dtype of `x`, that quantize to `x` again.

    In NVFP4 that holds with the tensor scale of the files, which may come from a larger weight that an engine fuses
    with this one. Blocks of 1×16, which weights in training do not have, are only decoded.
    """
    if not x.fmt.is_square:
        return x.dequantize()

    def quantized(values: torch.Tensor) -> Any:
        made: Any = ops.quantize(values, x.fmt, tensor_amax=x.global_scale * TENSOR_MAX).rowwise
        return x._make(qdata=made.qdata, scale=made.scale, global_scale=made.global_scale)

    values = plain_values(x, None if x.global_scale is None else quantized)
    if has_power_of_2_scales(x):
        # If the largest value of a block was rounded down to 224, half of the largest code, quantizing it again would
        # halve the scale. Adding one unit in the last place keeps the code 224 and the scale.
        is_half = x.qdata.float().abs() == x.fmt.element.max / 2
        is_halved = expand_blocks(x._requantize(values).scale < x.scale, x.fmt, *values.shape[-2:])
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
        values = torch.where(is_half & is_halved, bits + 1, bits).view(values.dtype)
    return values


def warn_of_scales(model: nn.Module, weights: StoredWeights, parts: Mapping[str, list[Part]]) -> None:
    """Warn if the files have power-of-two scales and the model trains with other scales, or the reverse."""
    # {(whether scales of the files are powers of two, whether those of the model are): one of these weights}
    kinds: dict[tuple[bool, bool], str] = {}
    for name, x in tensors_of(model).items():
        option = has_power_of_2_scales(x)
        # Without power_of_2_scales a quantized Parameter accepts any scales.
        if format_of(x) is FP8.format and (option or isinstance(_compat.local_of(x), MasterWeightTensor)):
            for part in parts[name]:
                if (in_files := weights.has_power_of_2_scales.get(part.name)) is not None:
                    kinds.setdefault((in_files, option), part.name)
    # The scales of a single weight may be powers of two by chance.
    option = (True, False) in kinds and (False, False) not in kinds
    if option or (False, True) in kinds:
        where, theirs = weights.files.where(kinds[option, not option]), "" if option else "not "
        warnings.warn(
            f"load: the scales of {where} are {theirs}powers of two, but those of the model are{' not' * option}, so "
            "GEMMs and exports use different codes than the files; to keep the codes, convert the model with "
            f"BlockwiseFP8TrainingConfig(power_of_2_scales={option})",
            stacklevel=2,
        )
