"""`fp8_block`: the files of DeepSeek-V3, Qwen3-FP8 and others.

`weight` in e4m3 and `weight_scale_inv` in f32 for blocks of 128×128: the payload is multiplied by it, whatever its name
says. It is our `scale`. compressed-tensors calls it `weight_scale`, in bf16 or f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise import ops
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.formats import FP8_128X128, Operand
from torchao_blockwise.tensors import BlockwiseFP8Tensor
from torchao_blockwise.tensors.state_values import over_blocks

if TYPE_CHECKING:
    from torchao_blockwise.checkpoint.files import Files

NAME = "fp8_block"
FORMAT = FP8_128X128
METHOD = "fp8"
BLOCK = FORMAT.block[0]
POWER_OF_2_SCALES = False
# Of `quantization_config`, where all scales are powers of two: vLLM 0.33 and SGLang 0.5.23 then round those of
# activations to powers of two as well.
SCALE_FMT = {"scale_fmt": "ue8m0"}
# compressed-tensors' name of FP8.
COMPRESSED = "float-quantized"
# As files call the payload's dtype.
E4M3 = "F8_E4M3"
_SCALE = "_scale_inv"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


def scale_name(name: str) -> str:
    """Of a weight's scales."""
    return name + _SCALE


def short_scale_name(name: str) -> str:
    """Of a weight's scales in files of e8m0: `scale` beside `weight`."""
    return f"{name.removesuffix('weight')}scale" if name.endswith("weight") else f"{name}_scale"


def scale_in(files: Files, name: str) -> str | None:
    """The tensor of the files that has the scales of `name`."""
    here = (scale_name(name), *(short_scale_name(name), f"{name}_scale") * (files.dtype(name) == E4M3))
    return next((scale for scale in here if scale in files), None)


def has_powers_of_2(files: Files, name: str) -> bool:
    """Whether all scales of a weight are powers of two, except zeros."""
    scale = scale_in(files, name)
    assert scale is not None, "it was checked"
    mantissas = files.read(scale).float().frexp().mantissa
    return bool(((mantissas == 0.5) | (mantissas == 0)).all())


def weights_in(files: Files) -> dict[str, list[str]]:
    """{weight: the tensors of the files that it is made of}."""
    found = ((name, scale_in(files, name)) for name in files.names())
    return {name: [name, scale] for name, scale in found if scale is not None}


def holds(files: Files, name: str) -> bool:
    """Whether the files have the weight `name` so, or a part of what it takes."""
    return name in files and (files.dtype(name) == E4M3 or scale_in(files, name) is not None)


def shape(files: Files, name: str) -> list[int]:
    """Of a weight's values."""
    return files.shape(name)


def check(files: Files, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the files have a weight of this shape whole."""
    files.check_shape(name, shape)
    scale, is_fp8 = scale_in(files, name), files.dtype(name) == E4M3
    if scale is None or not is_fp8:
        what = f"is in e4m3 and has no {scale_name(name)}" if is_fp8 else f"has {scale} and is in {files.dtype(name)}"
        raise ValueError(f"load: {files.where(name)} {what}; the files are not whole, copy them anew")
    if len(shape) < 2:
        raise ValueError(f"load: {files.where(name)} has shape {list(shape)}, not a matrix; copy the file again")
    grid = list(described(name, shape)[scale_name(name)][1])
    if (got := files.shape(scale)) != grid:
        raise ValueError(f"load: {files.where(scale)} has shape {got}, blocks of {BLOCK} want {grid}; copy it again")
    if files.dtype(scale) not in _SCALES:
        raise ValueError(f"load: {files.where(scale)} is in {files.dtype(scale)}; {', '.join(_SCALES)} are read")
    scales = files.read(scale).float()
    is_sound = bool((scales >= 0).logical_and(scales.isfinite()).all())
    if is_sound and bool((is_zero := scales == 0).any()):
        codes = files.read(name)
        # A code in such a block stands for zero unless it has other bits than the sign.
        is_sound = not bool((codes.view(torch.uint8) & 0x7F)[over_blocks(is_zero, codes.shape, FORMAT)].any())
    if not is_sound:
        raise ValueError(f"load: {files.where(scale)} has scales that are no positive numbers; copy the file again")


def read(files: Files, name: str, dtype: torch.dtype) -> BlockwiseFP8Tensor:
    """What the files have of a weight."""
    scale = scale_in(files, name)
    assert scale is not None, "it was checked"
    powers_of_2 = has_powers_of_2(files, name)
    scales = files.read(scale).float()
    # Some tools give a block of zeros no scale.
    of_zeros = ops.quantize(scales.new_zeros(1, 1), FORMAT, power_of_2_scales=powers_of_2).rowwise
    assert of_zeros is not None
    return BlockwiseFP8Tensor(files.read(name), torch.where(scales == 0, of_zeros.scale, scales), dtype, powers_of_2)


def above_half(held: BlockwiseFP8Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` of `held`, whose scales are powers of two, such that they are quantized to its very bytes.

    A block's largest value that was rounded down to 224, half of what a code holds, would get half of the scale. It is
    moved by one unit in the last place, up to which it is coded as 224 and needs the whole one.
    """
    again = ops.quantize(values, FORMAT, power_of_2_scales=True).rowwise
    assert again is not None
    is_half = held.qdata.float().abs() == FORMAT.element.max / 2
    moved = is_half & over_blocks(again.scale < held.scale, values.shape, FORMAT)
    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    return (bits + moved.to(bits.dtype)).view(values.dtype)


def settings(plain: PlainLayers) -> dict[str, Any]:
    """`quantization_config` of a config.json, as transformers, vLLM and SGLang read it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": plain.names,
        "quant_method": METHOD,
        "weight_block_size": [BLOCK, BLOCK],
    }


def why_not_read(config: dict[str, Any]) -> str | None:
    """Why files with this quantization_config are not read, with the remedy, or None."""
    if config.get("format") == COMPRESSED:
        for group in config["config_groups"].values():
            if (got := group["weights"].get("block_structure")) != [BLOCK, BLOCK]:
                return f"block_structure is {got!r}; files with [{BLOCK}, {BLOCK}] are read"
        return None
    if list(config.get("weight_block_size") or ()) != [BLOCK, BLOCK]:
        return f"weight_block_size is {config.get('weight_block_size')!r}; files with [{BLOCK}, {BLOCK}] are read"
    return None


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    *experts, rows, columns = shape
    grid = (*experts, -(-rows // BLOCK), -(-columns // BLOCK))
    return {name: (torch.float8_e4m3fn, shape), scale_name(name): (torch.float32, grid)}


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole."""
    yield part.name, part.of(weight.qdata)
    yield scale_name(part.name), part.in_blocks(BLOCK).of(weight.scale)


def values(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a file's tensors stand for."""
    return ops.dequantize(Operand(qdata, scale.float(), None, FORMAT.name), dtype=dtype, columns=qdata.shape[-1])
