"""The plain values that state dicts store for quantized weights; quantizing them again gives the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchao_blockwise.ops.quantization.reference import block_amax, expand_blocks

if TYPE_CHECKING:
    from torchao_blockwise.tensors.quantized import QuantizedTensor


@torch.no_grad()
def plain_values(x: QuantizedTensor, quantize: Callable[[torch.Tensor], QuantizedTensor] | None = None) -> torch.Tensor:
    """Return values in the dtype of `x` which, when quantized again, decode to the values of `x`.

    quantize: how they are quantized; by default like `x`, with the tensor scale of the values.
    These are the decoded values, except that the largest ones of a block may be changed by one unit in the last place.
    That is necessary because a scale is computed from the block's largest value with two roundings, so the decoded
    largest value, which is rounded too, may lead to the next scale. Power-of-two scales may be halved, with a doubled
    payload, which decodes to the same values.
    """
    decoded = values = x.dequantize()
    # One step is enough for all formats in float32. In bf16 it is too long, and the second iteration takes it back.
    for _ in range(2):
        again = (quantize or x._requantize)(values)
        if not x.numel() or same_bits(again.dequantize(), decoded):
            break
        # Adding one to the bits, viewed as an integer, increases the magnitude for either sign.
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
        too_small, too_large = again.scale.float() < x.scale.float(), again.scale.float() > x.scale.float()
        steps = too_small.to(bits.dtype) - too_large.to(bits.dtype)
        steps, peaks = (expand_blocks(t, x.fmt, *x.shape[-2:]) for t in (steps, block_amax(values, x.fmt)))
        # Blocks of zeros do not change, whatever their scales are.
        is_peak = (values.float().abs() == peaks) & (values != 0)
        values = torch.where(is_peak, bits + steps, bits).view(values.dtype)
    return values


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes; true if both are on the meta device, where they have none."""
    if mine.is_meta and theirs.is_meta:
        return True
    mine, theirs = (x.contiguous().view(-1).view(torch.uint8) for x in (mine, theirs))
    return torch.equal(mine, theirs.to(mine.device))
