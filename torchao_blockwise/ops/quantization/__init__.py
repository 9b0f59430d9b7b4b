"""Quantize a tensor block by block: one operation with options.

    x ── one read ──▶ rowwise copy and columnwise copy                    FP8, and NVFP4 with one amax

    x ── amax of x, and of its transform, in one read ──▶ two tensor scales
      ── a launch ──▶ rowwise copy        of x,            rounded with random bits of its stream
      ── a launch ──▶ columnwise copy     of the transform, rounded with those of the next stream

Copies that are transformed or rounded stochastically are computed one by one, because each has a separate tensor scale
and separate random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchao_blockwise.formats import (
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
    Place,
    RoundingBits,
    StochasticRounding,
    get_format,
    hadamard_number,
    key_of,
)
from torchao_blockwise.ops.backend import Backend, get_backend
from torchao_blockwise.ops.groups.ends import as_groups, check_row_blocks
from torchao_blockwise.ops.operands import check_dtype, check_options, with_global_scale
from torchao_blockwise.ops.quantization.operations import (
    global_scale_op,
    hadamard_amax_bits_op,
    quantize_both_op,
    quantize_op,
    take_key_op,
    tensor_amax_bits_op,
)


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool | BlockFormat | str = False,
    power_of_2_scales: bool = False,
    hadamard: bool | Sequence[int] = False,
    stochastic: StochasticRounding | None = None,
    scale_per_group: bool = False,
    tensor_amax: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    padded: bool = False,
    groups: Groups | torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """Quantize `x` block by block: scale = max(amax, fmt.min_amax) / fmt.element.max, qdata = rne(x / scale).

    x: [.., M, K] bf16 | f16 | f32, any strides; leading dims are independent matrices.
    rowwise: blocks along K: qdata [.., M, K], scale, global_scale; FP8_1X128 scales are [.., ⌈K/128⌉, M], all others
        [.., M blocks, K blocks]. 4-bit payload is packed two per byte: [.., M, ⌈K/2⌉] uint8.
    columnwise: `x` with its last two dims swapped, quantized rowwise, contiguous: qdata [.., K, M]. For square blocks
        that is the exact transpose of the rowwise result. FP8_128X128 with `fmt` FP8_1X128: this copy in square blocks,
        with scales [.., ⌈K/128⌉, ⌈M/128⌉].
    power_of_2_scales: FP8 only; rounds the encode factor down to a power of two.
    hadamard: NVFP4_1X16 only; apply the random Hadamard transform along M before the columnwise copy is quantized, in
        chunks of 16 rows, the last one padded with zeros: qdata [K, ⌈M/16⌉ · 16 / 2], with a separate tensor scale.
        True uses `formats.DEFAULT_SIGNS`; or pass 16 signs. The transform cancels in a GEMM of two such copies.
    stochastic: NVFP4_1X16 only; round up or down at random, more often to the nearer neighbor; see
        `StochasticRounding`. `hadamard` and `stochastic` need x [M, K].
    scale_per_group: NVFP4 only; compute a tensor scale for each matrix [M, K] of `x`, or for each group: global_scale
        f32 [..] or [E], 1 for an empty group.
    tensor_amax: NVFP4 only; the amax of the whole tensor if `x` is a part of it. f32 scalar; with `scale_per_group`
        f32 [..] or [E]; with `hadamard` two amaxes, of the tensor and of its transform.
    padded: append zero rows to `x`, up to a multiple of 32, before the columnwise copy is quantized. GEMMs of two such
        copies have the same result, and need no copy if M is not a multiple of 32.
    groups: for tokens x [M, K] in formats with one-row blocks: a result of `make_groups` for M and `fmt`, or only the
        ends, int32 [E], cumulative, on x's device: group g is rows [ends[g-1], ends[g]). No block along the tokens
        extends over two groups, and each group is bitwise identical to the group quantized by itself. The columnwise
        copy pads each group with zero rows to whole blocks of B: qdata [K, P], P = padded_tokens(M, E, B), scales FP8
        [P/B, K], NVFP4 [K, P/B], square blocks [⌈K/B⌉, P/B]. Rows after the last group count as zeros, even if they
        are NaN. Shapes and launches depend only on M and E, so the host reads nothing back. On a CPU, the ends are
        checked. On a GPU, end g is the largest of ends 0 to g, each clamped to [0, M].
    backend: AUTO (default), or the name of a backend.
    Returns `Copies(rowwise, columnwise)` of operands, None for a copy that is not requested, from one read of `x`, or
        one for each copy with `hadamard` or `stochastic`.
    A zero block decodes to zeros, a block with NaN to NaN, and a block with Inf to no finite number. In NVFP4, NaN and
    Inf make the whole tensor NaN. Bits do not depend on the backend. Not differentiable.

    Raises TypeError for a dtype, ValueError for an invalid shape, format, option or backend.
    Source: DeepSeek-V3 report (arXiv 2412.19437) §3.3; NVFP4 pretraining (arXiv 2509.25149).
    """
    options = CastOptions(
        get_format(fmt),
        rowwise,
        bool(columnwise),
        power_of_2_scales,
        padded,
        hadamard_number(hadamard),
        scale_per_group,
        "" if isinstance(columnwise, bool) else get_format(columnwise).name,
    )
    return quantize_by(
        x, options, as_groups(groups), tensor_amax=tensor_amax, rounding_bits=stochastic, backend=backend
    )


def quantize_by(
    x: torch.Tensor,
    options: CastOptions,
    groups: Groups | None = None,
    *,
    tensor_amax: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    rounding_bits: RoundingBits | StochasticRounding | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize` with all options in one value."""
    fmt = options.fmt
    if x.dtype not in HIGH_PRECISION_DTYPES:
        check_dtype("quantize", x)
    check_options("quantize", options)
    if isinstance(rounding_bits, StochasticRounding):
        rounding_bits = _rounding_bits_of(options, rounding_bits, x.device)
    one_by_one = bool(options.hadamard) or rounding_bits is not None
    if groups is not None:
        check_row_blocks("quantize", fmt)
    if (one_by_one or groups is not None) and x.dim() != 2:
        raise ValueError(f"quantize: x must be [M, K], got shape {list(x.shape)}; flatten its leading dims")
    if x.dim() < 2:
        raise ValueError(f"quantize: x must have at least 2 dims [.., M, K], got shape {list(x.shape)}; reshape it")
    if tensor_amax is not None:
        _check_amax(x, options, groups, tensor_amax)
    cast = quantize_both_op if options.rowwise and options.columnwise else quantize_op
    if not fmt.has_global_scale:
        return cast(x, None, options, groups, None, _ALL, backend)
    # The reference computes its own amaxes and scales. Not all other backends have kernels for them.
    scaled_by = Backend.REFERENCE if get_backend(backend) is Backend.REFERENCE else Backend.AUTO
    amaxes = _amax_bits(x, options, groups, tensor_amax, scaled_by)
    if not one_by_one:
        scale = global_scale_op(amaxes[0], scaled_by)
        return with_global_scale(cast(x, amaxes[0], options, groups, None, _ALL, backend), scale)
    copies: list[Operand | None] = [None, None]
    key, *places = (None, _ALL, _ALL) if rounding_bits is None else rounding_bits
    for columnwise in (0, 1):
        if not (options.columnwise if columnwise else options.rowwise):
            continue
        # `torch.compile` of PyTorch 2.11 cannot return the result of `_replace`.
        one = CastOptions(
            fmt,
            not columnwise,
            bool(columnwise),
            padded=options.padded,
            hadamard=options.hadamard * columnwise,
            scale_per_group=options.scale_per_group,
        )
        copy = quantize_op(x, amaxes[columnwise], one, groups, key, places[columnwise], backend)
        copies[columnwise] = with_global_scale(copy, global_scale_op(amaxes[columnwise], scaled_by))[columnwise]
    return Copies(*copies)


# The place of a copy that is not a part of another one.
_ALL = Place()


def _rounding_bits_of(options: CastOptions, rounding: StochasticRounding, device: torch.device) -> RoundingBits:
    """Return the random bits of both copies, for operations on `device`; raise ValueError for invalid options."""
    if options.fmt is not NVFP4_1X16:
        raise ValueError(f"quantize: stochastic is for {NVFP4_1X16.name}, got {options.fmt.name}; leave it out")
    is_part = rounding.start != (0, 0) or rounding.grid is not None
    if is_part and options.rowwise and options.columnwise:
        raise ValueError(
            "quantize: start and grid of stochastic refer to the blocks of one copy, but both copies are requested; "
            "request them in separate calls, the columnwise one with stream + 1"
        )
    place = Place(0, *rounding.start, -1 if rounding.grid is None else rounding.grid)
    return RoundingBits(key_of(rounding, device), place, place._replace(operand=1))


def _check_amax(
    x: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    tensor_amax: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Raise ValueError unless these are the amaxes for copies with these options."""
    if not options.fmt.has_global_scale:
        raise ValueError(f"quantize: {options.fmt.name} has no tensor scale; leave tensor_amax out")
    if isinstance(tensor_amax, tuple) != bool(options.hadamard):
        raise ValueError(
            "quantize: tensor_amax must be a tensor, or with hadamard a tuple: the tensor's amax, the transform's amax"
        )
    of_scales: list[int] = []
    if options.scale_per_group:
        of_scales = list(x.shape[:-2] if groups is None else groups.ends.shape)
    for amax in tensor_amax if isinstance(tensor_amax, tuple) else (tensor_amax,):
        if amax.dtype != torch.float32 or list(amax.shape) != of_scales:
            wanted = f"{of_scales} float32, one for each group" if of_scales else "a float32 scalar"
            raise ValueError(f"quantize: tensor_amax must be {wanted}, got {amax.dtype} of shape {list(amax.shape)}")


def _amax_bits(
    x: torch.Tensor,
    options: CastOptions,
    groups: Groups | None,
    tensor_amax: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the amaxes for the rowwise and the columnwise copy of `x`, as int32; they may be the same tensor."""
    if isinstance(tensor_amax, tuple):
        return tensor_amax[0].view(torch.int32), tensor_amax[1].view(torch.int32)
    if tensor_amax is not None:
        bits = tensor_amax.view(torch.int32)
    elif options.hadamard:
        return hadamard_amax_bits_op(x, options.hadamard, groups, options.scale_per_group, backend)
    else:
        each = options.scale_per_group and (groups is not None or x.dim() > 2)
        bits = tensor_amax_bits_op(x, None if groups is None else groups.ends, each, backend)
    return bits, bits


def next_rounding_bits(
    key: torch.Tensor | None, gradient: torch.Tensor, places: tuple[Place, Place] | None = None
) -> RoundingBits | None:
    """Return the random bits for both copies of a `gradient`, and increment `use` in the key.

    key: int64 [4] (seed, stream, use, first expert) on the gradient's device; if None, returns None.
    places: the places of the rowwise and the columnwise copy in the whole ones; None for whole copies.
    """
    if key is None:
        return None
    taken = take_key_op(key, gradient)
    return RoundingBits(taken) if places is None else RoundingBits(taken, *places)
