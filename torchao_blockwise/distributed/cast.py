"""The cast of weights that ranks share: amaxes of all blocks, one MAX over the ranks, scales, payload.

    parts ─ amax of block ∩ part ─▶ one buffer ─ MAX over ranks ─▶ scales, alike on every rank ─▶ payload of the parts

FP8 parts that cut no block, which is what FSDP2 makes of most weights, are read once: their amaxes and their payload
are written together, and only the scales wait for the ranks.

It is the same for the master weights that FSDP2 shards, for quantized Parameters, and for masters that a program has
split by itself. MAX is exact, so the result is bitwise identical to the whole weight quantized at once, for every
split. Amaxes travel as integers, the bits of magnitudes: among floats a MAX loses a NaN.

A part of dim 0 is a flat range of the weight, whatever blocks it cuts, and all such parts go through one call. A part
of another dim is not: it is quantized as a separate tensor, its frame, begun at a block border by zeros, whose blocks
are a part of the weight's grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchao_blockwise.distributed.rank_consistency import naming_absent
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops import Backend, casting_backend
from torchao_blockwise.ops.shards import (
    block_scales_op,
    partial_block_amax_op,
    partial_cast_op,
    whole_block_cast_op,
)
from torchao_blockwise.ops.shards.flat import CODES, ENTRIES, Shards, cuts_no_block
from torchao_blockwise.tensors import QuantizedShard


class Recipe(NamedTuple):
    """The options that weights quantized by one call share. dtype: what values are rounded to first."""

    fmt: BlockFormat
    power_of_2_scales: bool
    dtype: torch.dtype
    backend: Backend | None = None

    def __str__(self) -> str:
        return f"{self.fmt.name} of {self.dtype}" + ", power-of-2 scales" * self.power_of_2_scales


class Part(NamedTuple):
    """A rank's part of a weight, and where its cast goes.

    shape: of the whole weight [.., N, K]. values: the rank's, contiguous, maybe offloaded; flat [n] if `dim` is 0; None
        where other ranks have them all.
    start: index in the flat weight of the first value, or, if `dim` is not 0, its index in that dim.
    target: contiguous bytes of the payload, as `partial_cast_op` writes them by `into`; of the part only, in its
        shape, if `dim` is not 0. May be None without values.
    scale: an entry a block of the whole weight, contiguous; with `split_groups` one more, of no meaning: for the amax
        of the whole tensor.
    global_scale: f32 of one element, or of one for each matrix [N, K] of the weight.
    split_groups: groups of ranks over which tensor parallelism has split the tensor that has the global scale.
    """

    recipe: Recipe
    shape: tuple[int, ...]
    values: torch.Tensor | None
    start: int
    target: torch.Tensor | None
    into: str
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    dim: int = 0
    split_groups: tuple[dist.ProcessGroup, ...] = ()


# A part, and where its weight's blocks begin in the buffers of all blocks.
_Placed = tuple[Part, int]


def shard_part(shard: QuantizedShard, values: torch.Tensor) -> Part:
    """The part of a weight that `shard` holds, to be made of `values`, in its shape."""
    layout, config = shard.part, shard.part.config
    recipe = Recipe(shard.fmt, config.power_of_2_scales, layout.dtype, casting_backend(config.backend))
    payload, start = shard.qdata.view(torch.uint8), layout.start
    if layout.dim == 0:
        values, payload = values.reshape(-1), payload.view(-1)
        start *= torch.Size(layout.shape[1:]).numel()
    scales = shard.scale, shard.global_scale
    return Part(recipe, layout.shape, values, start, payload, ENTRIES, *scales, layout.dim)


def cast_parts(parts: Sequence[Part], group: dist.ProcessGroup | None, subject: str, what: str) -> None:
    """Write the payload of `parts` and the scales of their weights; a collective.

    parts: of the same weights on every rank of `group`, of one device. group: the ranks that share them, None if this
        rank has all. subject, what: name the all-reduce where it fails, as `naming_absent` takes them.
    One MAX all-reduce of 4 bytes a block; the number of launches does not grow with the list, and nothing waits.
    """
    *first_blocks, blocks = itertools.accumulate((part.scale.numel() for part in parts), initial=0)
    if not parts:
        return
    placed = list(zip(parts, first_blocks))
    device = parts[0].scale.device
    bits = torch.zeros(blocks, dtype=torch.int32, device=device)
    waiting = []
    for batch in _batches(placed, device):
        if _is_of_whole_blocks(batch[0][0]):
            _cast_whole_blocks(batch, bits)
        else:
            _add_amaxes(batch, bits)
            waiting.append(batch)
    if group is not None and group.size() > 1 and blocks:
        with naming_absent(subject, what, group):
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    _reduce_tensor_amaxes(placed, bits)
    encode = torch.empty_like(bits, dtype=torch.float32)
    for recipe in dict.fromkeys(part.recipe for part in parts):
        alike = [(part, first) for part, first in placed if part.recipe == recipe]
        block_scales_op(
            encode,
            [part.scale for part, _ in alike],
            [part.global_scale for part, _ in alike if part.global_scale is not None],
            bits,
            [first for _, first in alike],
            recipe.fmt,
            recipe.power_of_2_scales,
            recipe.backend,
        )
    for batch in waiting:
        _write_payload(batch, encode)
    # Autograd must see that values which it saved are gone; kernels do not count what they write.
    written = [x for part in parts for x in (part.scale, part.global_scale) if x is not None]
    written += [part.target for part in parts if part.values is not None and part.target is not None]
    torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])


def _batches(placed: Sequence[_Placed], device: torch.device) -> list[list[_Placed]]:
    """Group parts by call; frames and offloaded values one by one, so that one copy at a time is on the device."""
    together: dict[tuple[Recipe, str, bool], list[_Placed]] = {}
    alone = []
    for part, first in placed:
        if part.values is None:
            continue
        if part.dim or part.values.device != device:
            alone.append([(part, first)])
        else:
            together.setdefault((part.recipe, part.into, _is_of_whole_blocks(part)), []).append((part, first))
    return [*together.values(), *alone]


def _is_of_whole_blocks(part: Part) -> bool:
    """Whether a part's payload can be written before ranks have exchanged anything."""
    fmt = part.recipe.fmt
    if part.values is None or part.dim or fmt.has_global_scale:
        return False
    return cuts_no_block(part.start, part.values.numel(), part.shape, fmt)


def _cast_whole_blocks(batch: list[_Placed], bits: torch.Tensor) -> None:
    """Write the amaxes and the payload of what this rank holds."""
    recipe, into = batch[0][0].recipe, batch[0][0].into
    shards = _shards(batch, bits.device)
    whole_block_cast_op(_targets(batch), bits, shards, recipe.power_of_2_scales, into, recipe.backend)


def _add_amaxes(batch: list[_Placed], bits: torch.Tensor) -> None:
    """Write the amaxes of what this rank holds to each weight's part of `bits`, which is zeros before."""
    part, first = batch[0]
    if part.dim:
        frame, _ = _frame(part, bits.device)
        mine = _part_of_grid(part, first, bits)
        of_frame = torch.zeros_like(mine, memory_format=torch.contiguous_format).view(-1)
        partial_block_amax_op(of_frame, _whole(frame, part.recipe), part.recipe.backend)
        mine.copy_(of_frame.view(mine.shape))
        return
    partial_block_amax_op(bits, _shards(batch, bits.device), part.recipe.backend)


def _write_payload(batch: list[_Placed], encode: torch.Tensor) -> None:
    """Write what this rank sends: its values times the `encode` of their blocks, rounded to elements."""
    part, first = batch[0]
    recipe = part.recipe
    if part.dim:
        frame, border = _frame(part, encode.device)
        codes = torch.empty_like(frame, dtype=torch.uint8)
        factors = _part_of_grid(part, first, encode).clone(memory_format=torch.contiguous_format).view(-1)
        partial_cast_op([codes.view(-1)], _whole(frame, recipe), factors, CODES, recipe.backend)
        assert part.target is not None and part.values is not None
        codes = codes.narrow(part.dim, border, part.values.shape[part.dim])
        part.target.copy_(codes if recipe.fmt.element.per_byte == 1 else recipe.fmt.element.pack(codes))
        return
    partial_cast_op(_targets(batch), _shards(batch, encode.device), encode, part.into, recipe.backend)


def _shards(batch: list[_Placed], device: torch.device) -> Shards:
    """The parts that this rank holds of the weights, on the device."""
    values = [part.values for part, _ in batch if part.values is not None]
    if values[0].device != device:
        values = [x.to(device, non_blocking=True) for x in values]
    starts, shapes, firsts = zip(*((part.start, part.shape, first) for part, first in batch))
    return Shards.of(values, starts, shapes, batch[0][0].recipe.dtype, batch[0][0].recipe.fmt, firsts)


def _whole(frame: torch.Tensor, recipe: Recipe) -> Shards:
    return Shards.of([frame.view(-1)], [0], [frame.shape], recipe.dtype, recipe.fmt)


def _targets(batch: list[_Placed]) -> list[torch.Tensor]:
    return [part.target for part, _ in batch if part.target is not None]


def _frame(part: Part, device: torch.device) -> tuple[torch.Tensor, int]:
    """(this rank's values behind the zeros that begin their first block, how many along the part's dim)."""
    assert part.values is not None
    values = part.values.to(device, non_blocking=True)
    border = part.start % _block(part)
    if not border:
        return values.contiguous(), 0
    return F.pad(values, [0, 0] * (values.dim() - 1 - part.dim) + [border, 0]), border


def _part_of_grid(part: Part, first: int, of_blocks: torch.Tensor) -> torch.Tensor:
    """The part that the frame covers of a buffer with a value a block, where the weight's begin at `first`: a view."""
    assert part.values is not None
    block = _block(part)
    *batch, rows, columns = part.shape
    shape = torch.Size([*batch, *part.recipe.fmt.grid(rows, columns)])
    grid = of_blocks[first : first + shape.numel()].view(shape)
    begin, end = part.start // block, part.start + part.values.shape[part.dim]
    return grid.narrow(part.dim, begin, -(-end // block) - begin)


def _block(part: Part) -> int:
    """Elements of a block along the part's dim."""
    rows, columns = part.recipe.fmt.block
    return {-1: columns, -2: rows}.get(part.dim - len(part.shape), 1)


def _reduce_tensor_amaxes(placed: Sequence[_Placed], bits: torch.Tensor) -> None:
    """Give each part of a tensor that tensor parallelism has split the tensor's amax, as that of its one more block."""
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for part, first in placed:
        for group in part.split_groups:
            by_group.setdefault(group, []).append(bits[first : first + part.scale.numel()])
    for group, blocks in by_group.items():
        amaxes = torch.stack([of_weight.amax() for of_weight in blocks])
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for of_weight, amax in zip(blocks, amaxes.unbind()):
            of_weight[-1].copy_(amax)
