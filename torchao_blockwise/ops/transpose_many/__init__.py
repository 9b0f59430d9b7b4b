"""Transpose many: the columnwise copies of a list of square-blocked tensors, in launches that do not grow with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.formats import get_format
from torchao_blockwise.ops.backend import Backend, get_backend, pick, why_no_triton
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.operand import format_of, is_operand, operand
from torchao_blockwise.ops.transpose import reference


def transpose_many(
    operands: Sequence, *, columns: Sequence[int] | None = None, backend: Backend | str | None = None
) -> list:
    """`transpose` of each operand, exact; the list may mix formats and shapes.

    operands: results of `quantize` in formats with square blocks, qdata [.., M, packed(K)], contiguous, on one device.
    columns: K of each, where one is odd and packed two a byte; default all that the payloads hold.
    Returns operands of the same formats, qdata [.., K, packed(M)], scale [.., K blocks, M blocks], in that order.
    Raises TypeError for what is no quantised operand, ValueError for blocks that are not square, sizes or devices.
    """
    if columns is not None and len(columns) != len(operands):
        raise ValueError(f"transpose_many: {len(operands)} operands need as many columns, got {len(columns)}")
    by_format: dict[str, list[int]] = {}
    widths = []
    for i, x in enumerate(operands):
        if not is_operand(x):
            raise TypeError(f"transpose_many: operand {i} must be a result of quantize, got {type(x).__name__}")
        fmt = format_of(x)
        if not fmt.is_square:
            rows, width = fmt.block
            raise ValueError(
                f"transpose_many: operand {i} in {fmt.name} has blocks of {rows}x{width}, a transpose would need other "
                "scales; quantize the high-precision tensor with columnwise=True"
            )
        held = x.qdata.shape[-1] * fmt.element.per_byte
        widths.append(held if columns is None else columns[i])
        if fmt.element.packed(widths[i]) != x.qdata.shape[-1]:
            shape = list(x.qdata.shape)
            raise ValueError(f"transpose_many: payload {i} of shape {shape} does not hold columns={widths[i]}")
        if x.qdata.device != operands[0].qdata.device:
            devices = f"{operands[0].qdata.device} and {x.qdata.device}"
            raise ValueError(f"transpose_many: operands must be on one device, got {devices}")
        by_format.setdefault(fmt.name, []).append(i)
    results = [None] * len(operands)
    for name, indices in by_format.items():
        qdata, scales = ([getattr(operands[i], part) for i in indices] for part in ("qdata", "scale"))
        copies = transpose_many_op(qdata, scales, name, [widths[i] for i in indices], get_backend(backend).value)
        for i, q, s in zip(indices, copies[: len(indices)], copies[len(indices) :]):
            results[i] = operand(name, q, s, operands[i].global_scale)
    return results


def _transpose_many(qdata, scales, format, columns, backend):
    fmt = get_format(format)
    if not qdata:
        return []
    reasons = {Backend.TRITON: why_no_triton(qdata[0].device), Backend.REFERENCE: None}
    expected = Backend.TRITON if qdata[0].is_cuda else None
    if pick("transpose_many", backend, reasons, expected=expected) is Backend.TRITON:
        from torchao_blockwise.ops.transpose_many import kernels_triton as triton

        return triton.transpose_many(qdata, scales, fmt, columns)
    copies = [reference.transpose(q, s, fmt, width) for q, s, width in zip(qdata, scales, columns)]
    return [q for q, _ in copies] + [s for _, s in copies]


def _new_copies(qdata: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], format: str, columns, backend):
    packed = get_format(format).element.packed
    copies = [q.new_empty((*q.shape[:-2], width, packed(q.shape[-2]))) for q, width in zip(qdata, columns)]
    return copies + [s.new_empty(s.mT.shape) for s in scales]


transpose_many_op = define_op(
    "transpose_many(Tensor[] qdata, Tensor[] scales, str format, SymInt[] columns, str backend) -> Tensor[]",
    _transpose_many,
    _new_copies,
)
