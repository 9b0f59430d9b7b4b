"""The cast of flat shards in eager torch, one tensor after the other, generic over `BlockFormat`: the bit oracle."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantization.reference import block_amax, expand_blocks
from torchao_blockwise.ops.shards.flat import Shards, block_count, shard_entries


def partial_block_amax_(amax_bits: torch.Tensor, shards: Shards) -> None:
    """Raise `amax_bits` to the amax of each block ∩ shard."""
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
    """Write encode factors, scale grids and global scales of each tensor."""
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


def partial_cast_(targets: list[torch.Tensor], shards: Shards, encode: torch.Tensor) -> None:
    """Write the elements of each shard to its payload entries."""
    for target, shard in zip(targets, shards.each()):
        n, columns, element = shard.x.numel(), shard.shape[-1], shards.fmt.element
        if n == 0:
            continue
        blocks = encode[shard.first_block :][: block_count(shard.shape, shards.fmt)]
        grid = blocks.view(shard.shape[0], *shards.fmt.grid(*shard.shape[1:]))
        factors = expand_blocks(grid, shards.fmt, *shard.shape[1:]).flatten()[shard.start : shard.start + n]
        encoded = element.encode(shard.x.to(shards.dtype).float() * factors)
        payload, codes = target.view(torch.uint8).view(-1), element.unpack(encoded, n).view(torch.uint8)
        # Elements that the entries of a row have room for, of which the last is a row's padding.
        width = element.packed(columns) * element.per_byte
        first, _ = shard_entries(shard.start, n, columns, shards.fmt)
        at = torch.arange(shard.start, shard.start + n, device=codes.device)
        at = at // columns * width + at % columns - first * element.per_byte
        room = element.unpack(payload, payload.numel() * element.per_byte)
        room[at] = codes
        if width > columns:
            # What pads a row belongs to the row's last element.
            room[at[(at + first * element.per_byte) % width == columns - 1] + 1] = 0
        payload.copy_(element.pack(room))


def whole_block_cast_(
    targets: list[torch.Tensor], amax_bits: torch.Tensor, shards: Shards, power_of_2_scales: bool
) -> None:
    """Write the amaxes of the shards' blocks, then their elements."""
    partial_block_amax_(amax_bits, shards)
    scales = shards.fmt.compute_scales(amax_bits.view(torch.float32), None, power_of_2_scales)
    partial_cast_(targets, shards, scales.encode)
