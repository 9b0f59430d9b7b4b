"""Reading checkpoints into a model, converted or not: payload as it is, or the values that it stands for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint import stored
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.gathering import agreed_by_all, is_shared, shard_of
from torchao_blockwise.checkpoint.names import Part, all_parts_on_disk, tensors_of, unwrapped
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor

_SHOWN = 3
# What GPT-OSS's files call the codes of a weight.
_OF_MXFP4 = "_blocks"
# As files call dtypes.
_INTEGERS = ("I", "U", "BOOL")
# Factors of keys and values that an engine keeps quantized: training keeps none.
_OF_A_CACHE = r"\.(k|v|kv)_scale$"


def load(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load the values of `model`, in place, from files in blockwise FP8 or NVFP4, or plain ones; tensor by tensor.

    FP8: blocks of 128×128, scales in f32 (DeepSeek-V3) or e8m0 (DeepSeek-V4). NVFP4: as
    compressed-tensors and NVIDIA's Model Optimizer have it.
    A quantized Parameter takes payload and scales as they are in the files, where these have its blocks: 128×128, or
    in NVFP4 one scale for 16 rows, and one tensor scale for all that the Parameter holds. Else a weight gets the
    values that the files stand for, in its dtype, a master weight such that it is quantized to these bytes again. Names
    are those that transformers writes. Tied weights may be missing; layers that transformers passes over, as those that
    predict further tokens, and scales of an engine's cache may be there.
    Where FSDP2, tensor or expert parallelism shard the model all ranks call it: each reads the files and keeps its
    shards, one weight at a time.
    Everything is checked before the first value changes, on all ranks.
    Raises ValueError for files of another method, truncated files, scales that are missing, of a wrong shape or no
    numbers, and tensors of a wrong shape; KeyError for names that do not match; NotImplementedError for shards of
    quantized Parameters. On all ranks what the first that fails raises.
    """
    writes = agreed_by_all(is_shared(model), lambda: _checked(unwrapped("load", model), directory))
    with torch.no_grad():
        for write in writes:
            write()


def _checked(model: nn.Module, directory: str | os.PathLike[str]) -> list[Callable[[], None]]:
    """What writes each tensor, after a look at all of them."""
    files = Files(directory)
    config = files.config()
    if config and (reason := stored.why_not_read(config)) is not None:
        raise ValueError(f"load: {files.path}: {reason}")
    writes: list[Callable[[], None]] = []
    tensors = tensors_of(model)
    for name, x in tensors.items():
        if isinstance(_compat.local_of(x), QuantizedShard):
            raise NotImplementedError(f"load: {name} is a shard of a quantized Parameter; load before fully_shard")
    there = stored.weights_in(files)
    wanted = {
        # Files may have experts as the model has them, one tensor for all.
        name: [Part(name)] if name in there and there.isdisjoint(part.name for part in parts) else parts
        for name, parts in all_parts_on_disk(model, tensors).items()
    }
    passed_over = hugging_face.passed_over(model) | {_OF_A_CACHE}
    _check_names(files, there, {part.name for parts in wanted.values() for part in parts}, passed_over)
    for name, x in tensors.items():
        for part in wanted[name]:
            stored.check(files, part.name, part.of(torch.empty(x.shape, device="meta")).shape)
            _check_kind(files, part.name, x)
        writes.append(_writing(files, x, wanted[name]))
    return writes


def _check_kind(files: Files, name: str, x: torch.Tensor) -> None:
    """Raise ValueError where files have integers, codes of a format that is not known, and the model wants numbers."""
    if not x.is_floating_point() or stored.is_quantized(files, name):
        return
    if (dtype := files.dtype(name)).startswith(_INTEGERS):
        raise ValueError(
            f"load: {files.where(name)} is in {dtype}, the model wants {x.dtype}; files of such a format are not read, "
            "take them dequantized"
        )


def _check_names(files: Files, there: set[str], wanted: set[str], passed_over: set[str]) -> None:
    others = (name for name in there - wanted if not any(re.search(pattern, name) for pattern in passed_over))
    missing, unknown = sorted(wanted - there), sorted(others)
    if missing:
        if codes := next((name + _OF_MXFP4 for name in missing if name + _OF_MXFP4 in there), None):
            raise KeyError(f"load: {files.where(codes)} is of MXFP4, which is not read; {stored.TAKE_PLAIN}")
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        near = did_you_mean(missing[0], unknown) or "; is it of another model?"
        raise KeyError(f"load: {files.path} has no {shown}{near}")
    if unknown:
        shown = ", ".join(unknown[:_SHOWN])
        raise KeyError(f"load: the model has no place for {shown} of {files.path}{did_you_mean(unknown[0], wanted)}")


def _writing(files: Files, x: torch.Tensor, parts: list[Part]) -> Callable[[], None]:
    local: Any = _compat.local_of(x)

    def read(part: Part, dtype: torch.dtype) -> torch.Tensor:
        held = stored.quantized(files, part.name, dtype)
        if held is None:
            return files.read(part.name).to(dtype)
        # Into master weights such that quantizing them gives what was read.
        return stored.plain(held) if isinstance(local, MasterWeightTensor) else held.dequantize()

    def into(target: torch.Tensor) -> None:
        for part in parts:
            part.of(target).copy_(read(part, target.dtype))

    def write() -> None:
        if local is not x:
            values = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            into(values)
            target = local.hp if isinstance(local, MasterWeightTensor) else local.detach()
            target.copy_(shard_of(values, x))
            torch.autograd.graph.increment_version(target)
        elif isinstance(x, MasterWeightTensor):
            into(x.hp)
            torch.autograd.graph.increment_version(x.hp)
        elif not isinstance(x, QuantizedTensor):
            into(x.detach())
        elif (payload := _payload(files, x, parts)) is not None:
            x.copy_(payload)
        else:
            values = torch.empty(x.shape, dtype=x.dtype, device="cpu")
            into(values)
            x.copy_(values.to(x.device))

    return write


def _payload(files: Files, x: Any, parts: list[Part]) -> QuantizedTensor | None:
    """The payload of a quantized Parameter, where files have its blocks and scales as it has them; else None."""
    rows = x.fmt.block[0]
    if any(part.cuts(rows) for part in parts):
        return None
    made: Any = torch.empty_like(x.detach())
    tensor_scale = None
    for part in parts:
        held: Any = stored.quantized(files, part.name, x.dtype)
        if held is None or _blocks_of(held) != _blocks_of(x):
            return None
        part.of(made.qdata).copy_(held.qdata)
        part.in_blocks(rows).of(made.scale).copy_(held.scale)
        if x.global_scale is not None:
            if tensor_scale is not None and not torch.equal(tensor_scale, held.global_scale):
                return None
            tensor_scale = held.global_scale
            made.global_scale.copy_(tensor_scale)
    return made


def _blocks_of(x: Any) -> tuple[str, bool]:
    """What must be alike where payload is taken over."""
    return x.fmt.name, getattr(x, "power_of_2_scales", False)
