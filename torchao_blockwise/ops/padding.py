"""Columnwise copies whose rows are whole runs of 16 bytes, for products that contract over tokens.

A row of a columnwise copy is as long as there are tokens, which may be any number. Kernels store it 16 bytes at a time
and products read it so; where tokens do not fill the last run, zero tokens are quantised behind them. They add nothing
to a product, whose other operand ends in zeros as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import BlockFormat

# The widest load and store of a thread, and the grain of the copy engine: rows of products' operands are whole ones.
ROW_BYTES = 16


def padded_size(tokens: int, fmt: BlockFormat) -> int:
    """Tokens with the zeros that fill the last 16 bytes of payload: a multiple of 16 in FP8, of 32 in NVFP4."""
    run = ROW_BYTES * fmt.element.per_byte
    return (tokens + run - 1) // run * run


def with_zero_tokens(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """`x` [.., M, K] with zero rows behind: [.., padded_size(M), K]."""
    missing = padded_size(x.shape[-2], fmt) - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def without_padding(copy: Sequence[torch.Tensor], fmt: BlockFormat, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, scale) of so many tokens, contiguous, of a columnwise copy that is padded: copied only if needed."""
    qdata, scale = copy
    entries = fmt.element.packed(tokens)
    if entries != qdata.shape[-1]:
        qdata = qdata.narrow(-1, 0, entries).contiguous()
    # Of blocks of 16 the padding may hold one alone, of blocks of 128 never.
    blocks = fmt.grid(1, tokens)[1]
    if not fmt.transposed_scales and blocks != scale.shape[-1]:
        scale = scale.narrow(-1, 0, blocks).contiguous()
    return qdata, scale
