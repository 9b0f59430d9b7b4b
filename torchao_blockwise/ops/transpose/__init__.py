"""Transpose: the columnwise copy of a square-blocked tensor, built from its rowwise one, exactly."""

from __future__ import annotations

from torchao_blockwise.formats import BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, get_backend, pick, why_no_triton
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.operand import format_of, is_operand, operand
from torchao_blockwise.ops.sharding import shards_on_blocks
from torchao_blockwise.ops.transpose import reference


def transpose(x, *, columns: int | None = None, backend: Backend | str | None = None):
    """Columnwise copy of `x`: payload and scale grid transposed and contiguous. Exact: blocks are square.

    x: a result of `quantize` in a format with square blocks, qdata [.., M, packed(K)].
    columns: K, where it is odd and elements are packed two a byte; default all that the payload holds.
    Returns the same kind of result, qdata [.., K, packed(M)], scale [.., K blocks, M blocks], same global scale.
    Raises TypeError if `x` is not a quantised operand, ValueError for blocks that are not square.
    """
    if not is_operand(x):
        raise TypeError(f"transpose: x must be a result of quantize, got {type(x).__name__}")
    fmt = format_of(x)
    if not fmt.is_square:
        raise ValueError(
            f"transpose: {fmt.name} has blocks of {fmt.block[0]}x{fmt.block[1]}, a transpose would need other scales; "
            "quantize the high-precision tensor with columnwise=True"
        )
    columns = x.qdata.shape[-1] * fmt.element.per_byte if columns is None else columns
    if fmt.element.packed(columns) != x.qdata.shape[-1]:
        raise ValueError(f"transpose: the payload of shape {list(x.qdata.shape)} does not hold columns={columns}")
    qdata, scale = transpose_op(x.qdata, x.scale, fmt.name, columns, get_backend(backend).value)
    return operand(fmt, qdata, scale, x.global_scale)


def _pick(qdata, fmt: BlockFormat, backend: str) -> Backend:
    reasons = {Backend.TRITON: why_no_triton(qdata.device), Backend.REFERENCE: None}
    return pick("transpose", backend, reasons, expected=Backend.TRITON if qdata.is_cuda else None)


def _transpose(qdata, scale, format, columns, backend):
    fmt = get_format(format)
    if _pick(qdata, fmt, backend) is Backend.TRITON:
        from torchao_blockwise.ops.transpose import kernels_triton as triton

        return triton.transpose(qdata, scale, fmt, columns)
    return reference.transpose(qdata, scale, fmt, columns)


def _transpose_fake(qdata, scale, format, columns, backend):
    fmt = get_format(format)
    *batch, rows, _ = qdata.shape
    return qdata.new_empty((*batch, columns, fmt.element.packed(rows))), scale.new_empty(scale.mT.shape)


def _transpose_sharding(qdata, scale, format, columns, backend):
    from torch.distributed.tensor import Replicate, Shard

    options = [None, None, None]
    rules = [([Replicate(), Replicate()], [Replicate(), Replicate(), *options])]
    ndim = len(qdata.shape)
    for dim in range(ndim - 1):
        # `columns` counts the whole tensor, so only dims that leave it alone can be sharded.
        if shards_on_blocks(qdata, dim, get_format(format), columnwise=True):
            out = dim if dim < ndim - 2 else ndim - 1
            rules.append(([Shard(out), Shard(out)], [Shard(dim), Shard(dim), *options]))
    return rules


transpose_op = define_op(
    "transpose(Tensor qdata, Tensor scale, str format, SymInt columns, str backend) -> (Tensor, Tensor)",
    _transpose,
    _transpose_fake,
    _transpose_sharding,
)
