"""The precisions that are compared: how each changes the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from llm_training.config import UsageError
from llm_training.partly import PARTS, PartlyQuantizedLinear


class Recipe(NamedTuple):
    """How linear layers and experts train, and what is fused besides.

    format: "bf16", "fp8" or "nvfp4".
    options: of the format's training config; NVFP4's seed is the run's.
    keep: the last blocks that stay in high precision, a count or a share.
    fused: "inputs", where layers that read one input share its quantization;
    "once", where SwiGLU quantizes what it computes as well; or "".
    only: the operand or the GEMM that is quantized, for a dense model; see `llm_training.partly`. "" for all.
    """

    format: str
    options: dict[str, Any] = {}  # noqa: RUF012
    keep: float = 0
    fused: str = ""
    only: str = ""


def _nvfp4(hadamard: bool, stochastic_rounding: bool, keep: float = 1, fused: str = "", **options) -> Recipe:
    options |= {"hadamard": hadamard, "stochastic_rounding": stochastic_rounding}
    return Recipe("nvfp4", options, keep, fused=fused)


_PARAMETERS = {"master_weights": False}
# Of recipes without 128x128 in their name.
_ROWS, _SQUARES = ({"grad_weight_blocks": blocks} for blocks in ("1x128", "128x128"))
_SAVED = {"save_weights": "quantized"}
RECIPES = {
    "bf16": Recipe("bf16"),
    "fp8": Recipe("fp8"),
    "fp8_power_of_2": Recipe("fp8", {"power_of_2_scales": True}),
    "fp8_128x128": Recipe("fp8", _SQUARES),
    "fp8_128x128_saved": Recipe("fp8", _SQUARES | _SAVED),
    # The Parameters are the quantized weights, and only the optimizer has masters.
    "fp8_parameters": Recipe("fp8", _PARAMETERS),
    "fp8_fused": Recipe("fp8", fused="inputs"),
    "fp8_fused_once": Recipe("fp8", fused="once"),
    "fp8_128x128_fused_once": Recipe("fp8", _SQUARES, fused="once"),
    "fp8_128x128_saved_fused_once": Recipe("fp8", _SQUARES | _SAVED, fused="once"),
    "nvfp4": _nvfp4(False, False),
    "nvfp4_hadamard": _nvfp4(True, False),
    "nvfp4_stochastic": _nvfp4(False, True),
    "nvfp4_full": _nvfp4(True, True),
    "nvfp4_full_15_percent": _nvfp4(True, True, keep=0.15),
    "nvfp4_full_parameters": _nvfp4(True, True, **_PARAMETERS),
    "nvfp4_fused": _nvfp4(False, False, fused="inputs"),
    **{f"{fmt}_only_{part}": Recipe(fmt, only=part) for fmt in ("fp8", "nvfp4") for part in PARTS},
}
DEFAULT = "bf16", "fp8_128x128", "nvfp4"
# Timed in a model with separate projections, and in one whose merged projections share their input already.
SEPARATE = "bf16", "fp8", "fp8_fused", "fp8_fused_once", "nvfp4", "nvfp4_fused"
MERGED = tuple(name for name in SEPARATE if RECIPES[name].fused != "inputs")


def convert(model: nn.Module, recipe: str, seed: int = 0) -> str:
    """Make the decoder's linear layers and experts train in `recipe`, in place; what became of them, in a few words.

    The head and the routers always keep high precision.
    Source: arXiv 2412.19437 §3.3; arXiv 2509.25149 §4.
    """
    chosen = RECIPES[recipe]
    if chosen.format == "bf16":
        return "every layer in bf16"
    from torchao.quantization import quantize_

    from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, conversion_report
    from torchao_blockwise.conversion import keep_last_blocks, recommended_layers

    filter_fn = recommended_layers(model)
    if chosen.only:
        layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and filter_fn(m, name)]
        for name, layer in layers:
            model.set_submodule(name, PartlyQuantizedLinear(layer.weight, chosen.format, chosen.only))
        return f"{chosen.only} of {len(layers)} layers in {chosen.format}"
    if chosen.keep:
        filter_fn &= keep_last_blocks(model, chosen.keep)
    if chosen.format == "fp8":
        config = BlockwiseFP8TrainingConfig(**_ROWS | chosen.options)
    else:
        config = NVFP4TrainingConfig(**chosen.options, seed=seed)
    quantize_(model, config, filter_fn=filter_fn)
    report = conversion_report(model)
    formats = ", ".join(sorted({layer.reason for layer in report.layers if layer.status == "converted"}))
    words = f"{report.totals['converted']} of {report.totals['layers']} layers in {formats}"
    return f"{words}, {fuse(model, chosen.fused)}" if chosen.fused else words


@torch.no_grad()
def perturb(model: nn.Module, draw: int) -> None:
    """Make each weight the next larger or the next smaller number, by chance, in place; draw 0 changes nothing."""
    if not draw:
        return
    generator = torch.Generator().manual_seed(draw)
    for weight in model.parameters():
        up = torch.randint(2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        towards = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
        weight.copy_(torch.nextafter(getattr(weight, "hp", weight), towards))


def fuse(model: nn.Module, how: str) -> str:
    """Fuse the attention and MLPs of llm_training.model, as `torchao_blockwise.fuse` does those that it knows.

    how: as in `Recipe`. It knows only the classes of transformers and torchtitan, so ours are handed one by one to what
    it runs on each. With merged projections only SwiGLU is left to be fused, which makes an MLP a SwiGLUMLP.
    Returns how many, in words. Raises UsageError where nothing is left.
    """
    from llm_training.model import MLP, Projections
    from torchao_blockwise.nn import SwiGLUMLP
    from torchao_blockwise.nn.fused_modules import fuse_class

    count = 0
    for name, module in list(model.named_modules()):
        if not isinstance(module, Projections):
            continue
        has_swiglu = how == "once" and isinstance(module, MLP)
        if len(module.readers) > 1:
            fuse_class(module, module.readers, down="down" if has_swiglu else "")
        elif has_swiglu:
            fused = SwiGLUMLP(1, 1, device="meta")
            fused.gate_up, fused.down = module.gate_up, module.down
            model.set_submodule(name, fused)
        count += len(module.readers) > 1 or has_swiglu
    if not count:
        raise UsageError("q, k and v, and gate and up, are one layer each and share their input; add --fuse")
    return f"{count} modules fused"
