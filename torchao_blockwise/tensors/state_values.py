"""The values that state dicts hold in the place of quantized weights: plain, and they quantize to the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import BlockFormat

if TYPE_CHECKING:
    from torchao_blockwise.tensors.quantized import QuantizedTensor


def _integer(values: torch.Tensor) -> torch.dtype:
    return torch.int32 if values.element_size() == 4 else torch.int16


@torch.no_grad()
def plain_values(x: QuantizedTensor, quantize: Callable[[torch.Tensor], QuantizedTensor] | None = None) -> torch.Tensor:
    """The values that `x` stands for, in its dtype, such that quantizing them gives these values again.

    quantize: how that is done; default as `x` was made, with the tensor scale of the values.
    Decoded values, where need be with the largest ones of a block moved by one unit in the last place. A scale is made
    of the block's largest value in two roundings, so that the decoded one, rounded too, may give the scale next to it.
    Scales that are powers of two may come back halved, with a doubled payload: the same values and products.
    """
    decoded = values = x.dequantize()
    # One step is enough for all formats; the second look sees that it was.
    for _ in range(2):
        again = (quantize or x._requantize)(values)
        if not x.numel() or same_bits(again.dequantize(), decoded):
            break
        # Integers of the same width count through magnitudes, whatever the sign.
        bits = values.view(_integer(values))
        too_small, too_large = again.scale.float() < x.scale.float(), again.scale.float() > x.scale.float()
        steps = over_blocks(too_small.to(bits.dtype) - too_large.to(bits.dtype), x.shape, x.fmt)
        values = torch.where(_is_peak(x, values), bits + steps, bits).view(values.dtype)
    return values


def _is_peak(x: QuantizedTensor, values: torch.Tensor) -> torch.Tensor:
    """Whether each value is as large as any of its block, and not zero: blocks of zeros keep scales of any tool."""
    flat = values.contiguous().view(-1)
    peaks = ops.partial_block_amax([flat], [0], [values.shape], x.fmt, dtype=values.dtype)
    largest = over_blocks(peaks.view(torch.float32).view(x.scale.shape), x.shape, x.fmt)
    return (values.float().abs() == largest) & (values != 0)


def over_blocks(grid: torch.Tensor, shape: torch.Size, fmt: BlockFormat) -> torch.Tensor:
    """A value of each block, repeated over its elements: `shape` [.., N, K]."""
    rows, columns = fmt.block
    return grid.repeat_interleave(rows, -2)[..., : shape[-2], :].repeat_interleave(columns, -1)[..., : shape[-1]]


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    mine, theirs = (x.contiguous().view(-1).view(torch.uint8) for x in (mine, theirs))
    return torch.equal(mine, theirs.to(mine.device))
