"""Columnwise copies whose rows are whole runs of bytes, for GEMMs that contract over tokens.

A row of a columnwise copy is as long as there are tokens, which may be any number. Kernels store it 16 bytes at a time
and GEMMs read it so; where tokens do not fill the last run, zero tokens are quantized behind them. They add nothing
to a GEMM, whose other operand ends in zeros as well. Rows apart by strides instead would make a payload contiguous
or not by the number of tokens, and so two compiled graphs; and nothing would say that zeros lie between them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import Operand

# The widest load and store of a thread, and the grain of the copy engine: rows of GEMMs' operands are whole ones.
ROW_BYTES = 16
# Of FP8 a sector of memory: one that two rows share has to be merged (4097 tokens took 13 % longer on an H200). Of
# NVFP4, two a byte, 16 bytes.
_RUN_TOKENS = 32


def padded_size(tokens: int) -> int:
    """Tokens with the zeros that fill the last run: a multiple of 32."""
    return (tokens + _RUN_TOKENS - 1) // _RUN_TOKENS * _RUN_TOKENS


def with_zero_tokens(x: torch.Tensor) -> torch.Tensor:
    """`x` [.., M, K] with zero rows behind: [.., padded_size(M), K]."""
    missing = padded_size(x.shape[-2]) - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def without_padding(copy: Operand, tokens: int) -> Operand:
    """So many tokens, contiguous, of a columnwise copy that is padded: copied only if needed."""
    qdata, scale, fmt = copy.qdata, copy.scale, copy.format
    entries = fmt.element.packed(tokens)
    if entries != qdata.shape[-1]:
        qdata = qdata.narrow(-1, 0, entries).contiguous()
    # Of blocks of 16 the padding may hold one, of blocks of 128 never.
    blocks = fmt.grid(1, tokens)[1]
    if not fmt.transposed_scales and blocks != scale.shape[-1]:
        scale = scale.narrow(-1, 0, blocks).contiguous()
    return copy._replace(qdata=qdata, scale=scale)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [rows, columns], contiguous, with rows that fill whole 16 bytes: a copy with zeros behind, only if needed."""
    padding = -x.shape[1] * x.itemsize % ROW_BYTES // x.itemsize
    if padding:
        return F.pad(x.view(torch.uint8), (0, padding)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, padding))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ROW_BYTES else x
