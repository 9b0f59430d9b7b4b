"""Partial cast: write quantized model weights from shards of their high-precision masters, with `cast.py`.

It supports the flat shards of ZeRO-1, ZeRO-2 and FSDP: a rank owns the elements [start, start + n) of a weight, which
may cut rows, blocks or bytes. The result is bitwise identical to casting the gathered master to the weight's dtype and
quantizing it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchao_blockwise import _compat, ops
from torchao_blockwise.distributed.cast import PartialCast, WeightOptions, run_partial_casts
from torchao_blockwise.distributed.rank_consistency import check_same_once
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.tensors import BlockwiseFP8Tensor, NVFP4Tensor, QuantizedTensor


def cast_master_weights_to_fp8(
    model_weights: Sequence[BlockwiseFP8Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Quantize masters into `model_weights`. Each rank writes the elements that it owns, and all scales.

    model_weights: [.., h, w], the same list on every rank of `group`. Each matrix of the leading dims, such as experts,
        has separate blocks. Masters are first rounded to the dtype of the weight.
    master_weights: flat [n] bf16 | f16 | f32, contiguous, or None if other ranks own the weight.
    start_offsets: index in the flat weight of the master's first element, or None without a master.
    group: ranks that share the masters. None is the default group, or only this process without one.
    fsdp_shard_model_weights: flat [n] uint8 or e4m3 buffers for the payload, which then is not written to the weights.
    One MAX all-reduce of 4 bytes per block for the whole call. The number of launches does not grow with the list. Does
    not synchronize. Elements that no rank owns count as zeros. NaN and Inf reach the scales of all ranks.

    Raises TypeError for a weight or master of another kind; ValueError for sizes, offsets and devices, and if ranks
    have different weights; RuntimeError if a rank is missing. All name the weight, and the latter two the rank. Ranks
    compare their weights in the first call with a list.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3; docs/numerics.md, "Partial cast".
    """
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    _cast("cast_master_weights_to_fp8", BlockwiseFP8Tensor, *lists, group)


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[NVFP4Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """`cast_master_weights_to_fp8` for NVFP4 weights in blocks of 16×16; global scales are written too.

    fsdp_shard_model_weights: flat uint8 buffers for the bytes of the shard; `ops.shard_entries` gives their number.
        The first and the last byte may be shared with a neighbor, whose nibble does not change; `ops.merge_shards_`
        joins gathered buffers.
    """
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    _cast("cast_master_weights_to_nvfp4", NVFP4Tensor, *lists, group)


def cast_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """`cast_master_weights_to_fp8` for weights of any formats and dtypes, with one all-reduce for all."""
    lists = model_weights, master_weights, start_offsets, fsdp_shard_model_weights
    _cast("cast_master_weights", QuantizedTensor, *lists, group)


def _cast(
    name: str,
    kind: type[QuantizedTensor],
    weights: Sequence[QuantizedTensor],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    targets: Sequence[torch.Tensor | None] | None,
    group: dist.ProcessGroup | None,
) -> None:
    sizes = [len(x) for x in (weights, masters, starts, *(() if targets is None else (targets,)))]
    if len(set(sizes)) > 1:
        raise ValueError(f"{name}: all lists must have an entry for each weight, got lengths {sizes}")
    first: dict[int, int] = {}
    # Reading attributes of subclasses would take 1 µs each, a third of the host time for a long list.
    with _compat.no_torch_function():
        for i, (w, master, start) in enumerate(zip(weights, masters, starts)):
            if not isinstance(w, kind):
                raise TypeError(
                    f"{name}: weight {i} must be a {kind.__name__}, got {type(w).__name__}; for several kinds, "
                    f"use {cast_master_weights.__module__}.cast_master_weights"
                )
            if (before := first.setdefault(id(w), i)) != i:
                raise ValueError(f"{name}: weight {i} is the same tensor as weight {before}; list a tied weight once")
            target = w.qdata if targets is None else targets[i]
            if (refusal := _why_not(w, master, start, weights[0].device, target)) is not None:
                error, reason = refusal
                raise error(f"{name}: weight {i} ({type(w).__name__}, shape {list(w.shape)}) {reason}")
    if weights:
        group = own_group(name, group)
        if group is not None:
            _check_same_weights(name, weights, group)
        write_masters(name, weights, masters, starts, group, targets)


def _check_same_weights(name: str, weights: Sequence[QuantizedTensor], group: dist.ProcessGroup) -> None:
    """Raise in the first call with such a list and group if ranks differ: amaxes are reduced by position."""
    with _compat.no_torch_function():
        layout = tuple((_options(w), tuple(w.shape)) for w in weights)
    entries = (f"weight {i} ({options}, shape {list(shape)})" for i, (options, shape) in enumerate(layout))
    check_same_once(name, group, layout, entries)


def write_masters(
    name: str,
    weights: Sequence[QuantizedTensor],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: dist.ProcessGroup | None,
    targets: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """`cast_master_weights` without its checks, for ranks with the same weights. name: the caller's name, for errors.

    group: ranks that share the masters, or None if this process has whole ones.
    targets: buffers for the payloads, None for the weights themselves.
    """
    with _compat.no_torch_function():
        if targets is None:
            targets = list(map(_own_entries, weights, masters, starts))
        casts = [
            PartialCast(_options(w), tuple(w.shape), master, start or 0, target, w.scale, w.global_scale)
            for w, master, start, target in zip(weights, masters, starts, targets)
        ]
        run_partial_casts(casts, group, name, f"reduce the amaxes of {len(weights)} weights")
        torch.autograd.graph.increment_version([w for w in weights if not w.is_inference()])


def _own_entries(w: QuantizedTensor, master: torch.Tensor | None, start: int | None) -> torch.Tensor:
    """Return the payload entries of `w` with the elements of `master`."""
    if master is None or master.numel() == w.numel():
        return w.qdata
    first, count = ops.shard_entries(start or 0, master.numel(), w.shape[-1], w.fmt)
    return w.qdata.view(-1)[first : first + count]


def _options(w: QuantizedTensor) -> WeightOptions:
    return WeightOptions(w.fmt, getattr(w, "power_of_2_scales", False), w.dtype)


def own_group(name: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return `group`, by default that of all ranks; None if there is only this process."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in the group; call it only on the group's ranks")
    return group


# --- checks -----------------------------------------------------------------------------------------------------------


def why_not_written(w: QuantizedTensor) -> str | None:
    """Return why a cast cannot write the payload and the scales of `w`, or None if it can."""
    if not w.fmt.is_square:
        rows, columns = w.fmt.block
        return f"has blocks of {rows}x{columns}; create it with square blocks"
    if not (w.qdata.is_contiguous() and w.scale.is_contiguous()):
        return "is a view that is not contiguous; pass the original weight"
    return None


def _why_not(
    w: QuantizedTensor,
    master: torch.Tensor | None,
    start: int | None,
    device: torch.device,
    target: torch.Tensor | None,
) -> tuple[type[Exception], str] | None:
    """Return the error (type, reason) for a weight, its master and the buffer for its payload, or None."""
    if (reason := why_not_written(w)) is not None:
        return ValueError, reason
    if w.device != device:
        return ValueError, f"is on {w.device}, but the first one on {device}; use one call for each device"
    if master is None and start is None:
        return None
    if master is None or start is None:
        got = "no master" if master is None else "a master"
        return ValueError, f"has {got} and start offset {start}; pass both or neither"
    if master.dtype not in HIGH_PRECISION_DTYPES:
        return TypeError, f"needs a master of bfloat16, float16 or float32, got {master.dtype}; cast it first"
    if master.dim() != 1 or not master.is_contiguous():
        got = f"shape {list(master.shape)} with strides {list(master.stride())}"
        return ValueError, f"needs a flat, contiguous master, got {got}; flatten it"
    if master.device != device:
        return ValueError, f"is on {device}, but its master on {master.device}; move the master to {device}"
    end, numel = start + master.numel(), math.prod(w.shape)
    if not 0 <= start <= end <= numel:
        return ValueError, f"has {numel} elements, but its master is for [{start}, {end})"
    if target is w.qdata:
        return None
    _, size = ops.shard_entries(start, master.numel(), w.shape[-1], w.fmt)
    got = "none"
    if target is not None:
        fits = target.itemsize == 1 and target.shape == (size,) and target.device == device
        if fits and target.is_contiguous():
            return None
        got = f"{target.dtype} of shape {list(target.shape)} with strides {list(target.stride())} on {target.device}"
    return ValueError, f"needs a flat shard of {size} bytes on {device} for elements [{start}, {end}), got {got}"
