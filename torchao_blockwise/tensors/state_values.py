"""The values that state dicts hold in the place of quantized weights: plain, and they quantize to the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchao_blockwise.ops.quantization.reference import block_amax, expand_blocks

if TYPE_CHECKING:
    from torchao_blockwise.tensors.quantized import QuantizedTensor


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
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
        too_small, too_large = again.scale.float() < x.scale.float(), again.scale.float() > x.scale.float()
        steps = too_small.to(bits.dtype) - too_large.to(bits.dtype)
        steps, peaks = (expand_blocks(t, x.fmt, *x.shape[-2:]) for t in (steps, block_amax(values, x.fmt)))
        # Blocks of zeros keep the scales of any tool.
        is_peak = (values.float().abs() == peaks) & (values != 0)
        values = torch.where(is_peak, bits + steps, bits).view(values.dtype)
    return values


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    mine, theirs = (x.contiguous().view(-1).view(torch.uint8) for x in (mine, theirs))
    return torch.equal(mine, theirs.to(mine.device))
