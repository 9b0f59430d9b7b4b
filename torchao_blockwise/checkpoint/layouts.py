"""The file formats as data: the tensors that represent a quantized weight, and the settings in config.json.

| format | payload | block scales | tensor scale |
|---|---|---|---|
| fp8_block (DeepSeek-V3, Qwen3-FP8) | `weight`, e4m3 | `weight_scale_inv`, f32, 128×128 | |
| fp8_block_ue8m0 (DeepSeek-V4) | `weight`, e4m3 | `scale`, e8m0, 128×128 | |
| nvfp4_compressed_tensors (NVFP4A16) | `weight_packed`, uint8 | `weight_scale`, e4m3, 1×16 | `weight_global_scale` |
| nvfp4_modelopt (W4A16_NVFP4) | `weight`, uint8 | `weight_scale`, e4m3, 1×16 | `weight_scale_2` |

Payload and scales are those of training. To decode, the payload is multiplied by every scale (also by
`weight_scale_inv`, despite its name), except `weight_global_scale`, which divides. NVFP4 blocks of weights are 16×16,
so 16 rows of a file have the same scales.
Sources: transformers, integrations/finegrained_fp8.py and its quantizer; compressed-tensors, compressors/nvfp4;
nvidia-modelopt 0.47, export/unified_export_hf.py and convert_hf_config.py; vLLM 0.33, quantization/modelopt.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchao_blockwise.checkpoint.model_tensors import Part
from torchao_blockwise.formats import FP8_128X128, NVFP4_1X16, NVFP4_16X16, BlockFormat, Operand

# Added to `quantization_config` if all scales are powers of two. vLLM 0.33 and SGLang 0.5.23 then round the scales of
# activations to powers of two as well.
SCALE_FMT = {"scale_fmt": "ue8m0"}
# The prefix of `model_type` for which vLLM 0.33 and SGLang 0.5.23 read scales called `scale`.
UE8M0_MODEL_TYPE = "deepseek_v4"
# `format` of compressed-tensors: NVFP4, blocks of FP8, and groups of layers with a format each.
PACKED, FLOAT, MIXED = "nvfp4-pack-quantized", "float-quantized", "mixed-precision"
# `quant_algo` of Model Optimizer: NVFP4 weights with activations in high precision, or in NVFP4 too.
_ALGORITHMS = ("W4A16_NVFP4", "NVFP4")
# `quant_method` that `integrations.transformers` writes with `save_pretrained` and Trainer. The weights are plain.
_RECIPES = ("blockwise_fp8", "blockwise_nvfp4")
# The amax that leads to a tensor scale of one, and the amax that leads to the smallest normal number.
TENSOR_MAX = NVFP4_16X16.element.max * NVFP4_16X16.scale_max
_LEAST = TENSOR_MAX * torch.finfo(torch.float32).smallest_normal
TAKE_PLAIN = "use a plain checkpoint in bfloat16"


class Layout(NamedTuple):
    """A file format.

    method: `quant_method` in config.json. format: the format of the weights.
    suffixes: appended to a weight's name for payload, block scales and tensor scale.
    scale_dtype: the dtype of block scales.
    has_reciprocal: whether the tensor scale divides, with shape [1]; otherwise it multiplies, with shape [].
    settings: `quantization_config` in config.json, which readers need, except the layers that are not quantized.
    """

    name: str
    method: str
    format: BlockFormat
    suffixes: tuple[str, ...]
    scale_dtype: torch.dtype
    settings: dict[str, Any]
    has_reciprocal: bool = False

    def names(self, weight: str) -> list[str]:
        """Return the names in files of a weight's payload, block scales and tensor scale."""
        names = [weight + suffix for suffix in self.suffixes]
        # DeepSeek-V4 stores `scale` next to `weight`.
        return [re.sub(r"weight_scale$", "scale", name) for name in names] if self is FP8_UE8M0 else names

    def described(self, weight: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return {name: (dtype, shape)} of the tensors in files for a weight [.., N, K]."""
        blocks = NVFP4_1X16 if self.format.has_global_scale else self.format
        tensors: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (self.format.element.storage_dtype, self.format.qdata_shape(*shape)),
            (self.scale_dtype, blocks.scale_shape(*shape)),
            (torch.float32, (1,) if self.has_reciprocal else ()),
        ]
        return dict(zip(self.names(weight), tensors))

    def tensors(self, part: Part, weight: Operand) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in files for a part of a quantized weight.

        Raises ValueError for NVFP4 rows that end inside a block, which files cannot represent.
        """
        names, rows = self.names(part.name), self.format.block[0]
        if weight.global_scale is None:
            yield names[0], part.of(weight.qdata).contiguous()
            # The cast to e8m0 is exact, since such scales are powers of two.
            yield names[1], part.in_blocks(rows).of(weight.scale).contiguous().to(self.scale_dtype)
            return
        if weight.qdata.shape[-1] * self.format.element.per_byte != weight.scale.shape[-1] * self.format.block[1]:
            raise ValueError(
                f"{self.name}: the number of columns of {part.name} must be a multiple of {self.format.block[1]} for "
                "NVFP4 files; leave the layer unconverted (filter_fn; convert: --skip)"
            )
        scale = weight.scale.view(torch.uint8).repeat_interleave(rows, -2)[..., : weight.qdata.shape[-2], :]
        factor = weight.global_scale.reciprocal().reshape(1) if self.has_reciprocal else weight.global_scale.reshape(())
        yield from zip(names, (part.of(weight.qdata), part.of(scale.view(weight.scale.dtype)), factor))

    def quantization_config(self, linears: list[str], experts: list[str]) -> dict[str, Any]:
        """Return the settings with the layers, and the modules of experts, that are not quantized."""
        if self is COMPRESSED_TENSORS:
            # vLLM looks up single experts.
            experts = [rf"re:{re.escape(name)}\..*" for name in experts]
        ignored = "modules_to_not_convert" if self.format is FP8.format else "ignore"
        return copy.deepcopy(self.settings) | {"quant_method": self.method, ignored: linears + experts}


_WEIGHTS = {"num_bits": NVFP4_16X16.element.bits, "type": "float", "group_size": NVFP4_16X16.block[1], "dynamic": False}
_LINEAR = {"targets": ["Linear"], "weights": _WEIGHTS}
_WITHOUT_ACTIVATIONS = {
    "weights": _WEIGHTS | {"strategy": "tensor_group", "symmetric": True},
    "input_activations": None,
    "output_activations": None,
}
FP8 = Layout(
    "fp8_block",
    "fp8",
    FP8_128X128,
    ("", "_scale_inv"),
    torch.float32,
    {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(FP8_128X128.block)},
)
FP8_UE8M0 = FP8._replace(name="fp8_block_ue8m0", suffixes=("", "_scale"), scale_dtype=torch.float8_e8m0fnu)
COMPRESSED_TENSORS = Layout(
    "nvfp4_compressed_tensors",
    "compressed-tensors",
    NVFP4_16X16,
    ("_packed", "_scale", "_global_scale"),
    NVFP4_16X16.scale_dtype,
    {
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": _LINEAR | _WITHOUT_ACTIVATIONS},
    },
    has_reciprocal=True,
)
MODELOPT = Layout(
    "nvfp4_modelopt",
    "modelopt",
    NVFP4_16X16,
    ("", "_scale", "_scale_2"),
    NVFP4_16X16.scale_dtype,
    {
        "quant_algo": _ALGORITHMS[0],
        "group_size": _WEIGHTS["group_size"],
        "config_groups": {"group_0": _LINEAR},
        "producer": {"name": "torchao_blockwise"},
    },
)
LAYOUTS = {layout.name: layout for layout in (FP8, FP8_UE8M0, COMPRESSED_TENSORS, MODELOPT)}


def clamp_to_normal_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the amaxes, f32, from which the tensor scales in files are derived: `amax`, clamped to a normal scale.

    For a smaller amax the scale amax / 2688 is subnormal: kernels of engines may flush it to zero, and its reciprocal
    is infinite. Zero stays zero, NaN stays NaN.
    """
    return torch.where(amax > 0, amax.clamp(min=_LEAST), amax)


def why_not_read(config: dict[str, Any]) -> str | None:
    """Return why files with this `quantization_config` cannot be read, with the fix, or None if they can."""
    method = config.get("quant_method")
    try:
        if method in _RECIPES:
            return None
        if method == FP8.method:
            return _why_not_blocks("weight_block_size", config.get("weight_block_size"))
        if method == MODELOPT.method:
            algorithm = config.get("quant_algo", config.get("quantization", {}).get("quant_algo"))
            read = f"for {method}, only {' and '.join(map(repr, _ALGORITHMS))} are supported"
            return None if algorithm in _ALGORITHMS else f"quant_algo is {algorithm!r}; {read}"
        if method == COMPRESSED_TENSORS.method:
            format = config.get("format")
            # If formats are mixed, each group of layers has one.
            for name, group in () if format == PACKED else config["config_groups"].items():
                own, where = (group.get("format"), f"{name} of {MIXED!r}: ") if format == MIXED else (format, "")
                if own not in (PACKED, FLOAT):
                    known = f"{PACKED!r} and blocks of {FLOAT!r} are supported"
                    return f"{where}format is {own!r}; for {method}, only {known}"
                block = group["weights"].get("block_structure") if own == FLOAT else None
                if own == FLOAT and (why := _why_not_blocks("block_structure", block)):
                    return why
            return None
    except (AttributeError, KeyError, TypeError) as error:
        return f"quantization_config of {method!r} cannot be read ({error!r}); copy config.json again"
    known = ", ".join(dict.fromkeys(repr(layout.method) for layout in LAYOUTS.values()))
    return f"quant_method is {method!r}, but only {known} and plain checkpoints are supported; {TAKE_PLAIN}"


def _why_not_blocks(key: str, value: Any) -> str | None:
    block = list(FP8.format.block)
    return None if list(value or ()) == block else f"{key} is {value!r}; only {block} is supported"
