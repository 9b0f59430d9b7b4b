"""The random Hadamard transform of 16 values: it spreads an outlier over its chunk and cancels in GEMMs.

    T = diag(s) · H16 / 4        s: 16 signs; H16[i][j] = (-1)^popcount(i & j), so that T · Tᵀ = 1

Both operands of `grad_weight` are transformed along the tokens, in chunks of 16: (Tx)ᵀ · (Tdy) = xᵀ · dy.
Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

HADAMARD_SIZE = 16
# The signs of TransformerEngine and torchao, so that runs can be compared.
DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# Options store a transform as a number: bit i is set if sign i is negative, and bit 16 is always set.
_PRESENT = 1 << HADAMARD_SIZE


def hadamard_number(hadamard: bool | Sequence[int]) -> int:
    """Return the number that represents a transform in options: 0 for none. True means `DEFAULT_SIGNS`.

    Raises ValueError for anything except True, False or 16 signs of 1 and -1.
    """
    if hadamard is False:
        return 0
    signs = DEFAULT_SIGNS if hadamard is True else hadamard
    are_signs = isinstance(signs, Sequence) and all(sign in (1, -1) for sign in signs)
    if not are_signs or len(signs) != HADAMARD_SIZE:
        raise ValueError(f"hadamard must be True, False or {HADAMARD_SIZE} signs of 1 and -1, got {hadamard!r}")
    return _PRESENT | sum(1 << i for i, sign in enumerate(signs) if sign < 0)


def hadamard_transform(x: torch.Tensor, number: int) -> torch.Tensor:
    """Transform chunks of 16 rows of `x` [M, K], as row vectors times T, rounded to x's dtype: [⌈M/16⌉ · 16, K].

    number: from `hadamard_number`. The last chunk is padded with zero rows. fp32 butterflies of stride 1, 2, 4, 8.
    """
    chunks = F.pad(x.float(), (0, 0, 0, -x.shape[0] % HADAMARD_SIZE)).unflatten(0, (-1, HADAMARD_SIZE))
    negative = (number >> torch.arange(HADAMARD_SIZE, device=x.device) & 1).bool()[:, None]
    # Do not multiply by the sign: a zero would become -0, and so would a sum of zeros if all signs are negative.
    y = torch.where(negative, 0 - chunks, chunks)
    stride = 1
    while stride < HADAMARD_SIZE:
        low, high = y.unflatten(1, (-1, 2, stride)).unbind(2)
        y = torch.stack((low + high, low - high), 2).flatten(1, 3)
        stride *= 2
    return (0.25 * y).to(x.dtype).flatten(0, 1)
