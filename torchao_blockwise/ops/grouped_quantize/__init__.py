"""Grouped quantise: tokens of several experts to rowwise copies and to columnwise ones whose blocks keep to a group."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, get_backend
from torchao_blockwise.ops.fused import check_copies, new_copies, operands_of, pick_kernel, without_grad
from torchao_blockwise.ops.group_tables.layout import check_group_tables
from torchao_blockwise.ops.grouped_quantize import reference
from torchao_blockwise.ops.groups import check_group_ends, check_row_blocks
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.quantize import global_scale_op


def grouped_quantize(
    x: torch.Tensor,
    group_ends: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    tensor_amax: torch.Tensor | None = None,
    backend: Backend | str | None = None,
    group_tables: torch.Tensor | None = None,
):
    """`quantize` of tokens in groups: no block along the tokens reaches from one group into the next.

    x: [M, K] bf16 | f16 | f32, any strides. group_ends: int32 [E], cumulative, on x's device: group g is rows
        [group_ends[g-1], group_ends[g]). Rows after the last group count as zeros, whatever they hold, NaN as well.
    fmt: of one-row blocks, fp8_1x128 | nvfp4_1x16.
    rowwise: the operand of [M, K] that `quantize` gives for x with those rows set to zero.
    columnwise: the operand of [K, P], P = padded_tokens(M, E, B) for blocks of B, that `quantize` gives for x with each
        group padded with zero rows to a multiple of B: group g fills columns [padded_ends[g-1], padded_ends[g]), and
        columns after the last group are zeros. Scales as there, FP8 [P/B, K], NVFP4 [K, P/B].
    power_of_2_scales, backend: as in `quantize`.
    tensor_amax: NVFP4 only, as in `quantize`; without it the amax is that of the rows in groups.
    group_tables: a result of `ops.group_tables` of these ends, M and `fmt`, made once for all operations on them; else
        each makes its own.
    With both copies: (rowwise, columnwise). Every byte is defined. The host reads nothing back: shapes and launches
    follow from M and E alone. Bits do not depend on the backend. Not differentiable.

    On a CPU the values of group_ends are checked; a GPU takes end g for the largest of ends 0 to g, each clamped to
    [0, M].
    Raises TypeError for a dtype, ValueError for shapes, devices, ends, or a format, option or backend that does not
    exist.
    """
    fmt, backend = get_format(fmt), get_backend(backend).value
    check_copies("grouped_quantize", fmt, rowwise, columnwise, power_of_2_scales)
    check_row_blocks("grouped_quantize", fmt)
    _check(x, fmt, tensor_amax)
    (x,) = without_grad(x)
    amax_bits = global_scale = None
    if fmt.has_global_scale:
        amax_bits = grouped_amax_bits_op(x, group_ends) if tensor_amax is None else tensor_amax.view(torch.int32)
        global_scale = global_scale_op(amax_bits)
    options = (fmt.name, rowwise, columnwise, power_of_2_scales, backend)
    return operands_of(grouped_quantize_op(x, group_ends, amax_bits, *options, group_tables), fmt, global_scale)


def _check(x, fmt, tensor_amax):
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"grouped_quantize: x must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
    if x.dim() != 2:
        raise ValueError(f"grouped_quantize: x must be [M, K], got shape {list(x.shape)}; flatten its leading dims")
    if tensor_amax is not None and not fmt.has_global_scale:
        raise ValueError(f"grouped_quantize: {fmt.name} has no tensor scale; leave tensor_amax out")
    if tensor_amax is not None and (tensor_amax.dtype != torch.float32 or tensor_amax.dim() != 0):
        got = f"{tensor_amax.dtype} of shape {list(tensor_amax.shape)}"
        raise ValueError(f"grouped_quantize: tensor_amax must be a float32 scalar, got {got}")


def _check_groups(x, group_ends, fmt, group_tables):
    check_group_ends("grouped_quantize", group_ends, x.shape[0], x.device)
    check_group_tables("grouped_quantize", group_tables, group_ends, x.shape[0], fmt.block[1])


def _grouped_quantize(
    x, group_ends, amax_bits, format, rowwise, columnwise, power_of_2_scales, backend, group_tables=None
):
    fmt = get_format(format)
    _check_groups(x, group_ends, fmt, group_tables)
    amax = None if amax_bits is None else amax_bits.view(torch.float32)
    if pick_kernel("grouped_quantize", x, backend, quantizes=True) is not Backend.TRITON:
        return reference.quantize(x, group_ends, fmt, amax, rowwise, columnwise, power_of_2_scales)
    from torchao_blockwise.ops.grouped_quantize import kernels_triton as triton

    return triton.quantize(x, group_ends, fmt, amax, rowwise, columnwise, power_of_2_scales, group_tables)


def _grouped_quantize_fake(
    x, group_ends, amax_bits, format, rowwise, columnwise, power_of_2_scales, backend, group_tables=None
):
    fmt = get_format(format)
    _check_groups(x, group_ends, fmt, group_tables)
    return new_copies(x, fmt, x.shape, rowwise, columnwise, group_ends)


def _grouped_amax_bits(x, group_ends):
    check_group_ends("grouped_quantize", group_ends, x.shape[0], x.device)
    return reference.tensor_amax(x, group_ends).view(torch.int32)


def _grouped_amax_bits_fake(x, group_ends):
    check_group_ends("grouped_quantize", group_ends, x.shape[0], x.device)
    return x.new_empty((), dtype=torch.int32)


grouped_quantize_op = define_op(
    "grouped_quantize(Tensor x, Tensor group_ends, Tensor? amax_bits, str format, bool rowwise, bool columnwise,"
    " bool power_of_2_scales, str backend, Tensor? group_tables=None) -> Tensor[]",
    _grouped_quantize,
    _grouped_quantize_fake,
)
grouped_amax_bits_op = define_op(
    "grouped_amax_bits(Tensor x, Tensor group_ends) -> Tensor", _grouped_amax_bits, _grouped_amax_bits_fake
)
