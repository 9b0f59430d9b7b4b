"""Grouped quantize: tokens of several experts to rowwise copies and to columnwise ones whose blocks keep to a group."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import CastOptions, Copies, Groups
from torchao_blockwise.ops.backend import Backend, Implementation, why_no_kernels
from torchao_blockwise.ops.groups.ends import check_group_ends, clamped_ends
from torchao_blockwise.ops.groups.quantization import reference
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.op import define_op
from torchao_blockwise.ops.operands import new_copies, why_no_tiles
from torchao_blockwise.ops.quantization import amax_of, matrix_amax_bits_op, tensor_amax_bits_op, why_no_quantizers


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


def _check_ends(x: torch.Tensor, ends: torch.Tensor, per_group: bool) -> None:
    check_group_ends("grouped_quantize", ends, x.shape[0], x.device)


def _amax_by_reference(x: torch.Tensor, ends: torch.Tensor, per_group: bool) -> torch.Tensor:
    amax = reference.group_amaxes(x, clamped_ends(ends, x.shape[0])) if per_group else reference.tensor_amax(x, ends)
    return amax.view(torch.int32)


@define_op(
    (
        Implementation(Backend.TRITON, _AMAX, why_no_kernels),
        Implementation(Backend.REFERENCE, _amax_by_reference),
    ),
    check=_check_ends,
)
def grouped_amax_bits_op(x: torch.Tensor, ends: torch.Tensor, per_group: bool, backend: Backend) -> torch.Tensor:
    return x.new_empty(ends.shape if per_group else (), dtype=torch.int32)


def amax_bits_of(x: torch.Tensor, groups: Groups | None, per_group: bool, backend: Backend) -> torch.Tensor:
    """Bits of the amax of `x`, or of its rows in groups.

    per_group: of each matrix of `x`, or of each group.
    """
    if groups is not None:
        return grouped_amax_bits_op(x, groups.ends, per_group, backend)
    return matrix_amax_bits_op(x, backend) if per_group and x.dim() > 2 else tensor_amax_bits_op(x, backend)
