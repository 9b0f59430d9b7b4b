"""Exact columnwise copy of a square-blocked tensor in eager torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchao_blockwise.formats import BlockFormat


def transpose(
    qdata: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata [.., M, packed(K)], scale [.., M blocks, K blocks] -> [.., K, packed(M)], [.., K blocks, M blocks]."""
    return _transpose_elements(qdata, fmt, columns), scale.mT.clone(memory_format=torch.contiguous_format)


def _transpose_elements(qdata: torch.Tensor, fmt: BlockFormat, columns: int) -> torch.Tensor:
    if fmt.element.per_byte == 1:
        return qdata.mT.clone(memory_format=torch.contiguous_format)
    codes = torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)[..., :columns]
    codes = codes.mT.contiguous()
    if codes.shape[-1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
