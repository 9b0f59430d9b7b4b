"""`nvfp4_compressed_tensors`: NVFP4 as compressed-tensors writes it and vLLM reads it, weights alone ("NVFP4A16").

`weight_packed`: two values a byte, the even one in the low nibble: our payload. `weight_scale`: e4m3 for 16 values of a
row; our blocks are 16×16, so 16 rows have the same. `weight_global_scale`: 2688 / amax, what the block scales are
divided by; engines run several layers as one, and these have the same amax (`tensor_scales`).
Source: compressed-tensors, compressors/nvfp4; its preset NVFP4A16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise.checkpoint import fp8_block, nvfp4_rows
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.formats import NVFP4_16X16, Operand
from torchao_blockwise.tensors import NVFP4Tensor

if TYPE_CHECKING:
    from torchao_blockwise.checkpoint.files import Files

NAME = "nvfp4_compressed_tensors"
FORMAT = NVFP4_16X16
METHOD = "compressed-tensors"
POWER_OF_2_SCALES = False
BLOCK = FORMAT.block[0]
_LAYOUT = "nvfp4-pack-quantized"
# Each group has its own format.
_MIXED = "mixed-precision"
# Behind a weight's name in files.
PAYLOAD = "_packed"
_PARTS = (PAYLOAD, "_scale", "_global_scale")


def settings(plain: PlainLayers) -> dict[str, Any]:
    """`quantization_config` of a config.json, as transformers and vLLM read it."""
    weights = {
        "num_bits": FORMAT.element.bits,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    # vLLM asks for single experts.
    experts = (rf"re:{re.escape(name)}\..*" for name in plain.experts)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": _LAYOUT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plain.linears, *experts],
    }


def why_not_read(config: dict[str, Any]) -> str | None:
    """Why files with this quantization_config are not read, with the remedy, or None."""
    if config.get("format") != _MIXED:
        return _why_not_of(config)
    groups = config["config_groups"].items()
    reasons = (
        (name, _why_not_of({"format": group.get("format"), "config_groups": {name: group}})) for name, group in groups
    )
    return next((f"{name} of {_MIXED!r}: {reason}" for name, reason in reasons if reason is not None), None)


def _why_not_of(config: dict[str, Any]) -> str | None:
    """`why_not_read` of files that have one format."""
    if config.get("format") == _LAYOUT:
        return None
    if config.get("format") == fp8_block.COMPRESSED:
        return fp8_block.why_not_read(config)
    known = f"{_LAYOUT!r} are read, and blocks of {fp8_block.COMPRESSED!r}"
    return f"format is {config.get('format')!r}; of {METHOD}'s files those of {known}"


def holds(files: Files, name: str) -> bool:
    """Whether the files have the weight `name` so."""
    return f"{name}{_PARTS[0]}" in files


def weights_in(files: Files) -> dict[str, list[str]]:
    """{weight: the tensors of the files that it is made of}."""
    packed = (name for name in files.names() if name.endswith(_PARTS[0]) and files.dtype(name) == "U8")
    weights = (name.removesuffix(_PARTS[0]) for name in packed)
    # A factor of activations is of no use: training derives it from the values at hand.
    return {
        name: [*(name + part for part in _PARTS), f"{name.removesuffix('weight')}input_global_scale"]
        for name in weights
    }


def shape(files: Files, name: str) -> list[int]:
    """Of a weight's values."""
    return nvfp4_rows.shape(files, name + _PARTS[0])


def check(files: Files, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the files have a weight of this shape whole."""
    nvfp4_rows.check(files, described(name, shape))


def read(files: Files, name: str, dtype: torch.dtype) -> NVFP4Tensor:
    """What the files have of a weight."""
    packed, rows, stored = (files.read(name + part) for part in _PARTS)
    return nvfp4_rows.tensor(packed, rows, decode_factor(stored), dtype)


def decode_factor(stored: torch.Tensor) -> torch.Tensor:
    """amax / 2688 of a stored 2688 / amax.

    Where one exists it is a number that has this very reciprocal, so that it is written as it was read, and that an
    amax leads to. Such a number lies beside the rounded reciprocal, as rounding twice moves by one step at most.
    """
    near = stored.reshape(()).reciprocal()
    around = [torch.nextafter(near, torch.full_like(near, bound)) for bound in (0.0, float("inf"))]
    candidates = torch.stack((near, *around))
    fits = candidates.reciprocal() == stored
    whole = nvfp4_rows.MAX
    comes_back = candidates * whole / whole == candidates
    return torch.cat((candidates[fits & comes_back], candidates[fits], near[None]))[0]


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    return nvfp4_rows.described([name + part for part in _PARTS], shape, (1,))


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole.

    Raises ValueError for rows that end inside of a block: a file has none of parts.
    """
    payload, rows = nvfp4_rows.of_operand(NAME, part, weight)
    assert weight.global_scale is not None
    of_tensor = weight.global_scale.reciprocal().reshape(1)
    yield from zip((part.name + name for name in _PARTS), (payload, rows, of_tensor))
