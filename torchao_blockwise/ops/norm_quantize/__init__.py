"""Normalise and quantise: RMSNorm or LayerNorm of rows and the block-scaled copies of it, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, get_format
from torchao_blockwise.ops.backend import Backend, get_backend
from torchao_blockwise.ops.fused import (
    FUSED_FORMATS,
    check_copies,
    made_copies,
    new_copies,
    operands_of,
    pick_kernel,
    quantized_copies,
    without_grad,
)
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.norm_quantize import reference
from torchao_blockwise.ops.quantize import quantize

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
    (x,) = without_grad(x)
    *mean, rstd = norm_statistics_op(x, kind == "layer", eps, get_backend(backend).value)
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
    _check("normalize", x, statistics, weight, bias, dtype)
    x, weight, bias = without_grad(x, weight, bias)
    return normalize_op(x, *statistics, weight, bias, dtype or x.dtype, get_backend(backend).value)


def norm_quantize(
    x: torch.Tensor,
    fmt: BlockFormat | str,
    statistics: NormStatistics,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    padded: bool = False,
    dtype: torch.dtype | None = None,
    backend: Backend | str | None = None,
):
    """`quantize(normalize(x, ..))` in one pass: y = (x - mean) · rstd · weight + bias never goes to memory.

    x: [M, K] bf16 | f16 | f32, any strides. statistics: of `norm_statistics`. weight, bias: [K] or None.
    rowwise, columnwise, power_of_2_scales, padded: as in `quantize`, and so is what is returned.
    dtype: what y is rounded to before it is quantised, default the dtype of `x`.
    The same bits as the two operations one after the other, given the statistics. Formats with a tensor scale (NVFP4)
    need all of y before any block of it can be quantised, and 128×128 blocks have no kernel: these do run as the two.
    Not differentiable.

    Raises TypeError for a dtype, ValueError for shapes or a format, option or backend that does not exist.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3 and §5 (fusing the cast with the layer before).
    """
    fmt, backend = get_format(fmt), get_backend(backend).value
    check_copies("norm_quantize", fmt, rowwise, columnwise, power_of_2_scales)
    _check("norm_quantize", x, statistics, weight, bias, dtype)
    x, weight, bias = without_grad(x, weight, bias)
    arguments = (x, *statistics, weight, bias, dtype or x.dtype)
    copies = {"rowwise": rowwise, "columnwise": columnwise, "power_of_2_scales": power_of_2_scales}
    if fmt not in FUSED_FORMATS:
        return quantize(normalize_op(*arguments, backend), fmt, **copies, padded=padded, backend=backend)
    return operands_of(norm_quantize_op(*arguments, fmt.name, *copies.values(), backend, padded), fmt)


def _check_x(op: str, x) -> None:
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: x must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be [M, K], got shape {list(x.shape)}; reshape it")


def _check(op: str, x, statistics, weight, bias, dtype) -> None:
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


def _norm_statistics(x, layer, eps, backend):
    if pick_kernel("norm_statistics", x, backend, quantizes=False) is Backend.TRITON:
        from torchao_blockwise.ops.norm_quantize import kernels_triton as triton

        statistics = triton.statistics(x, layer, eps)
    else:
        statistics = reference.statistics(x, layer, eps)
    return [t for t in statistics if t is not None]


def _norm_statistics_fake(x, layer, eps, backend):
    return [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2 if layer else 1)]


def _normalize(x, mean, rstd, weight, bias, dtype, backend):
    if pick_kernel("normalize", x, backend, quantizes=False) is Backend.TRITON:
        from torchao_blockwise.ops.norm_quantize import kernels_triton as triton

        return triton.normalize(x, mean, rstd, weight, bias, dtype)
    return reference.normalize(x, mean, rstd, weight, bias, dtype).contiguous()


def _normalize_fake(x, mean, rstd, weight, bias, dtype, backend):
    return x.new_empty(x.shape, dtype=dtype)


def _norm_quantize(
    x, mean, rstd, weight, bias, dtype, format, rowwise, columnwise, power_of_2_scales, backend, padded=False
):
    fmt = get_format(format)
    if pick_kernel("norm_quantize", x, backend, quantizes=True) is not Backend.TRITON:
        y = reference.normalize(x, mean, rstd, weight, bias, dtype)
        return quantized_copies(y, fmt, rowwise, columnwise, power_of_2_scales, padded)
    from torchao_blockwise.ops.norm_quantize import kernels_triton as triton

    copies = triton.norm_quantize(x, mean, rstd, weight, bias, dtype, fmt, rowwise, columnwise, power_of_2_scales)
    return made_copies(copies, fmt, x.shape[0], columnwise, padded)


def _norm_quantize_fake(
    x, mean, rstd, weight, bias, dtype, format, rowwise, columnwise, power_of_2_scales, backend, padded=False
):
    return new_copies(x, get_format(format), x.shape, rowwise, columnwise, padded=padded)


norm_statistics_op = define_op(
    "norm_statistics(Tensor x, bool layer, float eps, str backend) -> Tensor[]", _norm_statistics, _norm_statistics_fake
)
normalize_op = define_op(
    "normalize(Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, ScalarType dtype, str backend)"
    " -> Tensor",
    _normalize,
    _normalize_fake,
)
norm_quantize_op = define_op(
    "norm_quantize(Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, ScalarType dtype, str format,"
    " bool rowwise, bool columnwise, bool power_of_2_scales, str backend, bool padded=False) -> Tensor[]",
    _norm_quantize,
    _norm_quantize_fake,
)
