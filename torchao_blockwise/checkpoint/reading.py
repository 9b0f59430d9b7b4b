"""Reading checkpoints into a model, converted or not: payload as it is, or the values that it stands for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint import fp8_block
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.gathering import agreed_by_all, is_shared, shard_of
from torchao_blockwise.checkpoint.names import Part, parts_on_disk, tensors_of
from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.state_values import plain_values

_SHOWN = 3


def load(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load the values of `model`, in place, from files in blockwise FP8 or plain ones; tensor by tensor.

    Scales may be in f32 (DeepSeek-V3) or e8m0 (DeepSeek-V4).
    A quantized Parameter of 128×128 blocks takes payload and scales as they are in the files; else a weight gets the
    values that they stand for, in its dtype, a master weight such that it is quantized to these bytes again. Names are
    those that transformers writes. Tied weights may be missing.
    Where FSDP2, tensor or expert parallelism shard the model all ranks call it: each reads the files and keeps its
    shards, one weight at a time.
    Everything is checked before the first value changes, on all ranks.
    Raises ValueError for files of another method, truncated files, scales that are missing, of a wrong shape or no
    numbers, and tensors of a wrong shape; KeyError for names that do not match; NotImplementedError for shards of
    quantized Parameters. On all ranks what the first that fails raises.
    """
    writes = agreed_by_all(is_shared(model), lambda: _checked(model, directory))
    with torch.no_grad():
        for write in writes:
            write()


def _checked(model: nn.Module, directory: str | os.PathLike[str]) -> list[Callable[[], None]]:
    """What writes each tensor, after a look at all of them."""
    files = Files(directory)
    config = files.config()
    if config and (reason := fp8_block.why_not_read(config)) is not None:
        raise ValueError(f"load: {files.path}: {reason}")
    writes: list[Callable[[], None]] = []
    wanted: dict[str, list[Part]] = {}
    tensors = tensors_of(model)
    for name, x in tensors.items():
        if isinstance(_compat.local_of(x), QuantizedShard):
            raise NotImplementedError(f"load: {name} is a shard of a quantized Parameter; load before fully_shard")
        wanted[name] = parts_on_disk(model, name, x.shape)
    _check_names(files, {part.name for parts in wanted.values() for part in parts})
    for name, x in tensors.items():
        for part in wanted[name]:
            _check_part(files, part, part.of(torch.empty(x.shape, device="meta")).shape)
        writes.append(_writing(files, x, wanted[name]))
    return writes


def _check_names(files: Files, wanted: set[str]) -> None:
    there = fp8_block.weights_in(files)
    missing, unknown = sorted(wanted - there), sorted(there - wanted)
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise KeyError(f"load: {files.path} has no {shown}{did_you_mean(missing[0], unknown)}; is it of another model?")
    if unknown:
        shown = ", ".join(unknown[:_SHOWN])
        raise KeyError(f"load: the model has no place for {shown} of {files.path}{did_you_mean(unknown[0], wanted)}")


def _check_part(files: Files, part: Part, shape: torch.Size) -> None:
    got = files.shape(part.name)
    if got != list(shape):
        raise ValueError(f"load: {files.where(part.name)} has shape {got}, the model wants {list(shape)}")
    scale, is_fp8 = fp8_block.scale_in(files, part.name), files.dtype(part.name) == fp8_block.E4M3
    if is_fp8 != (scale is not None):
        missing = fp8_block.scale_name(part.name)
        what = f"is in e4m3 and has no {missing}" if is_fp8 else f"has {scale} and is in {files.dtype(part.name)}"
        raise ValueError(f"load: {files.where(part.name)} {what}; the files are not whole, copy them anew")
    if scale is None:
        return
    grid = list(fp8_block.described(part.name, tuple(shape))[fp8_block.scale_name(part.name)][1])
    if files.shape(scale) != grid:
        raise ValueError(
            f"load: {files.where(scale)} has shape {files.shape(scale)}, blocks of {fp8_block.BLOCK} want {grid}"
        )
    scales = files.read(scale).float()
    if not bool((scales > 0).logical_and(scales.isfinite()).all()):
        raise ValueError(f"load: {files.where(scale)} has scales that are no positive numbers; copy the file anew")


def _writing(files: Files, x: torch.Tensor, parts: list[Part]) -> Callable[[], None]:
    local: Any = _compat.local_of(x)

    def read(part: Part, dtype: torch.dtype) -> torch.Tensor:
        data, scale = files.read(part.name), fp8_block.scale_in(files, part.name)
        if scale is None:
            return data.to(dtype)
        if isinstance(local, MasterWeightTensor):
            # Such that quantizing them gives what was read.
            return plain_values(BlockwiseFP8Tensor(data, files.read(scale).float(), dtype))
        return fp8_block.values(data, files.read(scale), dtype)

    def into(target: torch.Tensor) -> None:
        for part in parts:
            part.of(target).copy_(read(part, target.dtype))

    def write() -> None:
        if local is not x:
            values = torch.empty(x.shape, dtype=x.dtype)
            into(values)
            target = local.hp if isinstance(local, MasterWeightTensor) else local.detach()
            target.copy_(shard_of(values, x))
            torch.autograd.graph.increment_version(target)
        elif isinstance(x, MasterWeightTensor):
            into(x.hp)
            torch.autograd.graph.increment_version(x.hp)
        elif not isinstance(x, QuantizedTensor):
            into(x.detach())
        elif _takes_payload(files, x, parts):
            weight: Any = x
            qdata, scale = torch.empty_like(weight.qdata), torch.empty_like(weight.scale)
            for part in parts:
                part.of(qdata).copy_(files.read(part.name))
                read_from = fp8_block.scale_in(files, part.name)
                assert read_from is not None, "as _takes_payload has seen"
                fp8_block.rows_of_scales(part).of(scale).copy_(files.read(read_from).float())
            weight.copy_(type(weight)(qdata, scale, weight.dtype, weight.power_of_2_scales, weight.config))
        else:
            values = torch.empty(x.shape, dtype=x.dtype)
            into(values)
            x.copy_(values.to(x.device))

    return write


def _takes_payload(files: Files, x: torch.Tensor, parts: list[Part]) -> bool:
    """Whether files have the blocks of a quantized Parameter, with scales as it has them."""
    if not isinstance(x, BlockwiseFP8Tensor):
        return False
    scales = [None if part.cuts(fp8_block.BLOCK) else fp8_block.scale_in(files, part.name) for part in parts]
    powers = [scale is not None and fp8_block.are_powers_of_2(files, scale) for scale in scales]
    return None not in scales and all(power == x.power_of_2_scales for power in powers)
