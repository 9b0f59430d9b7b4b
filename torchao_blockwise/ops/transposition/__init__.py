"""Transpose a tensor with square blocks: compute its exact columnwise copy from its rowwise one."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
from torchao_blockwise.ops.operands import check_operand
from torchao_blockwise.ops.registry import Operation, operand


def transpose(x: Operand, *, columns: int | None = None, backend: Backend | str | None = None) -> Operand:
    """Return the columnwise copy of `x`: payload and scales transposed and contiguous, exact because blocks are square.

    x: a result of `quantize` in a format with square blocks, qdata [.., M, packed(K)].
    columns: K, needed if it is odd and elements are packed two in a byte; by default all columns of the payload.
    Returns an operand of the same format, qdata [.., K, packed(M)], scale [.., K blocks, M blocks], same global scale.
    Raises TypeError if `x` is not a quantized operand, ValueError for blocks that are not square.
    """
    fmt = check_operand("transpose", "x", x)
    if not fmt.is_square:
        raise ValueError(
            f"transpose: blocks must be square, got {fmt.block[0]}x{fmt.block[1]} ({fmt.name}), whose transpose needs "
            "other scales; quantize the high-precision tensor with columnwise=True"
        )
    columns = x.qdata.shape[-1] * fmt.element.per_byte if columns is None else columns
    if fmt.element.packed(columns) != x.qdata.shape[-1]:
        raise ValueError(f"transpose: columns={columns} does not match a payload of shape {list(x.qdata.shape)}")
    qdata, scale = transpose_op(x, columns, backend)
    return x._replace(qdata=qdata, scale=scale)


def reference(x: Operand, columns: int) -> Operand:
    """The transpose in eager torch, generic over `BlockFormat`."""
    element = x.format.element
    qdata = element.pack(element.unpack(x.qdata, columns).mT)
    return x._replace(qdata=qdata, scale=x.scale.mT.clone(memory_format=torch.contiguous_format))


def _fake(x: Operand, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, rows, _ = x.qdata.shape
    qdata = x.qdata.new_empty((*batch, columns, x.format.element.packed(rows)))
    return qdata, x.scale.new_empty(x.scale.mT.shape)


transpose_op = Operation(
    f"transpose({operand('x')}, SymInt columns, str backend) -> (Tensor, Tensor)",
    takes=(Operand, None),
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_triton:transpose"),
        Implementation(Backend.REFERENCE, reference),
    ],
    fake=_fake,
)
