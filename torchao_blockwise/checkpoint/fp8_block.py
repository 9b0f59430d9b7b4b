"""`fp8_block`: the files of DeepSeek-V3, Qwen3-FP8 and others.

`weight` in e4m3 and `weight_scale_inv` in f32 for blocks of 128×128: the payload is multiplied by it, whatever its name
says. It is our `scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise import ops
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.formats import FP8_128X128, Operand

if TYPE_CHECKING:
    from torchao_blockwise.checkpoint.files import Files

NAME = "fp8_block"
FORMAT = FP8_128X128
METHOD = "fp8"
BLOCK = FORMAT.block[0]
POWER_OF_2_SCALES = False
# As files call the payload's dtype.
E4M3 = "F8_E4M3"
_SCALE = "_scale_inv"


def scale_name(name: str) -> str:
    """Of a weight's scales."""
    return name + _SCALE


def short_scale_name(name: str) -> str:
    """Of a weight's scales in files of e8m0: `scale` beside `weight`."""
    return f"{name.removesuffix('weight')}scale" if name.endswith("weight") else f"{name}_scale"


def scale_in(files: Files, name: str) -> str | None:
    """The tensor of the files that has the scales of `name`."""
    here = (scale_name(name), *[short_scale_name(name)] * (files.dtype(name) == E4M3))
    return next((scale for scale in here if scale in files), None)


def are_powers_of_2(files: Files, scale: str) -> bool:
    """Whether the files say so, by the scales' dtype."""
    return files.dtype(scale) == "F8_E8M0"


def weights_in(files: Files) -> set[str]:
    """The tensors of the files that are no scales."""
    names = files.names()
    scales = {scale for name in names if (scale := scale_in(files, name)) is not None}
    return {name for name in names - scales if not name.endswith(_SCALE)}


def settings(not_converted: list[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json, as transformers, vLLM and SGLang read it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": not_converted,
        "quant_method": METHOD,
        "weight_block_size": [BLOCK, BLOCK],
    }


def why_not_read(config: dict[str, Any]) -> str | None:
    """Why files with this quantization_config are not read, with the remedy, or None."""
    if config.get("quant_method") != METHOD:
        return f"quant_method is {config.get('quant_method')!r}; files of 'fp8', or plain ones, are read"
    if list(config.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        return f"weight_block_size is {config.get('weight_block_size')!r}; files with [{BLOCK}, {BLOCK}] are read"
    return None


def rows_of_scales(part: Part) -> Part:
    """The part of the scales' grid."""
    if part.start is None or part.end is None:
        return part
    return part._replace(start=part.start // BLOCK, end=-(-part.end // BLOCK))


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    *experts, rows, columns = shape
    grid = (*experts, -(-rows // BLOCK), -(-columns // BLOCK))
    return {name: (torch.float8_e4m3fn, shape), scale_name(name): (torch.float32, grid)}


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole."""
    yield part.name, part.of(weight.qdata)
    yield scale_name(part.name), rows_of_scales(part).of(weight.scale)


def values(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a file's tensors stand for."""
    return ops.dequantize(Operand(qdata, scale.float(), None, FORMAT.name), dtype=dtype, columns=qdata.shape[-1])
