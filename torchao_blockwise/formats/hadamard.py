"""The random Hadamard transform of 16 values: it spreads an outlier over its chunk and leaves products as they are.

    T = diag(s) · H16 / 4        s: 16 signs; H16[i][j] = (-1)^popcount(i & j), so that T · Tᵀ = 1

Both operands of `grad_weight` are transformed along the tokens, in chunks of 16: (Tx)ᵀ · (Tdy) = xᵀ · dy.
Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

HADAMARD_SIZE = 16
# TransformerEngine's and torchao's, so that runs can be compared.
DEFAULT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# Bit i of the number by which options carry signs says that sign i is negative; bit 16 stands for the transform itself.
_PRESENT = 1 << HADAMARD_SIZE


def hadamard_number(hadamard: bool | Sequence[int]) -> int:
    """The number by which options carry a transform: 0 for none. True: `DEFAULT_SIGNS`.

    Raises ValueError for anything but True, False or 16 signs of 1 and -1.
    """
    if hadamard is False:
        return 0
    signs = DEFAULT_SIGNS if hadamard is True else tuple(hadamard)
    if len(signs) != HADAMARD_SIZE or any(sign not in (1, -1) for sign in signs):
        raise ValueError(f"hadamard must be True, False or {HADAMARD_SIZE} signs of 1 and -1, got {hadamard!r}")
    return _PRESENT | sum(1 << i for i, sign in enumerate(signs) if sign < 0)


def hadamard_transform(x: torch.Tensor, number: int) -> torch.Tensor:
    """Rows of `x` [M, K] in chunks of 16 as row vectors times T, rounded to x's dtype: [⌈M/16⌉ · 16, K].

    number: of `hadamard_number`. The last chunk is filled with zero rows. In fp32, butterflies of stride 1, 2, 4, 8.
    """
    chunks = F.pad(x.float(), (0, 0, 0, -x.shape[0] % HADAMARD_SIZE)).unflatten(0, (-1, HADAMARD_SIZE))
    negative = torch.tensor([bool(number >> i & 1) for i in range(HADAMARD_SIZE)], device=x.device)[:, None]
    # Not multiplied by the sign: a zero would become -0, and where all signs are negative the sum of zeros too.
    y = torch.where(negative, 0 - chunks, chunks)
    stride = 1
    while stride < HADAMARD_SIZE:
        low, high = y.unflatten(1, (-1, 2, stride)).unbind(2)
        y = torch.stack((low + high, low - high), 2).flatten(1, 3)
        stride *= 2
    return (0.25 * y).to(x.dtype).flatten(0, 1)
