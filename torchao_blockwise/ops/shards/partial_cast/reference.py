"""The partial cast in eager torch, one tensor after the other, generic over `BlockFormat`: the bit oracle."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantization.reference import block_amax, expand_blocks
from torchao_blockwise.ops.shards.flat import Shard, Shards, block_count, entries_of, flat_bytes


def partial_block_amax_(amax_bits: torch.Tensor, shards: Shards) -> None:
    """Raise `amax_bits` [blocks] int32 to the amax of block ∩ shard, as bits: zeros stand for what others own."""
    for shard in shards.each():
        whole = torch.zeros(math.prod(shard.shape), dtype=torch.float32, device=shard.x.device)
        whole[shard.start : shard.start + shard.x.numel()] = shard.x.to(shards.dtype).float()
        bits = block_amax(whole.view(shard.shape), shards.fmt).flatten().view(torch.int32)
        own = amax_bits[shard.first_block :][: len(bits)]
        torch.maximum(own, bits, out=own)


def block_scales_(
    encode: torch.Tensor,
    scales: list[torch.Tensor],
    global_scales: list[torch.Tensor],
    amax_bits: torch.Tensor,
    first_blocks: list[int],
    fmt: BlockFormat,
    power_of_2_scales: bool,
) -> None:
    """Write encode [blocks] f32, the stored grids and the global scales of each tensor; see `ops.block_scales_`."""
    for i, (scale, first) in enumerate(zip(scales, first_blocks)):
        blocks = slice(first, first + scale.numel())
        tensor_amax, matrices = None, global_scales[i].numel() if fmt.has_global_scale else 1
        amaxes = amax_bits[blocks].view(matrices, scale.numel() // max(1, matrices))
        if fmt.has_global_scale:
            tensor_amax = F.pad(amaxes, (1, 0)).amax(1, keepdim=True).view(torch.float32)
        made = fmt.compute_scales(amaxes.view(torch.float32), tensor_amax, power_of_2_scales)
        encode[blocks] = made.encode.flatten()
        scale.view(-1).copy_(made.scale.flatten())
        if made.global_scale is not None:
            global_scales[i].copy_(made.global_scale.view(global_scales[i].shape))


def partial_cast_(targets: list[torch.Tensor], shards: Shards, encode: torch.Tensor, into: str) -> None:
    """Write the elements of each shard to its target's bytes; see `ops.partial_cast_`."""
    first_entries, packed = entries_of(shards, into)
    for target, shard, first in zip(flat_bytes(targets), shards.each(), first_entries):
        if shard.x.numel() > 0:
            codes = _codes_of(shard, encode, shards)
            if packed:
                write_codes_(target, codes, shard.start, shard.shape[-1], shards.fmt, first)
            else:
                target[shard.start - first : shard.start - first + len(codes)] = codes


def whole_block_cast_(
    targets: list[torch.Tensor], amax_bits: torch.Tensor, shards: Shards, power_of_2_scales: bool, into: str
) -> None:
    """Write the amaxes of the shards' blocks, then their elements; see `ops.whole_block_cast_`."""
    partial_block_amax_(amax_bits, shards)
    scales = shards.fmt.compute_scales(amax_bits.view(torch.float32), None, power_of_2_scales)
    partial_cast_(targets, shards, scales.encode, into)


def _codes_of(shard: Shard, encode: torch.Tensor, shards: Shards) -> torch.Tensor:
    """One code an entry of the elements of a shard."""
    (matrices, rows, columns), n, fmt = shard.shape, shard.x.numel(), shards.fmt
    blocks = encode[shard.first_block :][: block_count(shard.shape, fmt)]
    grid = blocks.view(matrices, *fmt.grid(rows, columns))
    factors = expand_blocks(grid, fmt, rows, columns).flatten()[shard.start : shard.start + n]
    payload = fmt.element.encode(shard.x.to(shards.dtype).float() * factors)
    return fmt.element.unpack(payload, n).view(torch.uint8)


def write_codes_(
    target: torch.Tensor, codes: torch.Tensor, start: int, columns: int, fmt: BlockFormat, first_entry: int
) -> None:
    """Write codes of elements [start, start + n) to a payload's bytes; what others own of a byte stays."""
    entries, position = places_of(start, codes.numel(), columns, fmt, codes.device)
    entries -= first_entry
    bits, mask = fmt.element.bits, (1 << fmt.element.bits) - 1
    for place in range(fmt.element.per_byte):
        at = entries[position == place]
        target[at] = (target[at] & ~(mask << bits * place) & 0xFF) | (codes[position == place] << bits * place)
    # What pads a row belongs to the row's last element.
    for place in range(1, fmt.element.per_byte):
        row_ends = (torch.arange(start, start + codes.numel(), device=codes.device) + 1) % columns == 0
        at = entries[row_ends & (position < place)]
        target[at] &= ~(mask << bits * place) & 0xFF


def places_of(
    start: int, n: int, columns: int, fmt: BlockFormat, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload entry, place in it) of each of the elements [start, start + n)."""
    flat = torch.arange(start, start + n, device=device)
    row, column = flat // columns, flat % columns
    return row * fmt.element.packed(columns) + column // fmt.element.per_byte, column % fmt.element.per_byte
