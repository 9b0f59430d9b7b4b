"""`nvfp4_modelopt`: NVFP4 as NVIDIA's Model Optimizer writes it, weights alone ("W4A16_NVFP4").

`weight`: two values a byte, the even one in the low nibble: our payload. `weight_scale`: e4m3 for 16 values of a row.
`weight_scale_2`: amax / 2688, by which all are multiplied: our tensor scale, so that it is written as it is. An
`input_scale`, amax / 2688 of activations, belongs to files whose activations are quantized by calibrated amaxes
("NVFP4"): it is not written, and read past.
Source: nvidia-modelopt 0.47, export/unified_export_hf.py and export/convert_hf_config.py; vLLM,
quantization/modelopt.py (`ModelOptNvFp4W4A16LinearMethod`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise.checkpoint import nvfp4_rows
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.formats import NVFP4_16X16, Operand
from torchao_blockwise.tensors import NVFP4Tensor

if TYPE_CHECKING:
    from torchao_blockwise.checkpoint.files import Files

NAME = "nvfp4_modelopt"
FORMAT = NVFP4_16X16
METHOD = "modelopt"
POWER_OF_2_SCALES = False
BLOCK = FORMAT.block[0]
_ALGORITHM = "W4A16_NVFP4"
# Their weights are the same.
_READ = (_ALGORITHM, "NVFP4")
_PRODUCER = {"name": "torchao_blockwise"}
_PARTS = ("", "_scale", "_scale_2")


def settings(plain: PlainLayers) -> dict[str, Any]:
    """`quantization_config` of a config.json, as vLLM reads it."""
    weights = {"dynamic": False, "num_bits": FORMAT.element.bits, "type": "float", "group_size": BLOCK}
    return {
        "quant_method": METHOD,
        "quant_algo": _ALGORITHM,
        "group_size": BLOCK,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": plain.names,
        "producer": _PRODUCER,
    }


def other_files(plain: PlainLayers) -> dict[str, Any]:
    """{name: content} of what lies beside config.json."""
    quantization = {
        "quant_algo": _ALGORITHM,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": plain.names,
    }
    return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


def why_not_read(config: dict[str, Any]) -> str | None:
    """Why files with this quantization_config are not read, with the remedy, or None."""
    algorithm = config.get("quant_algo", config.get("quantization", {}).get("quant_algo"))
    if algorithm not in _READ:
        return f"quant_algo is {algorithm!r}; of {METHOD}'s files those of {' or '.join(map(repr, _READ))} are read"
    return None


def weights_in(files: Files) -> dict[str, list[str]]:
    """{weight: the tensors of the files that it is made of}."""
    return {
        name: [*(name + part for part in _PARTS), f"{name.removesuffix('weight')}input_scale"]
        for name in files.names()
        if holds(files, name)
    }


def holds(files: Files, name: str) -> bool:
    """Whether the files have the weight `name` so, or a part of what it takes."""
    return name in files and files.dtype(name) == "U8" and any(name + part in files for part in _PARTS[1:])


def shape(files: Files, name: str) -> list[int]:
    """Of a weight's values."""
    return nvfp4_rows.shape(files, name)


def check(files: Files, name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the files have a weight of this shape whole."""
    nvfp4_rows.check(files, described(name, shape))


def read(files: Files, name: str, dtype: torch.dtype) -> NVFP4Tensor:
    """What the files have of a weight."""
    payload, rows, factor = (files.read(name + part) for part in _PARTS)
    return nvfp4_rows.tensor(payload, rows, factor, dtype)


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    return nvfp4_rows.described([name + part for part in _PARTS], shape, ())


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole.

    Raises ValueError for rows that end inside of a block: a file has none of parts.
    """
    payload, rows = nvfp4_rows.of_operand(NAME, part, weight)
    assert weight.global_scale is not None
    yield from zip((part.name + name for name in _PARTS), (payload, rows, weight.global_scale.reshape(())))
