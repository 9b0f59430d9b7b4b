"""SwiGLU and quantize: silu(gate) · up, or its gradients, and the block-scaled copies of it, in one pass."""

from __future__ import annotations

import torch

from torchao_blockwise.formats import FP8_1X128, CastOptions, Copies, Draws, Groups
from torchao_blockwise.ops.backend import Backend, Implementation, kernels, why_no_encoders
from torchao_blockwise.ops.fused.swiglu import reference
from torchao_blockwise.ops.groups.ends import as_groups, check_row_blocks
from torchao_blockwise.ops.groups.tables.layout import check_groups
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
from torchao_blockwise.ops.registry import OPTIONS, Operation, groups

# Bytes of payload that a store of a kernel writes.
_ALIGNMENT = 16


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | str | None = None) -> torch.Tensor:
    """h = (gate · sigmoid(gate)) · up, each step rounded to fp32; the result to the dtype of `gate`.

    gate, up: [M, H] bf16 | f16 | f32, both of one dtype, any strides: halves of one [M, 2H] will do.
    Returns [M, H]. e^x is computed by operations that round alike everywhere (swiglu_quantize/exponential.py), so bits
    do not depend on the backend; the error of sigmoid is at most (3 + |gate|) · 2^-23 of it and, which shows below -70,
    2^-125; from -87 on it is 0. -Inf gives NaN, as `F.silu` does. Not differentiable.
    Raises TypeError for a dtype, ValueError for shapes or a backend that does not exist.
    Source: GLU Variants Improve Transformer (arXiv 2002.05202).
    """
    _check("swiglu", gate=gate, up=up)
    return swiglu_op(*without_grad(gate, up), backend)


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    options: CastOptions,
    *,
    groups: Groups | torch.Tensor | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize(swiglu(gate, up), ..)` in one pass: h = silu(gate) · up never goes to memory.

    gate, up: as in `swiglu`. options: what is given of h, as `quantize` would.
    groups: of tokens in groups; then it is `quantize(swiglu(gate, up), groups=groups, ..)`, padded as that is.
    The same bits as the two operations one after the other. NVFP4 and 128×128 blocks do run as the two: a tensor scale
    needs all of h before any block of it can be quantized. Not differentiable.

    Raises TypeError for a dtype, ValueError for shapes, ends or a format, option or backend that does not exist.
    """
    groups = _check_quantize("swiglu_quantize", options, groups)
    _check("swiglu_quantize", gate=gate, up=up)
    inputs = without_grad(gate, up)
    if options.fmt is not FP8_1X128:
        return quantize_by(swiglu_op(*inputs, backend), options, groups, backend=backend)
    return copies_of(swiglu_quantize_op(*inputs, options, groups, backend), options)


def swiglu_backward(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, backend: Backend | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate = (dh · up) · (s · (1 + gate · (1 - s))) and dup = dh · (gate · s), with s = sigmoid(gate), in fp32.

    dh: gradient of h [M, H], of any high-precision dtype and strides. gate, up: as in `swiglu`.
    Returns (dgate, dup), each [M, H] and contiguous, rounded once to the dtype of `gate`. Each step is rounded to fp32,
    so bits do not depend on the backend.
    Raises TypeError for a dtype, ValueError for shapes or a backend that does not exist.
    """
    _check("swiglu_backward", gate=gate, up=up, dh=dh)
    return swiglu_backward_op(*without_grad(dh, gate, up), backend)


def swiglu_backward_quantize(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    options: CastOptions,
    *,
    groups: Groups | torch.Tensor | None = None,
    draws: Draws | None = None,
    backend: Backend | str | None = None,
) -> Copies:
    """`quantize(cat(swiglu_backward(dh, gate, up), dim=1), ..)` in one pass: the gradient of a merged projection.

    dh, gate, up: as in `swiglu_backward`. Options and result as in `swiglu_quantize`, for a tensor [M, 2H] whose first
    half is dgate and second half dup. Where H is no multiple of 128, one block holds parts of both; where it is none of
    16 either, rows of the second half start off 16 bytes, and this runs as the two operations, as NVFP4 does.
    draws: the random bits of copies in NVFP4.

    Raises TypeError for a dtype, ValueError for shapes, ends or a format, option or backend that does not exist.
    """
    groups = _check_quantize("swiglu_backward_quantize", options, groups)
    _check("swiglu_backward_quantize", gate=gate, up=up, dh=dh)
    inputs = without_grad(dh, gate, up)
    if options.fmt is not FP8_1X128 or gate.shape[1] % _ALIGNMENT:
        gradient = torch.cat(swiglu_backward_op(*inputs, backend), 1)
        return quantize_by(gradient, options, groups, draws=draws, backend=backend)
    return copies_of(swiglu_backward_quantize_op(*inputs, options, groups, backend), options)


def _check_quantize(op: str, options: CastOptions, groups: Groups | torch.Tensor | None) -> Groups | None:
    check_options(op, options)
    if groups is None:
        return None
    check_row_blocks(op, options.fmt)
    return as_groups(groups)


def _check(op: str, **tensors: torch.Tensor) -> None:
    gate = tensors["gate"]
    for name, x in tensors.items():
        check_dtype(op, x, name)
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} must be [M, H], got shape {list(x.shape)}; reshape it")
        if x.shape != gate.shape:
            raise ValueError(f"{op}: gate and {name} must agree in shape, got {list(gate.shape)} and {list(x.shape)}")
    if tensors["up"].dtype != gate.dtype:
        raise TypeError(f"{op}: gate and up must have one dtype, got {gate.dtype} and {tensors['up'].dtype}")


# --- who computes it --------------------------------------------------------------------------------------------------


_TRITON, _GLUON = (f"{__name__}.kernels_{name}" for name in ("triton", "gluon"))


swiglu_op = Operation(
    "swiglu(Tensor gate, Tensor up, str backend) -> Tensor",
    table=[
        kernels(Backend.TRITON, f"{_TRITON}:swiglu"),
        Implementation(Backend.REFERENCE, reference.swiglu),
    ],
    fake=lambda gate, up: gate.new_empty(gate.shape),
)
swiglu_quantize_op = Operation(
    f"swiglu_quantize(Tensor gate, Tensor up, {OPTIONS}, {groups('Tensor?')}, str backend) -> Tensor[]",
    takes=(None, None, CastOptions, Groups),
    table=[
        kernels(
            Backend.GLUON, f"{_GLUON}:swiglu_quantize", lambda gate, up, options, _: why_no_tiles(options, gate, up)
        ),
        kernels(Backend.TRITON, f"{_TRITON}:swiglu_quantize", why_no_encoders),
        Implementation(
            Backend.REFERENCE,
            lambda gate, up, options, groups: quantize_by_reference(reference.swiglu(gate, up), None, options, groups),
        ),
    ],
    fake=lambda gate, up, options, groups: new_copies(gate, gate.shape, options, groups),
    check=lambda gate, up, options, groups: check_groups(
        "swiglu_quantize", groups, gate.shape[0], gate.device, options.fmt.block[1]
    ),
)


swiglu_backward_op = Operation(
    "swiglu_backward(Tensor dh, Tensor gate, Tensor up, str backend) -> (Tensor, Tensor)",
    table=[
        kernels(Backend.TRITON, f"{_TRITON}:swiglu_backward"),
        Implementation(Backend.REFERENCE, reference.swiglu_backward),
    ],
    fake=lambda dh, gate, up: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
)


swiglu_backward_quantize_op = Operation(
    f"swiglu_backward_quantize(Tensor dh, Tensor gate, Tensor up, {OPTIONS}, {groups('Tensor?')}, str backend)"
    " -> Tensor[]",
    takes=(None, None, None, CastOptions, Groups),
    table=[
        kernels(
            Backend.GLUON,
            f"{_GLUON}:swiglu_backward_quantize",
            lambda dh, gate, up, options, _: why_no_tiles(options, dh, gate, up),
        ),
        kernels(Backend.TRITON, f"{_TRITON}:swiglu_backward_quantize", why_no_encoders),
        Implementation(
            Backend.REFERENCE,
            lambda dh, gate, up, options, groups: quantize_by_reference(
                torch.cat(reference.swiglu_backward(dh, gate, up), 1), None, options, groups
            ),
        ),
    ],
    fake=lambda dh, gate, up, options, groups: new_copies(gate, (gate.shape[0], 2 * gate.shape[1]), options, groups),
    check=lambda dh, gate, up, options, groups: check_groups(
        "swiglu_backward_quantize", groups, gate.shape[0], gate.device, options.fmt.block[1]
    ),
)
