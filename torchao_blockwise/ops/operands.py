"""Checks of operands and options, and allocation of quantized copies for kernels and references."""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise.formats import (
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    HADAMARD_SIZE,
    HIGH_PRECISION_DTYPES,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
)
from torchao_blockwise.ops.backend import architecture, compute_capability, interpreting, why_no_compiler
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.padding import ROW_BYTES, padded_size, without_padding


def with_global_scale(copies: Copies, scale: torch.Tensor) -> Copies:
    """Return copies of one tensor with its tensor scale."""
    return Copies(*(copy and Operand(copy.qdata, copy.scale, scale, copy.format_name) for copy in copies))


def check_operand(op: str, name: str, x: object) -> BlockFormat:
    """Return the format of `x`; raise TypeError unless it is an operand, ValueError for an unregistered format."""
    if not isinstance(x, Operand):
        raise TypeError(f"{op}: {name} must be a result of quantize, got {type(x).__name__}; quantize it first")
    if x.format_name not in FORMATS:
        raise ValueError(f"{op}: {name} has unknown format {x.format_name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[x.format_name]


def check_dtype(op: str, x: torch.Tensor, name: str = "x") -> None:
    """Raise TypeError unless `x` has a high-precision dtype that can be quantized."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32, got {x.dtype}; cast it first")


def check_options(op: str, options: CastOptions) -> None:
    """Raise ValueError unless the format supports these options."""
    fmt, of_columns = options.fmt, options.columnwise_format_name
    if not (options.rowwise or options.columnwise):
        raise ValueError(f"{op}: nothing to compute; set rowwise, columnwise or both")
    if options.power_of_2_scales and not fmt.has_power_of_2_scales:
        raise ValueError(f"{op}: {fmt.name} has no power_of_2_scales; its block scales are {fmt.scale_dtype}")
    if options.hadamard and fmt.name != NVFP4_1X16.name:
        raise ValueError(f"{op}: hadamard is for {NVFP4_1X16.name}, got {fmt.name}; leave it out")
    if options.scale_per_group and not fmt.has_global_scale:
        raise ValueError(f"{op}: scale_per_group is for formats with tensor scales, got {fmt.name}; leave it out")
    if options.hadamard and not options.columnwise:
        raise ValueError(f"{op}: hadamard transforms the columnwise copy, which is not requested; leave it out")
    if of_columns not in ("", fmt.name) and (fmt.name, of_columns) != (FP8_1X128.name, FP8_128X128.name):
        raise ValueError(
            f"{op}: only {FP8_1X128.name} supports another format, {FP8_128X128.name}, for the columnwise copy, got "
            f"{fmt.name} and {of_columns}; call it once for each format"
        )


def new_copies(
    x: torch.Tensor, shape: tuple[int, ...], options: CastOptions, groups: Groups | None = None, padded: bool = False
) -> Copies:
    """Return the requested copies, uninitialized, of a tensor [.., rows, columns] on the device of `x`.

    groups: groups of rows, each of which the columnwise copy pads to whole blocks. padded: pad it in any case.
    """
    fmt, of_columns, (*batch, rows, columns) = options.fmt, options.columnwise_format, shape
    if groups is not None:
        tokens = padded_tokens(rows, groups.ends.shape[0], fmt.block[1])
    else:
        tokens = padded_size(rows) if padded or options.padded else width_of(rows, options)
    return Copies(
        Operand(*fmt.new_empty(x, *batch, rows, columns), None, fmt.name) if options.rowwise else None,
        Operand(*of_columns.new_empty(x, *batch, columns, tokens), None, of_columns.name)
        if options.columnwise
        else None,
    )


def new_output(
    a: Operand, b: Operand, dtype: torch.dtype, groups: Groups | None = None, along: str = ""
) -> torch.Tensor:
    """Return the uninitialized output of a GEMM: [M, N], or [E, M, N] for groups along "k"."""
    rows, columns = a.qdata.shape[0], b.qdata.shape[-2]
    shape = (groups.ends.shape[0], rows, columns) if groups is not None and along == "k" else (rows, columns)
    return a.qdata.new_empty(shape, dtype=dtype)


def width_of(tokens: int, options: CastOptions) -> int:
    """Return the unpadded width of the columnwise copy of this number of tokens; with a transform, whole chunks."""
    return -(-tokens // HADAMARD_SIZE) * HADAMARD_SIZE if options.hadamard else tokens


def as_asked(copies: Copies, tokens: int, options: CastOptions, groups: Groups | None) -> Copies:
    """Return the copies of a kernel, which always pads the columnwise one, unpadded if the options require it."""
    if options.padded or groups is not None or copies.columnwise is None:
        return copies
    width = width_of(tokens, options)
    return copies if width == padded_size(tokens) else Copies(copies.rowwise, without_padding(copies.columnwise, width))


def why_no_tiles(options: CastOptions, *inputs: torch.Tensor) -> str | None:
    """Return why kernels of gluon_tiles.py cannot compute these copies of `inputs`, or None if they can."""
    if not options.columnwise:
        return "the kernels always compute the columnwise copy, but it is not requested"
    if options.fmt.name != FP8_1X128.name:
        return f"the kernels support only {FP8_1X128.name}, got {options.fmt.name}"
    device, dtype = inputs[0].device, inputs[0].dtype
    if compute_capability(device) < (9, 0):
        return f"the kernels need sm_90 or newer, got {architecture(device)}"
    if interpreting():
        return "Triton's interpreter does not support Gluon"
    for x in inputs:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return f"the kernels support only 16-bit dtypes, got {x.dtype}"
        if x.dim() != 2:
            return f"the kernels take one matrix, got shape {list(x.shape)}"
        if x.shape[1] % ROW_BYTES or x.stride(0) % ROW_BYTES or x.stride(1) != 1 or x.data_ptr() % ROW_BYTES:
            return (
                f"the kernels need K, the stride of rows and the address to be multiples of {ROW_BYTES}, got shape "
                f"{list(x.shape)}, strides {list(x.stride())}, address {x.data_ptr():#x}"
            )
        if x.dtype != dtype:
            return f"the kernels take inputs of one dtype, got {dtype} and {x.dtype}"
    return why_no_compiler()


def pointers(copies: Copies) -> list[Any]:
    """Arguments of kernels: rowwise qdata, scale, columnwise qdata, scale; bytes as uint8, None for a missing copy."""
    parts: list[Any] = []
    for copy in copies:
        qdata, scale = (None, None) if copy is None else ((copy.qdata, torch.uint8), copy.scale)
        parts += (qdata, (scale, torch.uint8) if scale is not None and scale.itemsize == 1 else scale)
    return parts
