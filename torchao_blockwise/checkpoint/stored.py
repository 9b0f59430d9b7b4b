"""What the weights in files are made of: a tensor in high precision, or those of a quantized format."""

from __future__ import annotations

import re
from typing import Any

import torch

from torchao_blockwise.checkpoint import fp8_block, nvfp4_modelopt, nvfp4_packed, nvfp4_rows
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.formats import E2M1, E4M3
from torchao_blockwise.tensors import NVFP4Tensor, QuantizedTensor
from torchao_blockwise.tensors.state_values import plain_values

# Modules with METHOD, FORMAT, why_not_read, weights_in, holds, shape, check and read.
_LAYOUTS: tuple[Any, ...] = (fp8_block, nvfp4_packed, nvfp4_modelopt)
# Of `save_pretrained` and Trainer with `integrations.transformers`: the recipe of plain weights.
_RECIPES = ("blockwise_fp8", "blockwise_nvfp4")
# Numbers, and codes that a layout reads, as files call dtypes.
_DTYPES = re.compile(r"F64|F32|F16|BF16|F8_E4M3|F8_E8M0|[IU]\d+|BOOL")
TAKE_PLAIN = "take plain ones, in bfloat16"
# Three bits of mantissa; 5, between 4 and 6.
_ROUNDING = {E4M3: 2**-4, E2M1: 1 / 5}


def why_not_read(config: dict[str, Any]) -> str | None:
    """Why files with this quantization_config are not read, with the remedy, or None."""
    method = config.get("quant_method")
    if method in _RECIPES:
        return None
    layout = next((layout for layout in _LAYOUTS if method == layout.METHOD), None)
    if layout is None:
        known = ", ".join(repr(layout.METHOD) for layout in _LAYOUTS)
        return f"quant_method is {method!r}; files of {known}, and plain ones, are read; {TAKE_PLAIN}"
    try:
        reason: str | None = layout.why_not_read(config)
    except (AttributeError, KeyError, TypeError) as error:
        return f"quantization_config of {method!r} cannot be read ({error!r}); copy config.json again"
    return reason


def weights_in(files: Files) -> set[str]:
    """What the files hold, by name: a quantized weight is one, whatever tensors it is made of."""
    names = files.names()
    for layout in _LAYOUTS:
        made = layout.weights_in(files)
        names -= {name for parts in made.values() for name in parts}
        names |= made.keys()
    return names


def shape(files: Files, name: str) -> list[int]:
    """Of the values that the files have of `name`."""
    layout = _layout_of(files, name)
    return files.shape(name) if layout is None else layout.shape(files, name)


def rounding(files: Files, name: str) -> float:
    """By how much of a value an element of the files is rounded at most, where blocks have a common size."""
    layout = _layout_of(files, name)
    return _ROUNDING[E4M3 if layout is None else layout.FORMAT.element]


def check(files: Files, name: str, shape: torch.Size) -> None:
    """Raise ValueError unless the files have `name` whole, and of this shape."""
    layout = _layout_of(files, name)
    if name in files and not _DTYPES.fullmatch(dtype := files.dtype(name)):
        raise ValueError(f"load: {files.where(name)} is in {dtype}, which is not read; {TAKE_PLAIN}")
    if layout is None:
        files.check_shape(name, shape)
    else:
        layout.check(files, name, tuple(shape))


def quantized(files: Files, name: str, dtype: torch.dtype) -> QuantizedTensor | None:
    """What the files have of `name`, as of values in `dtype`; None where that is a tensor in high precision."""
    layout = _layout_of(files, name)
    return None if layout is None else layout.read(files, name, dtype)


def values(files: Files, name: str, dtype: torch.dtype) -> torch.Tensor:
    """What the files have of `name`, decoded to `dtype` where it is quantized."""
    held = quantized(files, name, dtype)
    return files.read(name) if held is None else held.dequantize()


def is_quantized(files: Files, name: str) -> bool:
    """Whether the files have `name` in a quantized format that is read."""
    return _layout_of(files, name) is not None


def has_powers_of_2(files: Files, name: str) -> bool | None:
    """Whether all scales of a weight in blockwise FP8 are powers of two; None for other weights."""
    return fp8_block.has_powers_of_2(files, name) if _layout_of(files, name) is fp8_block else None


def plain(held: Any) -> torch.Tensor:
    """The values of `held`, in its dtype, such that quantizing them as our weights are gives these values again.

    In NVFP4 that is with the tensor scale of the files, which may be that of a larger weight that an engine runs as one
    with this one. Blocks of rows, which our weights do not have, are decoded and no more.
    """
    if not isinstance(held, NVFP4Tensor):
        values = plain_values(held)
        return fp8_block.above_half(held, values) if held.power_of_2_scales else values
    return plain_values(held, nvfp4_rows.quantized_as(held)) if held.fmt.is_square else held.dequantize()


def _layout_of(files: Files, name: str) -> Any:
    return next((layout for layout in _LAYOUTS if layout.holds(files, name)), None)
