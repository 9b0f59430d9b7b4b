"""Grouped quantize: tokens of several experts to rowwise copies and to columnwise ones whose blocks keep to a group."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import BlockFormat, CastOptions, Copies, Groups, get_format
from torchao_blockwise.ops.backend import Backend, Implementation, get_backend, why_no_kernels
from torchao_blockwise.ops.groups.ends import as_groups, check_group_ends, check_row_blocks
from torchao_blockwise.ops.groups.quantization import reference
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.op import define_op
from torchao_blockwise.ops.operands import check_dtype, new_copies, why_no_tiles
from torchao_blockwise.ops.quantization import amax_of, copies_by, quantize_with, why_no_quantizers


def grouped_quantize(
    x: torch.Tensor,
    groups: Groups | torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    tensor_amax: torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize` of tokens in groups: no block along the tokens reaches from one group into the next.

    x: [M, K] bf16 | f16 | f32, any strides.
    groups: a result of `make_groups` for M and `fmt`, or the ends alone, int32 [E], cumulative, on x's device: group g
        is rows [ends[g-1], ends[g]). Rows after the last group count as zeros, whatever they hold, NaN as well.
    fmt: of one-row blocks, fp8_1x128 | nvfp4_1x16.
    rowwise: the operand of [M, K] that `quantize` gives for x with those rows set to zero.
    columnwise: the operand of [K, P], P = padded_tokens(M, E, B) for blocks of B, that `quantize` gives for x with each
        group padded with zero rows to a multiple of B: group g fills columns [padded_ends[g-1], padded_ends[g]), and
        columns after the last group are zeros. Scales as there, FP8 [P/B, K], NVFP4 [K, P/B].
    power_of_2_scales, backend: as in `quantize`.
    tensor_amax: NVFP4 only, as in `quantize`; without it the amax is that of the rows in groups.
    Every byte is defined. The host reads nothing back: shapes and launches follow from M and E alone. Bits do not
    depend on the backend. Not differentiable.

    On a CPU the values of the ends are checked; a GPU takes end g for the largest of ends 0 to g, each clamped to
    [0, M].
    Raises TypeError for a dtype, ValueError for shapes, devices, ends, or a format, option or backend that does not
    exist.
    """
    options = CastOptions(get_format(fmt), rowwise, columnwise, power_of_2_scales)
    return quantize_by(x, options, as_groups(groups), tensor_amax=tensor_amax, backend=backend)


def quantize_by(
    x: torch.Tensor,
    options: CastOptions,
    groups: Groups | None = None,
    *,
    tensor_amax: torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize` of `x` by options that travel whole, or `grouped_quantize` where its rows are in groups."""
    if groups is None:
        return quantize_with(x, options, tensor_amax, backend)
    # Each group is padded anyway.
    name, options = "grouped_quantize", options if options.padded else options._replace(padded=True)
    check_row_blocks(name, options.fmt)
    check_dtype(name, x)
    if x.dim() != 2:
        raise ValueError(f"{name}: x must be [M, K], got shape {list(x.shape)}; flatten its leading dims")

    def amax_bits_of(x: torch.Tensor, backend: Backend) -> torch.Tensor:
        return grouped_amax_bits_op(x, groups.ends, backend)

    others = groups, get_backend(backend)
    return copies_by(grouped_quantize_op, others, x, options, tensor_amax, amax_bits_of, name)


def _check_groups(x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, groups: Groups) -> None:
    check_groups("grouped_quantize", groups, x.shape[0], x.device, options.fmt.block[1])


def _by_reference(x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, groups: Groups) -> Copies:
    return reference.quantize(x, groups.ends, options, amax_of(amax_bits))


# The kernels of `quantize`, led by a table of blocks.
_TRITON, _GLUON = (f"torchao_blockwise.ops.quantization.kernels_{name}:quantize" for name in ("triton", "gluon"))
_AMAX = "torchao_blockwise.ops.quantization.kernels_amax:grouped_amax_bits"


@define_op(
    (
        Implementation(Backend.GLUON, _GLUON, lambda x, amax_bits, options, groups: why_no_tiles(options, x)),
        Implementation(Backend.TRITON, _TRITON, why_no_quantizers),
        Implementation(Backend.REFERENCE, _by_reference),
    ),
    check=_check_groups,
)
def grouped_quantize_op(
    x: torch.Tensor, amax_bits: torch.Tensor | None, options: CastOptions, groups: Groups, backend: Backend
) -> Copies:
    return new_copies(x, x.shape, options, groups)


def _check_ends(x: torch.Tensor, ends: torch.Tensor) -> None:
    check_group_ends("grouped_quantize", ends, x.shape[0], x.device)


@define_op(
    (
        Implementation(Backend.TRITON, _AMAX, why_no_kernels),
        Implementation(Backend.REFERENCE, lambda x, ends: reference.tensor_amax(x, ends).view(torch.int32)),
    ),
    check=_check_ends,
)
def grouped_amax_bits_op(x: torch.Tensor, ends: torch.Tensor, backend: Backend) -> torch.Tensor:
    return x.new_empty((), dtype=torch.int32)
