"""Norms and SwiGLU with quantization: one kernel computes an activation and quantizes it.

The activation is never stored in high precision. The result is bitwise identical to that of two separate operations.
Two operations do run for formats with a tensor scale (NVFP4), which need the whole tensor before any block can be
quantized, and for rowwise copies in 128×128 blocks, which kernels do not support. Not differentiable.

Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3 and §5 (fusing the cast with the layer before).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies, Groups, RoundingBits
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, triton_and_reference, why_no_encoders
from torchao_blockwise.ops.fused import reference
from torchao_blockwise.ops.groups.ends import as_groups
from torchao_blockwise.ops.groups.tables.layout import check_groups
from torchao_blockwise.ops.operands import check_dtype, new_copies, why_no_tiles
from torchao_blockwise.ops.padding import ROW_BYTES
from torchao_blockwise.ops.quantization import quantize_by
from torchao_blockwise.ops.quantization.reference import quantize as quantize_by_reference
from torchao_blockwise.ops.registry import OPTIONS, Operation, groups


class Norm(NamedTuple):
    """y = (x - mean) · rstd · weight + bias, from left to right, each step rounded to fp32; the result to `dtype`.

    x: [M, K] bf16 | f16 | f32, any strides. weight, bias: [K] of any of these dtypes, or None.
    mean, rstd: f32 [M], of `norm_statistics`; mean is None for RMSNorm.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    dtype: torch.dtype


def norm_statistics(
    x: torch.Tensor, kind: str, eps: float, *, backend: Backend | str | None = None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (mean, rstd) of each row: rstd = 1 / √(mean((x - mean)²) + eps); for "rms", without a mean.

    x: [M, K] bf16 | f16 | f32, any strides. kind: "rms" or "layer".
    Returns fp32 [M] each, or None for no mean. Sums are fp32, in an order that depends on the backend, so values may
    differ by a few ulps. A row with NaN or Inf has rstd NaN or 0; K = 0 gives NaN.
    Raises TypeError for a dtype, ValueError for an invalid shape, kind or backend.
    Source: RMSNorm (arXiv 1910.07467); LayerNorm (arXiv 1607.06450).
    """
    if kind not in ("rms", "layer"):
        raise ValueError(f"norm_statistics: kind must be rms or layer, got {kind!r}")
    *mean, rstd = norm_statistics_op(x, kind == "layer", eps, backend)
    return mean[0] if mean else None, rstd


def normalize(norm: Norm, *, backend: Backend | str | None = None) -> torch.Tensor:
    """Return y of `norm`, [M, K]. Bits do not depend on the backend.

    Raises TypeError for a dtype, ValueError for invalid shapes or backend.
    """
    return normalize_op(norm, backend)


def norm_quantize(norm: Norm, options: CastOptions, *, backend: Backend | str | None = None) -> Copies:
    """Quantize `normalize(norm)` in one pass.

    Raises TypeError for a dtype, ValueError for invalid shapes, format, options or backend.
    """
    if options.fmt is not FP8_1X128:
        return quantize_by(normalize(norm, backend=backend), options, backend=backend)
    return norm_quantize_op(norm, options, backend)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | str | None = None) -> torch.Tensor:
    """h = (gate · sigmoid(gate)) · up, each step rounded to fp32; the result to the dtype of `gate`.

    gate, up: [M, H] bf16 | f16 | f32, both of the same dtype, any strides, such as the halves of [M, 2H].
    Returns [M, H]. e^x is computed by operations that round equally on all devices (ops/fused/exponential.py), so bits
    do not depend on the backend. The relative error of sigmoid is at most (3 + |gate|) · 2^-23, plus an absolute error
    of 2^-125, which is noticeable only below -70; from -87 on, sigmoid is 0. -Inf gives NaN, as in `F.silu`.
    Raises TypeError for a dtype, ValueError for invalid shapes or backend.
    Source: GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    return swiglu_op(gate, up, backend)


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    options: CastOptions,
    *,
    groups: Groups | torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """Quantize `swiglu(gate, up)`, with tokens in `groups` if given, in one pass.

    Raises TypeError for a dtype, ValueError for invalid shapes, ends, format, options or backend.
    """
    groups = as_groups(groups)
    if options.fmt is not FP8_1X128:
        return quantize_by(swiglu(gate, up, backend=backend), options, groups, backend=backend)
    return swiglu_quantize_op(gate, up, options, groups, backend)


def swiglu_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate = (dh · up) · (s · (1 + gate · (1 - s))) and dup = dh · (gate · s), with s = sigmoid(gate), in fp32.

    dh: gradient of h [M, H], of any high-precision dtype and strides. gate, up: as in `swiglu`.
    Returns (dgate, dup), each [M, H] and contiguous, rounded once to the dtype of `gate`. Each step is rounded to fp32,
    so bits do not depend on the backend.
    Raises TypeError for a dtype, ValueError for invalid shapes or backend.
    """
    return swiglu_backward_op(dh, gate, up, backend)


def swiglu_backward_quantize(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    options: CastOptions,
    *,
    groups: Groups | torch.Tensor | None = None,
    rounding_bits: RoundingBits | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """Quantize the merged gradient [M, 2H] = (dgate | dup) of `swiglu` in one pass.

    If H is not a multiple of 128, one block contains parts of both. If it is not a multiple of 16 either, rows of the
    second half are not aligned to 16 bytes, and two operations run. rounding_bits: the random bits of copies in NVFP4.
    Raises TypeError for a dtype, ValueError for invalid shapes, ends, format, options or backend.
    """
    groups = as_groups(groups)
    if options.fmt is not FP8_1X128 or gate.shape[1] % ROW_BYTES:
        gradient = torch.cat(swiglu_backward(dh, gate, up, backend=backend), 1)
        return quantize_by(gradient, options, groups, rounding_bits=rounding_bits, backend=backend)
    return swiglu_backward_quantize_op(dh, gate, up, options, groups, backend)


# --- operations -------------------------------------------------------------------------------------------------------

_TRITON, _GLUON = (f"{__name__}.kernels_{name}" for name in ("triton", "gluon"))
NORM = "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, ScalarType dtype"


def _check_matrix(op: str, x: torch.Tensor, name: str = "x", dims: str = "M, K") -> None:
    check_dtype(op, x, name)
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be [{dims}], got shape {list(x.shape)}; reshape it")


def _check_norm(op: str, norm: Norm) -> None:
    _check_matrix(op, norm.x)
    rows, columns = norm.x.shape
    sizes = {"mean": rows, "rstd": rows, "weight": columns, "bias": columns}
    for name, size in sizes.items():
        t = getattr(norm, name)
        if t is not None and tuple(t.shape) != (size,):
            raise ValueError(f"{op}: {name} must be [{size}] for x {[rows, columns]}, got shape {list(t.shape)}")


norm_statistics_op = Operation(
    "norm_statistics(Tensor x, bool layer, float eps, str backend) -> Tensor[]",
    table=triton_and_reference(_TRITON, reference.norm_statistics),
    fake=lambda x, layer, eps: [x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2 if layer else 1)],
    check=lambda x, *_: _check_matrix("norm_statistics", x),
)
normalize_op = Operation(
    f"normalize({NORM}, str backend) -> Tensor",
    takes=(Norm,),
    table=triton_and_reference(_TRITON, reference.normalize),
    fake=lambda norm: norm.x.new_empty(norm.x.shape, dtype=norm.dtype),
    check=lambda norm: _check_norm("normalize", norm),
)


def _why_no_norm_tiles(norm: Norm, options: CastOptions) -> str | None:
    if norm.dtype.itemsize != 2:
        return f"the kernel supports only 16-bit dtypes, got {norm.dtype}"
    return why_no_tiles(options, norm.x)


norm_quantize_op = Operation(
    f"norm_quantize({NORM}, {OPTIONS}, str backend) -> Tensor[]",
    takes=(Norm, CastOptions),
    table=[
        kernels(Backend.GLUON, f"{_GLUON}:norm_quantize", _why_no_norm_tiles),
        kernels(Backend.TRITON, f"{_TRITON}:norm_quantize", why_no_encoders),
        Implementation(
            Backend.REFERENCE, lambda norm, options: quantize_by_reference(reference.normalize(norm), None, options)
        ),
    ],
    fake=lambda norm, options: new_copies(norm.x, norm.x.shape, options),
    check=lambda norm, options: _check_norm("norm_quantize", norm),
)


def _check_swiglu(op: str, *tensors: torch.Tensor) -> None:
    """tensors: gate and up, in backward after dh."""
    *dh, gate, up = tensors
    for name, x in zip(("up", "gate", "dh"), (up, gate, *dh)):
        _check_matrix(op, x, name, "M, H")
        if x.shape != gate.shape:
            raise ValueError(f"{op}: gate and {name} must agree in shape, got {list(gate.shape)} and {list(x.shape)}")
    if up.dtype != gate.dtype:
        raise TypeError(f"{op}: gate and up must have one dtype, got {gate.dtype} and {up.dtype}")


def _with_quantization(plain: Operation, compute: Callable[..., torch.Tensor], width: int) -> Operation:
    """Return the operation that fuses `plain` with quantization. compute: returns [M, width · H] of the reference."""
    name, tensors = plain.name, plain.schema.partition("(")[2].partition(", str")[0]

    def by_reference(*args: Any) -> Copies:
        *inputs, options, groups = args
        return quantize_by_reference(compute(*inputs), None, options, groups)

    def fake(*args: Any) -> Copies:
        (*_, gate, _), options, groups = args[:-2], *args[-2:]
        return new_copies(gate, (gate.shape[0], width * gate.shape[1]), options, groups)

    def check(*args: Any) -> None:
        *inputs, options, groups = args
        _check_swiglu(f"{name}_quantize", *inputs)
        check_groups(f"{name}_quantize", groups, inputs[0].shape[0], inputs[0].device, options.fmt.block[1])

    return Operation(
        f"{name}_quantize({tensors}, {OPTIONS}, {groups('Tensor?')}, str backend) -> Tensor[]",
        takes=(*[None] * tensors.count("Tensor"), CastOptions, Groups),
        table=[
            kernels(Backend.GLUON, f"{_GLUON}:{name}_quantize", lambda *args: why_no_tiles(args[-2], *args[:-2])),
            kernels(Backend.TRITON, f"{_TRITON}:{name}_quantize", why_no_encoders),
            Implementation(Backend.REFERENCE, by_reference),
        ],
        fake=fake,
        check=check,
    )


swiglu_op = Operation(
    "swiglu(Tensor gate, Tensor up, str backend) -> Tensor",
    table=triton_and_reference(_TRITON, reference.swiglu),
    fake=lambda gate, up: gate.new_empty(gate.shape),
    check=lambda *tensors: _check_swiglu("swiglu", *tensors),
)
swiglu_backward_op = Operation(
    "swiglu_backward(Tensor dh, Tensor gate, Tensor up, str backend) -> (Tensor, Tensor)",
    table=triton_and_reference(_TRITON, reference.swiglu_backward),
    fake=lambda dh, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
    check=lambda *tensors: _check_swiglu("swiglu_backward", *tensors),
)
swiglu_quantize_op = _with_quantization(swiglu_op, reference.swiglu, 1)
swiglu_backward_quantize_op = _with_quantization(
    swiglu_backward_op, lambda *tensors: torch.cat(reference.swiglu_backward(*tensors), 1), 2
)
