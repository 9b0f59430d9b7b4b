"""Normalize and quantize: RMSNorm or LayerNorm of rows and the block-scaled copies of it, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats import FP8_1X128, HIGH_PRECISION_DTYPES, CastOptions, Copies
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, why_no_encoders
from torchao_blockwise.ops.fused.norm import reference
from torchao_blockwise.ops.fused.norm.values import Norm
from torchao_blockwise.ops.operands import (
    check_dtype,
    check_options,
    copies_of,
    new_copies,
    why_no_tiles,
    without_grad,
)
from torchao_blockwise.ops.quantization import quantize_by
from torchao_blockwise.ops.quantization.reference import quantize as quantize_by_reference
from torchao_blockwise.ops.registry import OPTIONS, Operation

_KINDS = ("rms", "layer")


class NormStatistics(NamedTuple):
    """What a norm knows of each row: `mean` f32 [M], None for RMSNorm, and `rstd` f32 [M]."""

    mean: torch.Tensor | None
    rstd: torch.Tensor


def norm_statistics(x: torch.Tensor, kind: str, eps: float, *, backend: Backend | str | None = None) -> NormStatistics:
    """rstd = 1 / √(mean((x - mean)²) + eps) of each row; "rms" has no mean, "layer" the row's.

    x: [M, K] bf16 | f16 | f32, any strides. kind: "rms" or "layer".
    Returns fp32 [M]. Sums are fp32 in an order that is the backend's own: values agree to some ulps. A row with NaN or
    Inf has rstd NaN or 0; K = 0 gives NaN. Not differentiable.
    Raises TypeError for a dtype, ValueError for a shape, kind or backend that does not exist.
    Source: RMSNorm (arXiv 1910.07467); LayerNorm (arXiv 1607.06450).
    """
    if kind not in _KINDS:
        raise ValueError(f"norm_statistics: kind must be one of {_KINDS}, got {kind!r}")
    _check_x("norm_statistics", x)
    (x,) = without_grad(x)  # type: ignore[assignment]  # no None
    *mean, rstd = norm_statistics_op(x, kind == "layer", eps, backend)
    return NormStatistics(mean[0] if mean else None, rstd)


def normalize(
    x: torch.Tensor,
    statistics: NormStatistics,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """y = (x - mean) · rstd · weight + bias, from left to right, each step rounded to fp32; the result to `dtype`.

    x: [M, K] bf16 | f16 | f32, any strides. weight, bias: [K] of any of these dtypes, or None.
    Returns [M, K] of `dtype`, default that of `x`. Bits do not depend on the backend. Not differentiable.
    Raises TypeError for a dtype, ValueError for shapes or a backend that does not exist.
    """
    return normalize_op(_norm_of("normalize", x, statistics, weight, bias, dtype), backend)


def norm_quantize(
    x: torch.Tensor,
    options: CastOptions,
    statistics: NormStatistics,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize(normalize(x, ..), ..)` in one pass: y = (x - mean) · rstd · weight + bias never goes to memory.

    x: [M, K] bf16 | f16 | f32, any strides. statistics: of `norm_statistics`. weight, bias: [K] or None.
    options: what is given of y, as `quantize` would.
    dtype: what y is rounded to before it is quantized, default the dtype of `x`.
    The same bits as the two operations one after the other, given the statistics. Formats with a tensor scale (NVFP4)
    need all of y before any block of it can be quantized, and 128×128 blocks have no kernel: these do run as the two.
    Not differentiable.

    Raises TypeError for a dtype, ValueError for shapes or a format, option or backend that does not exist.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3 and §5 (fusing the cast with the layer before).
    """
    check_options("norm_quantize", options)
    norm = _norm_of("norm_quantize", x, statistics, weight, bias, dtype)
    if options.fmt is not FP8_1X128:
        return quantize_by(normalize_op(norm, backend), options, backend=backend)
    return copies_of(norm_quantize_op(norm, options, backend), options)


def _check_x(op: str, x: torch.Tensor) -> None:
    check_dtype(op, x)
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be [M, K], got shape {list(x.shape)}; reshape it")


def _norm_of(
    op: str,
    x: torch.Tensor,
    statistics: NormStatistics,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> Norm:
    _check_x(op, x)
    for name, size, t in (
        ("mean", x.shape[0], statistics[0]),
        ("rstd", x.shape[0], statistics[1]),
        ("weight", x.shape[1], weight),
        ("bias", x.shape[1], bias),
    ):
        if t is not None and (t.dim() != 1 or t.shape[0] != size):
            raise ValueError(f"{op}: {name} must be [{size}] for x {list(x.shape)}, got shape {list(t.shape)}")
        if t is not None and t.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32, got {t.dtype}; cast it first")
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: dtype must be bfloat16, float16 or float32, got {dtype}")
    return Norm._make((*without_grad(x, weight, bias, *statistics), dtype or x.dtype))


# --- who computes it --------------------------------------------------------------------------------------------------

_TRITON, _GLUON = (f"{__name__}.kernels_{name}" for name in ("triton", "gluon"))


NORM = "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, ScalarType dtype"

norm_statistics_op = Operation(
    "norm_statistics(Tensor x, bool layer, float eps, str backend) -> Tensor[]",
    table=[
        kernels(Backend.TRITON, f"{_TRITON}:statistics"),
        Implementation(Backend.REFERENCE, reference.statistics),
    ],
    fake=lambda x, layer, eps: [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2 if layer else 1)],
)
normalize_op = Operation(
    f"normalize({NORM}, str backend) -> Tensor",
    takes=(Norm,),
    table=[
        kernels(Backend.TRITON, f"{_TRITON}:normalize"),
        Implementation(Backend.REFERENCE, reference.normalize),
    ],
    fake=lambda norm: norm.x.new_empty(norm.x.shape, dtype=norm.dtype),
)


def _why_no_tiles(norm: Norm, options: CastOptions) -> str | None:
    if norm.dtype.itemsize != 2:
        return f"the kernel makes elements of 16 bits, got {norm.dtype}"
    return why_no_tiles(options, norm.x)


norm_quantize_op = Operation(
    f"norm_quantize({NORM}, {OPTIONS}, str backend) -> Tensor[]",
    takes=(Norm, CastOptions),
    table=[
        kernels(Backend.GLUON, f"{_GLUON}:norm_quantize", _why_no_tiles),
        kernels(Backend.TRITON, f"{_TRITON}:norm_quantize", why_no_encoders),
        Implementation(
            Backend.REFERENCE, lambda norm, options: quantize_by_reference(reference.normalize(norm), None, options)
        ),
    ],
    fake=lambda norm, options: new_copies(norm.x, norm.x.shape, options),
)
