"""`fp8_block_ue8m0`: the files of DeepSeek-V4.

`weight` is that of `fp8_block`, `scale` is in e8m0, a power of two in a byte. It holds weights that train with
`power_of_2_scales`; engines then round activations' scales to powers of two as well, as training does.
Source: transformers, integrations/finegrained_fp8.py (`scale_fmt="ue8m0"`) and its quantizer, which knows the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import fp8_block
from torchao_blockwise.checkpoint.names import Part
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.formats import Operand

NAME = "fp8_block_ue8m0"
FORMAT = fp8_block.FORMAT
POWER_OF_2_SCALES = True
BLOCK = fp8_block.BLOCK
# How the `model_type` begins of models for which vLLM 0.33 and SGLang 0.5.23 read `scale`.
MODEL_TYPES = ("deepseek_v4",)


def check_model(op: str, model: nn.Module) -> None:
    """Raise ValueError for a model whose config says that engines do not read these files of it."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(model_type, str) and not model_type.startswith(MODEL_TYPES):
        option = " and --power-of-2-scales" if op == "convert" else ""
        raise ValueError(
            f"{op}: {NAME} is for models whose engines read scales called `scale` (model_type "
            f"{', '.join(MODEL_TYPES)}), and {type(model).__name__} has model_type {model_type}; choose "
            f'{fp8_block.NAME}{option}, which writes scale_fmt: "ue8m0" for scales that are powers of two'
        )


def settings(plain: PlainLayers) -> dict[str, Any]:
    """`quantization_config` of a config.json."""
    return fp8_block.settings(plain) | fp8_block.SCALE_FMT


def described(name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{name: (dtype, shape)} of the file's tensors of a weight."""
    (weight, of_weight), (_, (_, grid)) = fp8_block.described(name, shape).items()
    return {weight: of_weight, fp8_block.short_scale_name(name): (torch.float8_e8m0fnu, grid)}


def named(part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors of a part of a weight that is quantized as a whole."""
    (name, qdata), (_, scale) = fp8_block.named(part, weight)
    yield name, qdata
    # Exact: they are powers of two.
    yield fp8_block.short_scale_name(name), scale.to(torch.float8_e8m0fnu)
