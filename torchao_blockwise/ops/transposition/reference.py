"""Exact columnwise copy of a square-blocked tensor in eager torch, generic over `BlockFormat`."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import Operand


def transpose(x: Operand, columns: int) -> Operand:
    """qdata [.., M, packed(K)], scale [.., M blocks, K blocks] -> [.., K, packed(M)], [.., K blocks, M blocks]."""
    element = x.format.element
    qdata = element.pack(element.unpack(x.qdata, columns).mT)
    return x._replace(qdata=qdata, scale=x.scale.mT.clone(memory_format=torch.contiguous_format))
