"""Exact columnwise copy of a square-blocked tensor in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat


def transpose(
    qdata: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata [.., M, packed(K)], scale [.., M blocks, K blocks] -> [.., K, packed(M)], [.., K blocks, M blocks]."""
    codes = fmt.element.unpack(qdata, columns)
    return fmt.element.pack(codes.mT), scale.mT.clone(memory_format=torch.contiguous_format)
