"""NVFP4 as engines keep it: a block scale in e4m3 for 16 values of a row. Our square blocks have one for 16 rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchao_blockwise import ops
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.formats import E2M1, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.tensors import NVFP4Tensor

if TYPE_CHECKING:
    from torchao_blockwise.checkpoint.files import Files

BLOCK = NVFP4_16X16.block[0]
# The amax of a tensor whose scale is one.
MAX = E2M1.max * NVFP4_16X16.scale_max
# As files call dtypes.
_DTYPES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}


def described(
    names: list[str], shape: tuple[int, ...], of_tensor: tuple[int, ...]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of payload, scales of rows and tensor scale of a weight. of_tensor: shape of the last."""
    *rows, columns = shape
    payload, scales, tensor_scale = names
    return {
        payload: (torch.uint8, (*rows, E2M1.packed(columns))),
        scales: (NVFP4_16X16.scale_dtype, (*rows, columns // BLOCK)),
        tensor_scale: (torch.float32, of_tensor),
    }


def of_operand(op: str, part: Part, weight: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, scales of rows) of a part of a weight that is quantized as a whole.

    Raises ValueError for rows that end inside of a block: files have none of parts.
    """
    qdata, scale, _ = weight.tensors
    columns = E2M1.per_byte * qdata.shape[-1]
    if columns % BLOCK or scale.shape[-1] * BLOCK != columns:
        raise ValueError(
            f"{op}: {part.name} has rows that are no multiple of {BLOCK}, which files in NVFP4 do not hold; "
            "leave the layer unconverted (filter_fn)"
        )
    rows = scale.view(torch.uint8).repeat_interleave(BLOCK, -2)[..., : qdata.shape[-2], :].view(scale.dtype)
    return part.of(qdata), part.of(rows)


def tensor(payload: torch.Tensor, rows: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype) -> NVFP4Tensor:
    """What files hold, with the blocks of our weights where 16 rows have one scale, else with those of rows.

    payload: uint8 [.., N, K/2]. rows: e4m3 [.., N, K/16]. global_scale: what it is multiplied by, f32 of one element.
    """
    codes = rows.view(torch.uint8)
    first = codes[..., ::BLOCK, :]
    square = torch.equal(first.repeat_interleave(BLOCK, -2)[..., : codes.shape[-2], :], codes)
    fmt, scale = (NVFP4_16X16, first.contiguous().view(rows.dtype)) if square else (NVFP4_1X16, rows)
    columns = E2M1.per_byte * payload.shape[-1]
    return NVFP4Tensor(payload, scale, global_scale.reshape(()), columns, fmt.block, dtype)


def quantized_as(x: NVFP4Tensor) -> Callable[[torch.Tensor], NVFP4Tensor]:
    """What quantizes values of the shape of `x` in its blocks and with its tensor scale."""

    def quantize(values: torch.Tensor) -> NVFP4Tensor:
        made = ops.quantize(values, x.fmt, tensor_amax=x.global_scale * MAX).rowwise
        assert made is not None and made.global_scale is not None
        return NVFP4Tensor(made.qdata, made.scale, made.global_scale, x.columns, x.block_size, x.dtype)

    return quantize


def shape(files: Files, payload: str) -> list[int]:
    """Of the values of a weight that has this payload."""
    *rows, packed = files.shape(payload) or [0]
    return [*rows, E2M1.per_byte * packed]


def check(files: Files, wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raise ValueError unless the files have payload, scales of rows and a tensor scale of these dtypes and shapes.

    wanted: {name: (dtype, shape)} in this order.
    """
    payload, rows, of_tensor = wanted
    for name, (dtype, shape) in wanted.items():
        if name not in files:
            raise ValueError(
                f"load: {files.where(payload)} is packed and has no {name}; the files are not whole, copy them anew"
            )
        if (got := files.dtype(name)) != _DTYPES[dtype]:
            raise ValueError(f"load: {files.where(name)} is in {got}, NVFP4 wants {_DTYPES[dtype]}; copy the file anew")
        # A tensor scale has one element, with or without a dim.
        if name != of_tensor or files.shape(name) not in ([], [1]):
            files.check_shape(name, shape)
    scales, factor = files.read(rows).float(), files.read(of_tensor)
    if not bool((scales >= 0).all()):
        raise ValueError(f"load: {files.where(rows)} has scales that are negative or NaN; copy the file anew")
    if not bool((factor > 0).logical_and(factor.isfinite()).all()):
        raise ValueError(f"load: {files.where(of_tensor)} is {factor.item()}, no positive number; copy the file anew")
