"""Padding of columnwise copies, whose rows must be aligned for GEMMs that contract over tokens.

The length of a row of a columnwise copy is the number of tokens, which is arbitrary, but kernels write and GEMMs read
16 bytes at a time. So zero tokens are appended and quantized. They do not change a GEMM, because its other operand is
padded with zeros, too. With strides instead of padding, the payload would be contiguous only for some numbers of
tokens, which would lead to two compiled graphs, and nothing would guarantee zeros between the rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import Operand

# The widest load and store of a thread, and the alignment of TMA: rows of GEMM operands are multiples of it.
ROW_BYTES = 16
# Of FP8 a sector of memory: one that two rows share has to be merged (4097 tokens took 13 % longer on an H200). Of
# NVFP4, two per byte, 16 bytes.
_RUN_TOKENS = 32


def padded_size(tokens: int) -> int:
    """Return the number of tokens after padding: the next multiple of 32."""
    return (tokens + _RUN_TOKENS - 1) // _RUN_TOKENS * _RUN_TOKENS


def with_zero_tokens(x: torch.Tensor) -> torch.Tensor:
    """Append zero rows to `x` [.., M, K]: [.., padded_size(M), K]."""
    missing = padded_size(x.shape[-2]) - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def without_padding(copy: Operand, tokens: int) -> Operand:
    """Remove the padding of a columnwise copy; the result is contiguous, and copied only if necessary."""
    qdata, scale, fmt = copy.qdata, copy.scale, copy.format
    entries = fmt.element.packed(tokens)
    if entries != qdata.shape[-1]:
        qdata = qdata.narrow(-1, 0, entries).contiguous()
    # The padding may contain a whole block of 16, but never one of 128.
    blocks = fmt.grid(1, tokens)[1]
    if not fmt.transposed_scales and blocks != scale.shape[-1]:
        scale = scale.narrow(-1, 0, blocks).contiguous()
    return copy._replace(qdata=qdata, scale=scale)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [rows, columns], contiguous, with rows padded with zeros to 16 bytes; copied only if necessary."""
    padding = -x.shape[1] * x.itemsize % ROW_BYTES // x.itemsize
    if padding:
        return F.pad(x.view(torch.uint8), (0, padding)).view(x.dtype) if x.itemsize == 1 else F.pad(x, (0, padding))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ROW_BYTES else x
