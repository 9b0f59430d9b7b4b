"""SwiGLU and quantise: silu(gate) · up, or its gradients, and the block-scaled copies of it, in one pass."""

from __future__ import annotations

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
from torchao_blockwise.ops.group_tables.layout import check_group_tables
from torchao_blockwise.ops.grouped_quantize import grouped_quantize
from torchao_blockwise.ops.grouped_quantize import reference as grouped_reference
from torchao_blockwise.ops.groups import check_group_ends, check_row_blocks
from torchao_blockwise.ops.library import define_op
from torchao_blockwise.ops.quantize import quantize
from torchao_blockwise.ops.swiglu_quantize import reference

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
    return swiglu_op(*without_grad(gate, up), get_backend(backend).value)


def swiglu_quantize(
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    group_ends: torch.Tensor | None = None,
    padded: bool = False,
    backend: Backend | str | None = None,
    group_tables: torch.Tensor | None = None,
):
    """`quantize(swiglu(gate, up))` in one pass: h = silu(gate) · up never goes to memory.

    gate, up: as in `swiglu`. rowwise, columnwise, power_of_2_scales, padded: as in `quantize`, and so is what is
        returned.
    group_ends, group_tables: of tokens in groups; then it is `grouped_quantize(swiglu(gate, up), group_ends)`, padded
        as that is, with its `group_tables`.
    The same bits as the two operations one after the other. NVFP4 and 128×128 blocks do run as the two: a tensor scale
    needs all of h before any block of it can be quantised. Not differentiable.

    Raises TypeError for a dtype, ValueError for shapes, ends or a format, option or backend that does not exist.
    """
    fmt, backend = get_format(fmt), get_backend(backend).value
    options = {"rowwise": rowwise, "columnwise": columnwise, "power_of_2_scales": power_of_2_scales}
    _check_quantize("swiglu_quantize", fmt, group_ends, **options)
    _check("swiglu_quantize", gate=gate, up=up)
    inputs = without_grad(gate, up)
    if fmt not in FUSED_FORMATS:
        return _quantize(swiglu_op(*inputs, backend), group_ends, fmt, options, padded, backend, group_tables)
    copies = swiglu_quantize_op(*inputs, fmt.name, *options.values(), backend, group_ends, padded, group_tables)
    return operands_of(copies, fmt)


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
    return swiglu_backward_op(*without_grad(dh, gate, up), get_backend(backend).value)


def swiglu_backward_quantize(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    fmt: BlockFormat | str,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    power_of_2_scales: bool = False,
    group_ends: torch.Tensor | None = None,
    padded: bool = False,
    backend: Backend | str | None = None,
    group_tables: torch.Tensor | None = None,
):
    """`quantize(cat(swiglu_backward(dh, gate, up), dim=1))` in one pass: the gradient of a merged [M, 2H] projection.

    dh, gate, up: as in `swiglu_backward`. Options and result as in `swiglu_quantize`, for a tensor [M, 2H] whose first
    half is dgate and second half dup. Where H is no multiple of 128, one block holds parts of both; where it is none of
    16 either, rows of the second half start off 16 bytes, and this runs as the two operations.

    Raises TypeError for a dtype, ValueError for shapes, ends or a format, option or backend that does not exist.
    """
    fmt, backend = get_format(fmt), get_backend(backend).value
    options = {"rowwise": rowwise, "columnwise": columnwise, "power_of_2_scales": power_of_2_scales}
    _check_quantize("swiglu_backward_quantize", fmt, group_ends, **options)
    _check("swiglu_backward_quantize", gate=gate, up=up, dh=dh)
    inputs = without_grad(dh, gate, up)
    if fmt not in FUSED_FORMATS or gate.shape[1] % _ALIGNMENT:
        gradient = torch.cat(swiglu_backward_op(*inputs, backend), 1)
        return _quantize(gradient, group_ends, fmt, options, padded, backend, group_tables)
    copies = swiglu_backward_quantize_op(
        *inputs, fmt.name, *options.values(), backend, group_ends, padded, group_tables
    )
    return operands_of(copies, fmt)


def _quantize(
    y: torch.Tensor,
    group_ends: torch.Tensor | None,
    fmt: BlockFormat,
    options: dict,
    padded: bool,
    backend: str,
    group_tables: torch.Tensor | None,
):
    if group_ends is None:
        return quantize(y, fmt, **options, padded=padded, backend=backend)
    return grouped_quantize(y, group_ends, fmt, **options, backend=backend, group_tables=group_tables)


def _check_quantize(op: str, fmt: BlockFormat, group_ends: torch.Tensor | None, **options: bool) -> None:
    check_copies(op, fmt, **options)
    if group_ends is not None:
        check_row_blocks(op, fmt)


def _merged_shape(gate: torch.Tensor) -> tuple[int, int]:
    """Of the gradient of gate and up side by side."""
    return gate.shape[0], 2 * gate.shape[1]


def _check(op: str, **tensors: torch.Tensor) -> None:
    gate = tensors["gate"]
    for name, x in tensors.items():
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32, got {x.dtype}; cast it first")
        if x.dim() != 2:
            raise ValueError(f"{op}: {name} must be [M, H], got shape {list(x.shape)}; reshape it")
        if x.shape != gate.shape:
            raise ValueError(f"{op}: gate and {name} must agree in shape, got {list(gate.shape)} and {list(x.shape)}")
    if tensors["up"].dtype != gate.dtype:
        raise TypeError(f"{op}: gate and up must have one dtype, got {gate.dtype} and {tensors['up'].dtype}")


def _swiglu(gate, up, backend):
    if pick_kernel("swiglu", gate, backend, quantizes=False) is Backend.TRITON:
        from torchao_blockwise.ops.swiglu_quantize import kernels_triton as triton

        return triton.swiglu(gate, up)
    return reference.swiglu(gate, up).contiguous()


def _swiglu_fake(gate, up, backend):
    return gate.new_empty(gate.shape)


def _swiglu_backward(dh, gate, up, backend):
    if pick_kernel("swiglu_backward", gate, backend, quantizes=False) is Backend.TRITON:
        from torchao_blockwise.ops.swiglu_quantize import kernels_triton as triton

        return triton.swiglu_backward(dh, gate, up)
    dgate, dup = reference.swiglu_backward(dh, gate, up)
    return dgate.contiguous(), dup.contiguous()


def _swiglu_backward_fake(dh, gate, up, backend):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _copies_of(y, group_ends, fmt, rowwise, columnwise, power_of_2_scales, padded):
    """The reference's copies of `y`."""
    if group_ends is None:
        return quantized_copies(y, fmt, rowwise, columnwise, power_of_2_scales, padded)
    return grouped_reference.quantize(y, group_ends, fmt, None, rowwise, columnwise, power_of_2_scales)


def _check_groups(op, gate, group_ends, format, group_tables):
    if group_ends is not None:
        check_group_ends(op, group_ends, gate.shape[0], gate.device)
        check_group_tables(op, group_tables, group_ends, gate.shape[0], get_format(format).block[1])


def _swiglu_quantize(
    gate, up, format, rowwise, columnwise, power_of_2_scales, backend,
    group_ends=None, padded=False, group_tables=None,
):  # fmt: skip
    _check_groups("swiglu_quantize", gate, group_ends, format, group_tables)
    fmt, options = get_format(format), (rowwise, columnwise, power_of_2_scales)
    if pick_kernel("swiglu_quantize", gate, backend, quantizes=True) is not Backend.TRITON:
        return _copies_of(reference.swiglu(gate, up), group_ends, fmt, *options, padded)
    from torchao_blockwise.ops.swiglu_quantize import kernels_triton as triton

    copies = triton.swiglu_quantize(gate, up, fmt, *options, group_ends, group_tables)
    return made_copies(copies, fmt, gate.shape[0], columnwise, padded or group_ends is not None)


def _swiglu_quantize_fake(
    gate, up, format, rowwise, columnwise, power_of_2_scales, backend,
    group_ends=None, padded=False, group_tables=None,
):  # fmt: skip
    _check_groups("swiglu_quantize", gate, group_ends, format, group_tables)
    return new_copies(gate, get_format(format), gate.shape, rowwise, columnwise, group_ends, padded)


def _swiglu_backward_quantize(
    dh, gate, up, format, rowwise, columnwise, power_of_2_scales, backend,
    group_ends=None, padded=False, group_tables=None,
):  # fmt: skip
    _check_groups("swiglu_backward_quantize", gate, group_ends, format, group_tables)
    fmt, options = get_format(format), (rowwise, columnwise, power_of_2_scales)
    if pick_kernel("swiglu_backward_quantize", gate, backend, quantizes=True) is not Backend.TRITON:
        return _copies_of(torch.cat(reference.swiglu_backward(dh, gate, up), 1), group_ends, fmt, *options, padded)
    from torchao_blockwise.ops.swiglu_quantize import kernels_triton as triton

    copies = triton.swiglu_backward_quantize(dh, gate, up, fmt, *options, group_ends, group_tables)
    return made_copies(copies, fmt, gate.shape[0], columnwise, padded or group_ends is not None)


def _swiglu_backward_quantize_fake(
    dh, gate, up, format, rowwise, columnwise, power_of_2_scales, backend,
    group_ends=None, padded=False, group_tables=None,
):  # fmt: skip
    _check_groups("swiglu_backward_quantize", gate, group_ends, format, group_tables)
    return new_copies(gate, get_format(format), _merged_shape(gate), rowwise, columnwise, group_ends, padded)


_OPTIONS = (
    "str format, bool rowwise, bool columnwise, bool power_of_2_scales, str backend,"
    " Tensor? group_ends=None, bool padded=False, Tensor? group_tables=None"
)
swiglu_op = define_op("swiglu(Tensor gate, Tensor up, str backend) -> Tensor", _swiglu, _swiglu_fake)
swiglu_quantize_op = define_op(
    f"swiglu_quantize(Tensor gate, Tensor up, {_OPTIONS}) -> Tensor[]", _swiglu_quantize, _swiglu_quantize_fake
)
swiglu_backward_op = define_op(
    "swiglu_backward(Tensor dh, Tensor gate, Tensor up, str backend) -> (Tensor, Tensor)",
    _swiglu_backward,
    _swiglu_backward_fake,
)
swiglu_backward_quantize_op = define_op(
    f"swiglu_backward_quantize(Tensor dh, Tensor gate, Tensor up, {_OPTIONS}) -> Tensor[]",
    _swiglu_backward_quantize,
    _swiglu_backward_quantize_fake,
)
