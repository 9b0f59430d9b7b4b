"""`nvfp4_compressed_tensors`: NVFP4 as compressed-tensors writes it and vLLM reads it, weights alone ("NVFP4A16").

`weight_packed`: two values a byte, the even one in the low nibble: our payload. `weight_scale`: e4m3 for 16 values of a
row; our blocks are 16×16, so 16 rows have the same. `weight_global_scale`: 2688 / amax, what the block scales are
divided by; engines run several layers as one, and these have the same amax (`tensor_scales`).
Source: compressed-tensors, compressors/nvfp4; its preset NVFP4A16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.formats import NVFP4_16X16, Operand

NAME = "nvfp4_compressed_tensors"
FORMAT = NVFP4_16X16
POWER_OF_2_SCALES = False
BLOCK = FORMAT.block[0]
_PARTS = ("_packed", "_scale", "_global_scale")


def settings(not_converted: list[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json, as transformers and vLLM read it."""
    weights = {
        "num_bits": FORMAT.element.bits,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": not_converted,
    }


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    *rows, columns = shape
    packed, scale, global_scale = (name + part for part in _PARTS)
    return {
        packed: (torch.uint8, (*rows, FORMAT.element.packed(columns))),
        scale: (FORMAT.scale_dtype, (*rows, columns // BLOCK)),
        global_scale: (torch.float32, (1,)),
    }


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole.

    Raises ValueError for rows that end inside of a block: a file has none of parts.
    """
    qdata, scale, global_scale = weight.tensors
    columns = FORMAT.element.per_byte * qdata.shape[-1]
    if columns % BLOCK or scale.shape[-1] * BLOCK != columns:
        raise ValueError(
            f"{NAME}: {part.name} has rows that are no multiple of {BLOCK}, which compressed-tensors does not hold; "
            "leave the layer unconverted (filter_fn)"
        )
    assert global_scale is not None
    rows = scale.view(torch.uint8).repeat_interleave(BLOCK, -2)[..., : qdata.shape[-2], :].view(FORMAT.scale_dtype)
    packed, of_rows, of_tensor = (part.name + name for name in _PARTS)
    yield packed, part.of(qdata)
    yield of_rows, part.of(rows)
    yield of_tensor, global_scale.reciprocal().reshape(1)
