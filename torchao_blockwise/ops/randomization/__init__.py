"""Quantize with what NVFP4 gradients need: the random Hadamard transform, and stochastic rounding.

    x ── amax of x, and of its transform, in one read ──▶ two tensor scales
      ── a launch ──▶ rowwise copy        of x,            rounded by the bits of its stream
      ── a launch ──▶ columnwise copy     of the transform, rounded by those of the next one

Copies are made one by one, because each has its tensor scale and its random bits.
"""

from __future__ import annotations

import torch

from torchao_blockwise.formats import (
    NVFP4_1X16,
    CastOptions,
    Copies,
    Draws,
    Groups,
    Operand,
    Place,
    StochasticRounding,
    draws_of,
)
from torchao_blockwise.ops.backend import Backend, Implementation, get_backend, why_no_kernels
from torchao_blockwise.ops.groups.ends import check_group_ends
from torchao_blockwise.ops.groups.quantization import amax_bits_of
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.op import define_op, with_global_scale, without_grad
from torchao_blockwise.ops.operands import check_options, check_tensor_amax, new_copies, tensor_scales_shape
from torchao_blockwise.ops.quantization import global_scale_op, scaling_backend, why_no_quantizers
from torchao_blockwise.ops.randomization import reference


def checked_draws(
    op: str, options: CastOptions, rounding: StochasticRounding | None, device: torch.device
) -> Draws | None:
    """What operations on `device` carry of a rounding, None for round to nearest.

    Raises ValueError unless copies by these options can be rounded so.
    """
    if rounding is None:
        return None
    if options.fmt.name != NVFP4_1X16.name:
        raise ValueError(f"{op}: stochastic rounding is for {NVFP4_1X16.name}, got {options.fmt.name}; leave it out")
    if min(*rounding.start, 0 if rounding.grid is None else rounding.grid, rounding.expert) < 0:
        raise ValueError(
            f"{op}: start, grid and expert of stochastic must not be negative, got {rounding.start}, "
            f"{rounding.grid} and {rounding.expert}"
        )
    is_part = rounding.start != (0, 0) or rounding.grid is not None
    if is_part and options.rowwise and options.columnwise:
        raise ValueError(
            f"{op}: start and grid of stochastic are those of one copy's blocks, and both are asked for; "
            "ask for one after the other, the columnwise one with stream + 1"
        )
    return draws_of(rounding, device)


def randomized_copies(
    op: str,
    x: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    draws: Draws | None,
    tensor_amax: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    backend: Backend | str | None,
) -> Copies:
    """The copies of `x` [M, K] by these options.

    draws: None for round to nearest. tensor_amax: of x and of its transform; one where nothing is transformed.
    Raises ValueError for a shape or options that cannot be.
    """
    check_options(op, options)
    if x.dim() != 2:
        raise ValueError(
            f"{op}: x must be [M, K] for hadamard and stochastic, got shape {list(x.shape)}; flatten its leading dims"
        )
    (x,) = without_grad(x)  # type: ignore[assignment]  # no None
    backend = get_backend(backend)
    scaled_by = scaling_backend(backend)
    if tensor_amax is None:
        amaxes = amax_bits_of_both(x, options, groups, scaled_by)
    else:
        if isinstance(tensor_amax, tuple) != bool(options.hadamard):
            raise ValueError(
                f"{op}: tensor_amax must be two, of the tensor and of its transform, with hadamard, and one without it"
            )
        both = tensor_amax if isinstance(tensor_amax, tuple) else (tensor_amax, tensor_amax)
        for amax in both:
            check_tensor_amax(op, options.fmt, amax, tensor_scales_shape(x, options, groups))
        amaxes = both[0].view(torch.int32), both[1].view(torch.int32)
    copies: list[Operand | None] = []
    key, *places = (None, Place(), Place()) if draws is None else draws
    for columnwise, asked in enumerate((options.rowwise, options.columnwise)):
        if not asked:
            copies.append(None)
            continue
        one = CastOptions(
            options.fmt,
            not columnwise,
            bool(columnwise),
            padded=options.padded,
            hadamard=options.hadamard * columnwise,
            scale_per_group=options.scale_per_group,
        )
        made = randomized_quantize_op(x, amaxes[columnwise], one, groups, key, places[columnwise], backend)
        scaled = with_global_scale(made, global_scale_op(amaxes[columnwise], scaled_by))
        copies.append(scaled[columnwise])
    return Copies(*copies)


def amax_bits_of_both(
    x: torch.Tensor, options: CastOptions, groups: Groups | None, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of the amax of `x` [M, K] and of its transform; twice the first where there is none."""
    if options.hadamard:
        return hadamard_amax_bits_op(x, options.hadamard, groups, options.scale_per_group, backend)
    bits = amax_bits_of(x, groups, options.scale_per_group, backend)
    return bits, bits


def _by_reference(
    x: torch.Tensor,
    amax_bits: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
) -> Copies:
    made = reference.copy(x, amax_bits.view(torch.float32), options, groups, key, place)
    return Copies(made, None) if options.rowwise else Copies(None, made)


def _check_groups(x: torch.Tensor, amax_bits: object, options: CastOptions, groups: Groups | None, *_: object) -> None:
    if groups is not None:
        check_groups("grouped_quantize", groups, x.shape[0], x.device, options.fmt.block[1])


@define_op(
    (
        Implementation(Backend.TRITON, f"{__name__}.kernels_triton:quantize", why_no_quantizers),
        Implementation(Backend.REFERENCE, _by_reference),
    ),
    check=_check_groups,
    said="quantize",
)
def randomized_quantize_op(
    x: torch.Tensor,
    amax_bits: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    key: torch.Tensor | None,
    place: Place,
    backend: Backend,
) -> Operand:
    return new_copies(x, x.shape, options, groups)  # type: ignore[return-value]  # with one of them


def _amaxes_by_reference(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    plain, transformed = reference.amaxes(x, hadamard, groups, per_group)
    return plain.view(torch.int32), transformed.view(torch.int32)


def _check_ends(x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool) -> None:
    if groups is not None:
        check_group_ends("grouped_quantize", groups.ends, x.shape[0], x.device)


@define_op(
    (
        Implementation(Backend.TRITON, f"{__name__}.kernels_triton:amaxes", why_no_kernels),
        Implementation(Backend.REFERENCE, _amaxes_by_reference),
    ),
    check=_check_ends,
    said="quantize",
)
def hadamard_amax_bits_op(
    x: torch.Tensor, hadamard: int, groups: Groups | None, per_group: bool, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = groups.ends.shape if per_group and groups is not None else ()
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.int32)
