"""The cast of weights that several ranks hold: block amaxes, one MAX all-reduce, scales, payload.

    shards ─ amax of block ∩ shard ─▶ one buffer ─ MAX over ranks ─▶ scales, equal on all ranks ─▶ payload of shards

FP8 shards that cut no block are read once: amaxes and payload are written together, and only the scales wait for the
other ranks. With FSDP2 most shards are of this kind.

The cast is the same for master weights that FSDP2 shards, for quantized Parameters, and for masters that a program has
split itself. MAX is exact, so for every split the result is bitwise identical to the whole weight quantized at once.
Amaxes are reduced as integers, magnitudes viewed as int32, because a MAX of floats loses NaN.

A shard of dim 0 is a flat range of the weight, which may begin and end inside blocks. All such shards go through one
call. A shard of another dim is not a flat range. It is quantized as a separate tensor, its frame, which zeros extend to
the border of a block; the blocks of the frame are a part of the weight's grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchao_blockwise.distributed.rank_consistency import name_absent_ranks
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops import Backend, casting_backend
from torchao_blockwise.ops.shards import block_scales_op, partial_block_amax_op, partial_cast_op, whole_block_cast_op
from torchao_blockwise.ops.shards.flat import Shards, cuts_no_block
from torchao_blockwise.tensors import QuantizedShard


class WeightOptions(NamedTuple):
    """The options that all weights of one call share. dtype: the dtype to which values are rounded first."""

    fmt: BlockFormat
    power_of_2_scales: bool
    dtype: torch.dtype
    backend: Backend | None = None

    def __str__(self) -> str:
        return f"{self.fmt.name} of {self.dtype}" + ", power-of-2 scales" * self.power_of_2_scales


class PartialCast(NamedTuple):
    """The tensors that a rank reads and writes to quantize its shard of a weight.

    shape: of the whole weight [.., N, K]. values: of the shard, contiguous, maybe offloaded; flat [n] if `dim` is 0;
        None if other ranks have all of them.
    start: index in the flat weight of the first value; if `dim` is not 0, its index in that dim.
    target: contiguous bytes of the payload entries of the shard; if `dim` is not 0, in its shape. May be None if
        `values` is None.
    scale: an entry for each block of the whole weight, contiguous. With `split_groups`, one more entry, which holds the
        amax of the whole tensor during the cast.
    global_scale: f32 of one element, or of one for each matrix [N, K] of the weight.
    split_groups: the process groups over which tensor parallelism splits the tensor that has the global scale.
    first_block: index of the weight's first block in the buffers of all blocks; `run_partial_casts` sets it.
    """

    options: WeightOptions
    shape: tuple[int, ...]
    values: torch.Tensor | None
    start: int
    target: torch.Tensor | None
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    dim: int = 0
    split_groups: tuple[dist.ProcessGroup, ...] = ()
    first_block: int = 0


def cast_of_shard(shard: QuantizedShard, values: torch.Tensor) -> PartialCast:
    """Return the cast of `values`, in the shape of `shard`, into `shard`."""
    layout, config = shard.part, shard.part.config
    options = WeightOptions(shard.fmt, config.power_of_2_scales, layout.dtype, casting_backend(config.backend))
    payload, start = shard.qdata.view(torch.uint8), layout.start
    if layout.dim == 0:
        values, payload = values.reshape(-1), payload.view(-1)
        start *= torch.Size(layout.shape[1:]).numel()
    scales = shard.scale, shard.global_scale
    return PartialCast(options, layout.shape, values, start, payload, *scales, layout.dim)


def run_partial_casts(casts: Sequence[PartialCast], group: dist.ProcessGroup | None, subject: str, what: str) -> None:
    """Write payload and scales; a collective.

    casts: of the same weights on every rank of `group`, all on one device. group: the ranks that hold them, None if
        this rank holds all. subject, what: for errors of the all-reduce, as in `name_absent_ranks`.
    One MAX all-reduce of 4 bytes per block. The number of launches does not grow with the list. Does not synchronize.
    """
    if not casts:
        return
    *first_blocks, blocks = itertools.accumulate((cast.scale.numel() for cast in casts), initial=0)
    casts = [cast._replace(first_block=first) for cast, first in zip(casts, first_blocks)]
    device = casts[0].scale.device
    bits = torch.zeros(blocks, dtype=torch.int32, device=device)
    waiting = []
    for batch in _batches(casts, device):
        cast, backend = batch[0], batch[0].options.backend
        if _is_of_whole_blocks(cast):
            shards = _shards(batch, device)
            whole_block_cast_op(_targets(batch), bits, shards, cast.options.power_of_2_scales, backend)
            continue
        if cast.dim:
            frame, _ = _frame(cast, device)
            of_part = _part_of_grid(cast, bits)
            of_frame = torch.zeros_like(of_part, memory_format=torch.contiguous_format).view(-1)
            partial_block_amax_op(of_frame, _whole(frame, cast.options), backend)
            of_part.copy_(of_frame.view(of_part.shape))
        else:
            partial_block_amax_op(bits, _shards(batch, device), backend)
        waiting.append(batch)
    if group is not None and group.size() > 1 and blocks:
        with name_absent_ranks(subject, what, group):
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    _reduce_tensor_amaxes(casts, bits)
    encode = torch.empty_like(bits, dtype=torch.float32)
    for options in dict.fromkeys(cast.options for cast in casts):
        alike = [cast for cast in casts if cast.options == options]
        block_scales_op(
            encode,
            [cast.scale for cast in alike],
            [cast.global_scale for cast in alike if cast.global_scale is not None],
            bits,
            [cast.first_block for cast in alike],
            options.fmt,
            options.power_of_2_scales,
            options.backend,
        )
    for batch in waiting:
        _write_payload(batch, encode)
    # Kernels do not count what they write, and autograd must notice that saved values are gone.
    written = [x for cast in casts for x in (cast.scale, cast.global_scale) if x is not None]
    written += [cast.target for cast in casts if cast.values is not None and cast.target is not None]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _batches(casts: Sequence[PartialCast], device: torch.device) -> list[list[PartialCast]]:
    """Group casts by call. Frames and offloaded values go one by one, so that only one copy is on the device."""
    batches: dict[tuple[WeightOptions, bool, int | None], list[PartialCast]] = {}
    for cast in casts:
        if cast.values is not None:
            single = cast.first_block if cast.dim or cast.values.device != device else None
            batches.setdefault((cast.options, _is_of_whole_blocks(cast), single), []).append(cast)
    return list(batches.values())


def _is_of_whole_blocks(cast: PartialCast) -> bool:
    """Whether the payload can be written before the all-reduce."""
    fmt = cast.options.fmt
    if cast.values is None or cast.dim or fmt.has_global_scale:
        return False
    return cuts_no_block(cast.start, cast.values.numel(), cast.shape, fmt)


def _write_payload(batch: list[PartialCast], encode: torch.Tensor) -> None:
    """Write the payload: values times the `encode` of their blocks, rounded to elements."""
    cast, options = batch[0], batch[0].options
    if not cast.dim:
        partial_cast_op(_targets(batch), _shards(batch, encode.device), encode, options.backend)
        return
    frame, border = _frame(cast, encode.device)
    element, columns = options.fmt.element, frame.shape[-1]
    payload = torch.empty(options.fmt.qdata_shape(*frame.shape), dtype=torch.uint8, device=frame.device)
    factors = _part_of_grid(cast, encode).clone(memory_format=torch.contiguous_format).view(-1)
    partial_cast_op([payload.view(-1)], _whole(frame, options), factors, options.backend)
    assert cast.target is not None and cast.values is not None
    codes = element.unpack(payload, columns).narrow(cast.dim, border, cast.values.shape[cast.dim])
    cast.target.copy_(codes if element.per_byte == 1 else element.pack(codes))


def _shards(batch: list[PartialCast], device: torch.device) -> Shards:
    """Return the flat shards of a batch, on the device."""
    values = [cast.values.to(device, non_blocking=True) for cast in batch if cast.values is not None]
    starts, shapes, firsts = zip(*((cast.start, cast.shape, cast.first_block) for cast in batch))
    return Shards.of(values, starts, shapes, batch[0].options.dtype, batch[0].options.fmt, firsts)


def _whole(frame: torch.Tensor, options: WeightOptions) -> Shards:
    return Shards.of([frame.view(-1)], [0], [frame.shape], options.dtype, options.fmt)


def _targets(batch: list[PartialCast]) -> list[torch.Tensor]:
    return [cast.target for cast in batch if cast.target is not None]


def _frame(cast: PartialCast, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return (values after zeros that complete their first block, the number of these zeros along the dim)."""
    assert cast.values is not None
    values = cast.values.to(device, non_blocking=True)
    border = cast.start % _block(cast)
    if not border:
        return values.contiguous(), 0
    return F.pad(values, [0, 0] * (values.dim() - 1 - cast.dim) + [border, 0]), border


def _part_of_grid(cast: PartialCast, of_blocks: torch.Tensor) -> torch.Tensor:
    """Return a view of the blocks that the frame covers, in a buffer with one value for each block."""
    assert cast.values is not None
    block = _block(cast)
    *batch, rows, columns = cast.shape
    shape = torch.Size([*batch, *cast.options.fmt.grid(rows, columns)])
    grid = of_blocks[cast.first_block : cast.first_block + shape.numel()].view(shape)
    begin, end = cast.start // block, cast.start + cast.values.shape[cast.dim]
    return grid.narrow(cast.dim, begin, -(-end // block) - begin)


def _block(cast: PartialCast) -> int:
    """Return the size of a block along the dim of the shard."""
    rows, columns = cast.options.fmt.block
    return {-1: columns, -2: rows}.get(cast.dim - len(cast.shape), 1)


def _reduce_tensor_amaxes(casts: Sequence[PartialCast], bits: torch.Tensor) -> None:
    """Write the amax of each tensor that tensor parallelism has split to the additional entry of its shards."""
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for cast in casts:
        of_weight = bits[cast.first_block : cast.first_block + cast.scale.numel()]
        for group in cast.split_groups:
            by_group.setdefault(group, []).append(of_weight)
    for group, blocks in by_group.items():
        amaxes = torch.stack([of_weight.amax() for of_weight in blocks])
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for of_weight, amax in zip(blocks, amaxes.unbind()):
            of_weight[-1].copy_(amax)
