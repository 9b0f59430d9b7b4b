"""Partial cast: quantised model weights written from shards of their high-precision masters.

    my masters ─ amax of block ∩ shard ─▶ one buffer ─ MAX over ranks ─▶ scales, alike on every rank ─▶ my payload

For flat shards of ZeRO-1, ZeRO-2 and FSDP: a rank owns the elements [start, start + n) of a weight, wherever that cuts
rows, blocks or bytes. The bits are those of casting the gathered master to the weight's dtype and quantising it whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchao_blockwise import _compat
from torchao_blockwise.distributed.absence import naming_absent
from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, get_format
from torchao_blockwise.ops import partial_cast as ops
from torchao_blockwise.tensors import BlockwiseFP8Tensor, NVFP4Tensor, QuantizedTensor


def cast_master_weights_to_fp8(
    model_weights: Sequence[BlockwiseFP8Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Quantise masters into `model_weights`, each rank the elements that it owns; scales alike on every rank.

    model_weights: [.., h, w], the same list on every rank of `group`; leading dims, such as experts, hold matrices with
        blocks of their own. Their dtype is what masters are rounded to first; scale grids are written whole.
    master_weights: flat [n] bf16 | f16 | f32, contiguous, or None where other ranks own the weight.
    start_offsets: element of the flat weight that the master begins with, or None without one.
    group: ranks that share the masters; None is the default group, or this process alone where there is none.
    fsdp_shard_model_weights: flat [n] uint8 or e4m3 buffers that take the payload in place of the weights' own.
    One MAX all-reduce for the whole call, of 4 bytes a block, and launches that do not grow with the list; nothing
    waits for the device. What no rank owns counts as zeros; NaN and Inf reach every rank's scales.

    Raises TypeError for a weight or master of another kind, ValueError for sizes, offsets, devices, or where ranks
    differ in their weights, RuntimeError where a rank does not come: all name the weight, the latter two the rank.
    A new list of weights is compared between ranks once, at the first call with it.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3; docs/numerics.md, "Partial cast".
    """
    name = "cast_master_weights_to_fp8"
    _check_kind(name, model_weights, BlockwiseFP8Tensor)
    _cast(name, model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights, ops.ENTRIES)


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[NVFP4Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    *,
    one_code_a_byte: bool = False,
) -> None:
    """`cast_master_weights_to_fp8` for NVFP4 weights in blocks of 16×16; global scales are written too.

    fsdp_shard_model_weights: flat uint8 buffers of the bytes that hold the shard, `ops.shard_entries` of them. The
        first and the last may be shared with a neighbour, whose nibble stays; `ops.merge_shards_` joins gathered ones.
    one_code_a_byte: the buffers are [n], a code in the low bits of a byte, for gathers that split between any elements.
    """
    name = "cast_master_weights_to_nvfp4"
    _check_kind(name, model_weights, NVFP4Tensor)
    into = ops.CODES if one_code_a_byte else ops.ENTRIES
    _cast(name, model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights, into)


def cast_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    *,
    one_code_a_byte: bool = False,
) -> None:
    """`cast_master_weights_to_fp8` and `_to_nvfp4` in one: weights of any formats and dtypes, still one all-reduce."""
    name = "cast_master_weights"
    _check_kind(name, model_weights, QuantizedTensor)
    into = ops.CODES if one_code_a_byte else ops.ENTRIES
    _cast(name, model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights, into)


class _Kind(NamedTuple):
    """What weights share that one launch can work on."""

    format: str
    dtype: torch.dtype
    power_of_2_scales: bool

    @property
    def fmt(self) -> BlockFormat:
        return get_format(self.format)

    def __str__(self) -> str:
        return f"{self.format} of {self.dtype}" + ", power-of-2 scales" * self.power_of_2_scales


# Given as a group: this process has whole masters, whatever other ranks do.
ALONE: Any = object()

# All that ranks must have in common: kind and shape of each weight.
_Layout = tuple[tuple[_Kind, tuple[int, ...]], ...]
# The layouts that the ranks of a group have compared.
_agreed: WeakKeyDictionary = WeakKeyDictionary()


class _Plan(NamedTuple):
    """Where each weight's blocks begin in the buffer, how many all have, and the weights of each kind."""

    first_blocks: list[int]
    blocks: int
    kinds: dict[_Kind, list[int]]


@functools.lru_cache(maxsize=64)
def _plan(layout: _Layout) -> _Plan:
    counts = [ops.block_count(shape, kind.fmt) for kind, shape in layout]
    *first_blocks, blocks = itertools.accumulate(counts, initial=0)
    kinds: dict[_Kind, list[int]] = {}
    for i, (kind, _) in enumerate(layout):
        kinds.setdefault(kind, []).append(i)
    return _Plan(first_blocks, blocks, kinds)


def _cast(*args) -> None:
    # Attributes of subclasses would take a detour of 1 µs each, a third of the host's time for a long list.
    with _compat.no_torch_function():
        _cast_list(*args)


def _cast_list(name: str, weights, masters, starts, group, shards, into: str) -> None:
    _check_lists(name, weights, masters, starts, shards)
    if not weights:
        return
    group = _group(name, group)
    layout = tuple((_kind(w), tuple(w.whole_shape)) for w in weights)
    for i, w in enumerate(weights):
        refusal = _why_not(w, masters[i], starts[i], weights[0].device)
        if refusal is None and shards is not None and masters[i] is not None:
            refusal = _why_not_into(shards[i], w, masters[i], starts[i], into)
        if refusal is not None:
            error, reason = refusal
            raise error(f"{name}: weight {i} ({type(w).__name__}, shape {list(w.whole_shape)}) {reason}")
    _check_agreement(name, layout, group)

    plan = _plan(layout)
    into = ops.WHOLE if shards is None else into
    targets = [w.qdata for w in weights] if shards is None else shards
    mine = {kind: [i for i in indices if masters[i] is not None] for kind, indices in plan.kinds.items()}
    amax_bits = torch.zeros(plan.blocks, dtype=torch.int32, device=weights[0].device)

    def of(values, indices):
        return [values[i] for i in indices]

    for kind, indices in mine.items():
        shapes = [weights[i].whole_shape for i in indices]
        first_blocks = of(plan.first_blocks, indices)
        ops.partial_block_amax(
            of(masters, indices), of(starts, indices), shapes, kind.fmt,
            dtype=kind.dtype, out=amax_bits, first_blocks=first_blocks,
        )  # fmt: skip
    if group is not None and plan.blocks:
        with naming_absent(name, f"reduce the amaxes of {len(weights)} weights", group):
            dist.all_reduce(amax_bits, op=dist.ReduceOp.MAX, group=group)
    encode = torch.empty_like(amax_bits, dtype=torch.float32)
    for kind, indices in plan.kinds.items():
        ops.block_scales_(
            [weights[i].scale for i in indices],
            [weights[i].global_scale for i in indices] if kind.fmt.has_global_scale else None,
            amax_bits, kind.fmt,
            power_of_2_scales=kind.power_of_2_scales, first_blocks=of(plan.first_blocks, indices), encode=encode,
        )  # fmt: skip
        own = mine[kind]
        shapes = [weights[i].whole_shape for i in own]
        ops.partial_cast_(
            of(targets, own), of(masters, own), of(starts, own), shapes, encode, kind.fmt,
            dtype=kind.dtype, into=into, first_blocks=of(plan.first_blocks, own),
        )  # fmt: skip
    _note_changes(weights, [targets[i] for indices in mine.values() for i in indices])


def _kind(w: QuantizedTensor) -> _Kind:
    return _Kind(w.fmt.name, w.values_dtype, getattr(w, "power_of_2_scales", False))


def _group(name: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to reduce over; None where this process is alone."""
    if group is ALONE:
        return None
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise ValueError(f"{name}: rank {dist.get_rank()} is not in the group; call it on the group's ranks alone")
    return group if dist.get_world_size(group) > 1 else None


def _check_agreement(name: str, layout: _Layout, group: dist.ProcessGroup | None) -> None:
    """Once for a layout: the buffer of amaxes means the same on all ranks only if their weights are the same."""
    if group is None:
        return
    agreed = _agreed.setdefault(group, set())
    if layout not in agreed:
        entries = [f"weight {i} ({kind}, shape {list(shape)})" for i, (kind, shape) in enumerate(layout)]
        check_same(name, sorted(dist.get_process_group_ranks(group)), entries)
        agreed.add(layout)


def _note_changes(weights, targets) -> None:
    """Autograd must see that values which it saved are gone; kernels do not count what they write."""
    written = [*weights, *targets]
    for w in weights:
        written += [w.scale] if w.global_scale is None else [w.scale, w.global_scale]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_kind(name: str, weights, wanted: type) -> None:
    for i, w in enumerate(weights):
        if not isinstance(w, wanted):
            raise TypeError(
                f"{name}: weight {i} must be a {wanted.__name__}, got {type(w).__name__}; weights of several kinds go "
                f"through {cast_master_weights.__module__}.cast_master_weights"
            )


def _check_lists(name: str, weights, masters, starts, shards) -> None:
    sizes = [len(x) for x in (weights, masters, starts, *(() if shards is None else (shards,)))]
    if len(set(sizes)) > 1:
        raise ValueError(f"{name}: all lists must have an entry a weight, got lengths {sizes}")
    first: dict[int, int] = {}
    for i, w in enumerate(weights):
        if first.setdefault(id(w), i) != i:
            raise ValueError(f"{name}: weight {i} is the same tensor as weight {first[id(w)]}; list a tied weight once")


def _why_not(w: QuantizedTensor, master, start, device) -> tuple[type[Exception], str] | None:
    """The error that a weight and its master are refused with, or None."""
    if not w.fmt.is_square:
        rows, columns = w.fmt.block
        return ValueError, f"has blocks of {rows}x{columns}; make it with square blocks"
    if not (w.qdata.is_contiguous() and w.scale.is_contiguous()):
        return ValueError, "is a view that is not contiguous; pass the weight that it is a view of"
    if w.device != device:
        return ValueError, f"is on {w.device}, the first one on {device}; make a call a device"
    if (master is None) != (start is None):
        got = "no master" if master is None else "a master"
        return ValueError, f"has {got} and start offset {start}; give both or neither"
    if master is None:
        return None
    if master.dtype not in HIGH_PRECISION_DTYPES:
        return TypeError, f"needs a master of bfloat16, float16 or float32, got {master.dtype}; cast it first"
    if master.dim() != 1 or not master.is_contiguous():
        got = f"shape {list(master.shape)} with strides {list(master.stride())}"
        return ValueError, f"needs a flat, contiguous master, got {got}; flatten it"
    if master.device != device:
        return ValueError, f"is on {device}, its master on {master.device}; move the master there"
    end, numel = start + master.numel(), math.prod(w.whole_shape)
    if not 0 <= start <= end <= numel:
        return ValueError, f"has {numel} elements, its master claims [{start}, {end})"
    return None


def _why_not_into(shard, w: QuantizedTensor, master, start: int, into: str) -> tuple[type[Exception], str] | None:
    """The error that a shard buffer is refused with, or None."""
    wanted = ops.target_size(master.numel(), start, w.whole_shape, w.fmt, into)
    if shard is None or shard.itemsize != 1 or shard.shape != (wanted,) or shard.device != w.device:
        got = "none" if shard is None else f"{shard.dtype} of shape {list(shard.shape)} on {shard.device}"
        elements = f"elements [{start}, {start + master.numel()})"
        return ValueError, f"needs a flat shard of {wanted} bytes on {w.device} for {elements}, got {got}"
    if not shard.is_contiguous():
        return ValueError, f"needs a contiguous shard, got strides {list(shard.stride())}"
    return None
