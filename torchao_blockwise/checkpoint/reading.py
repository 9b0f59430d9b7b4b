"""Reading checkpoints into a model, converted or not: payload as it is, or the values that it stands for."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import hugging_face
from torchao_blockwise._names import did_you_mean
from torchao_blockwise.checkpoint import fp8_block, nvfp4_packed, stored
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.gathering import agreed_by_all, is_shared, shard_of
from torchao_blockwise.checkpoint.names import OF_AN_ENGINE, Part, all_parts_on_disk, tensors_of, unwrapped
from torchao_blockwise.checkpoint.plain_layers import has_power_of_2_scales
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor

_SHOWN = 3
# What GPT-OSS's files call the codes of a weight.
_OF_MXFP4 = "_blocks"
# As files call dtypes.
_INTEGERS = ("I", "U", "BOOL")


def load(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load the values of `model`, in place, from files in blockwise FP8 or NVFP4, or plain ones; tensor by tensor.

    FP8: blocks of 128×128, scales in f32 (DeepSeek-V3), e8m0 (DeepSeek-V4), or f32 or bf16 (compressed-tensors); a
    scale of zero is read where all codes of its block are zeros, as that of a block of zeros. NVFP4: as
    compressed-tensors and NVIDIA's Model Optimizer have it.
    A quantized Parameter takes payload and scales as they are in the files, where these have its blocks: 128×128, or
    in NVFP4 one scale for 16 rows, and one tensor scale for all that the Parameter holds. Else a weight gets the
    values that the files stand for, in its dtype.
    `load`, then `export` in the files' format, repeats every byte of what `export` wrote of this model if
      - `power_of_2_scales` of the model is that of the files, whether or not these say `scale_fmt`: else a warning
        names the config that fits. Quantized Parameters with other scales take powers of two as they are;
      - master weights are in fp32, or in the dtype of those that were exported. In bf16 or fp16 they repeat files of
        fp32 ones except for scales in fp32 that are no powers of two, which may change in the last place;
      - experts' projections have multiples of 128 rows: a block of others lies in two of them;
      - in NVFP4, blocks of master weights have a value above 3.5e-5 of the largest one that their tensor scale is for:
        the scales of others are subnormal.
    Of other tools' files it repeats those of quantized Parameters, except scales of zero, and of master weights those
    of blocks whose scale is what their largest value leads to.
    Names are those that transformers writes. Tied weights may be missing; layers that transformers passes over, as
    those that predict further tokens, and scales of activations and of an engine's cache may be there.
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
    passed_over = hugging_face.passed_over(model) | {OF_AN_ENGINE}
    _check_names(files, there, {part.name for parts in wanted.values() for part in parts}, passed_over)
    for name, x in tensors.items():
        for part in wanted[name]:
            stored.check(files, part.name, part.of(torch.empty(x.shape, device="meta")).shape)
            _check_kind(files, part.name, x)
        writes.append(_writing(files, x, wanted[name]))
    _warn_of_scales(files, tensors, wanted)
    return writes


def _check_kind(files: Files, name: str, x: torch.Tensor) -> None:
    """Raise ValueError where files have integers, codes of an unknown format, for numbers of the model, or reverse."""
    if stored.is_quantized(files, name):
        return
    if (dtype := files.dtype(name)).startswith(_INTEGERS) == x.is_floating_point():
        remedy = "files of such a format are not read, take them dequantized"
        raise ValueError(
            f"load: {files.where(name)} is in {dtype}, the model wants {x.dtype}; "
            f"{remedy if x.is_floating_point() else 'take files of this model'}"
        )


def _check_names(files: Files, there: set[str], wanted: set[str], passed_over: set[str]) -> None:
    others = (name for name in there - wanted if not any(re.search(pattern, name) for pattern in passed_over))
    missing, unknown = sorted(wanted - there), sorted(others)
    if missing:
        if codes := next((name + _OF_MXFP4 for name in missing if name + _OF_MXFP4 in there), None):
            raise KeyError(f"load: {files.where(codes)} is of MXFP4, which is not read; {stored.TAKE_PLAIN}")
        if codes := next(
            (name + nvfp4_packed.PAYLOAD for name in missing if name + nvfp4_packed.PAYLOAD in there), None
        ):
            raise ValueError(
                f"load: {files.where(codes)} is in {files.dtype(codes)}, and packed codes of NVFP4 are bytes (U8) with "
                "scales; copy the file again, or export the model again"
            )
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
        if held is None or held.fmt is not x.fmt or (has_power_of_2_scales(x) and not held.power_of_2_scales):
            return None
        part.of(made.qdata).copy_(held.qdata)
        part.in_blocks(rows).of(made.scale).copy_(held.scale)
        if x.global_scale is not None:
            if tensor_scale is not None and not torch.equal(tensor_scale, held.global_scale):
                return None
            tensor_scale = held.global_scale
            made.global_scale.copy_(tensor_scale)
    return made


def _warn_of_scales(files: Files, tensors: dict[str, torch.Tensor], wanted: dict[str, list[Part]]) -> None:
    """Warn where files have scales that are powers of two and the model trains with others, or the reverse."""
    kinds: dict[tuple[bool, bool], str] = {}
    for name, x in tensors.items():
        local: Any = _compat.local_of(x)
        is_master = isinstance(local, MasterWeightTensor)
        fmt = local.config.weight_format if is_master else getattr(local, "fmt", None)
        if fmt is not fp8_block.FORMAT:
            continue
        for part in wanted[name]:
            in_files = stored.has_powers_of_2(files, part.name)
            # A quantized Parameter takes any scales, if they need not be powers of two.
            if in_files is not None and (is_master or has_power_of_2_scales(local)):
                kinds.setdefault((in_files, has_power_of_2_scales(local)), part.name)
    # All scales of a weight may be powers of two by chance.
    if (True, False) in kinds and (False, False) not in kinds:
        name, theirs, option = kinds[True, False], "powers of two", True
    elif (False, True) in kinds:
        name, theirs, option = kinds[False, True], "not powers of two", False
    else:
        return
    warnings.warn(
        f"load: scales of {files.where(name)} are {theirs}, and those that the model trains with are"
        f"{' not' * option}: GEMMs and exports get other codes than the files have; to keep them convert the model "
        f"with BlockwiseFP8TrainingConfig(power_of_2_scales={option})",
        stacklevel=2,
    )
