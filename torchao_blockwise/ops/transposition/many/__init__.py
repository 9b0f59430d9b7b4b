"""Transpose many: the columnwise copies of a list of square-blocked tensors, in launches that do not grow with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.formats import BlockFormat, Operand, get_format
from torchao_blockwise.ops.backend import Backend, Implementation, kernels
from torchao_blockwise.ops.registry import Operation
from torchao_blockwise.ops.transposition import check_transposable, reference


def transpose_many(
    operands: Sequence[Operand], *, columns: Sequence[int] | None = None, backend: Backend | str | None = None
) -> list[Operand]:
    """`transpose` of each operand, exact; the list may mix formats and shapes.

    operands: results of `quantize` in formats with square blocks, qdata [.., M, packed(K)], contiguous, on one device.
    columns: K of each, where one is odd and packed two a byte; default all that the payloads hold.
    Returns operands of the same formats, qdata [.., K, packed(M)], scale [.., K blocks, M blocks], in that order.
    Raises TypeError for what is no quantized operand, ValueError for blocks that are not square, sizes or devices.
    """
    if columns is not None and len(columns) != len(operands):
        raise ValueError(f"transpose_many: {len(operands)} operands need as many columns, got {len(columns)}")
    by_format: dict[str, list[int]] = {}
    widths = []
    for i, x in enumerate(operands):
        widths.append(check_transposable("transpose_many", f"operand {i}", x, None if columns is None else columns[i]))
        if x.qdata.device != operands[0].qdata.device:
            devices = f"{operands[0].qdata.device} and {x.qdata.device}"
            raise ValueError(f"transpose_many: operands must be on one device, got {devices}")
        by_format.setdefault(x.format_name, []).append(i)
    results = list(operands)
    for name, indices in by_format.items():
        qdata, scales = ([getattr(operands[i], part) for i in indices] for part in ("qdata", "scale"))
        widths_of = [widths[i] for i in indices]
        copies = transpose_many_op(qdata, scales, widths_of, get_format(name), backend)
        for i, q, s in zip(indices, copies[: len(indices)], copies[len(indices) :]):
            results[i] = operands[i]._replace(qdata=q, scale=s)
    return results


def _by_reference(
    qdata: list[torch.Tensor], scales: list[torch.Tensor], columns: list[int], fmt: BlockFormat
) -> list[torch.Tensor]:
    copies = [reference.transpose(Operand(q, s, None, fmt.name), width) for q, s, width in zip(qdata, scales, columns)]
    return [x.qdata for x in copies] + [x.scale for x in copies]


def _fake(
    qdata: list[torch.Tensor], scales: list[torch.Tensor], columns: list[int], fmt: BlockFormat
) -> list[torch.Tensor]:
    packed = fmt.element.packed
    copies = [q.new_empty((*q.shape[:-2], width, packed(q.shape[-2]))) for q, width in zip(qdata, columns)]
    return copies + [s.new_empty(s.mT.shape) for s in scales]


transpose_many_op = Operation(
    "transpose_many(Tensor[] qdata, Tensor[] scales, SymInt[] columns, str fmt, str backend) -> Tensor[]",
    takes=(None, None, None, BlockFormat),
    table=[
        kernels(Backend.TRITON, f"{__name__}.kernels_triton:transpose_many"),
        Implementation(Backend.REFERENCE, _by_reference),
    ],
    fake=_fake,
)
