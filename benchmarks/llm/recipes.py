"""The precisions that are compared: how each changes the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from llm.ablation import ABLATIONS, ablate, restore
from llm.config import UsageError


class Recipe(NamedTuple):
    """How linear layers and experts train, and what is fused besides.

    precision: "bf16", "bf16_perturbed", "fp8", "fp8_power_of_2", "fp8_parameters", "fp8_keep_last",
        "fp8_keep_first_and_last", "nvfp4", "nvfp4_hadamard", "nvfp4_stochastic", "nvfp4_full", "nvfp4_full_15_percent",
        "nvfp4_full_parameters", or one of `llm.ablation`, which are for diagnosis alone.
    fused: "inputs", where layers that read one input share its quantization;
    "once", where SwiGLU quantizes what it computes as well; or "".
    """

    precision: str
    fused: str = ""


RECIPES = {
    "bf16": Recipe("bf16"),
    "bf16_perturbed": Recipe("bf16_perturbed"),
    "fp8": Recipe("fp8"),
    "fp8_power_of_2": Recipe("fp8_power_of_2"),
    "fp8_parameters": Recipe("fp8_parameters"),
    "fp8_keep_last": Recipe("fp8_keep_last"),
    "fp8_keep_first_and_last": Recipe("fp8_keep_first_and_last"),
    **{name: Recipe(name) for name in ABLATIONS},
    "fp8_fused": Recipe("fp8", "inputs"),
    "fp8_fused_once": Recipe("fp8", "once"),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4_hadamard": Recipe("nvfp4_hadamard"),
    "nvfp4_stochastic": Recipe("nvfp4_stochastic"),
    "nvfp4_full": Recipe("nvfp4_full"),
    "nvfp4_full_15_percent": Recipe("nvfp4_full_15_percent"),
    "nvfp4_full_parameters": Recipe("nvfp4_full_parameters"),
    "nvfp4_fused": Recipe("nvfp4", "inputs"),
}
DEFAULT = "bf16", "fp8", "nvfp4"
# What is timed of a model with separate projections, and of one whose merged projections share their input already.
SEPARATE = tuple(name for name, recipe in RECIPES.items() if recipe.precision in DEFAULT)
MERGED = tuple(name for name in SEPARATE if RECIPES[name].fused != "inputs")


def convert(model: nn.Module, recipe: str, seed: int = 0) -> str:
    """Make the decoder's linear layers and experts train in `recipe`, in place; what became of them, in a few words.

    bf16: unchanged, autocast runs its products in bf16; perturbed: each first weight is the next larger number.
    fp8: DeepSeek-V3's blockwise FP8; keep: the last block, or the first one too, is kept in high precision; faked: see
    `llm.ablation`. nvfp4: the last block is kept in high precision as well; hadamard transforms the operands of
    grad_weight, stochastic rounds gradients so, by bits of `seed`, full does both. 15_percent: so many of the blocks
    are kept, the last ones. parameters: the Parameters
    are the quantized weights, and the optimizer alone has masters. The head and the routers always keep high precision.
    A model that was ablated is made plain first.
    Raises UsageError for an ablation of a mixture of experts.
    Source: arXiv 2412.19437 §3.3; arXiv 2509.25149 §4.
    """
    precision, fused = RECIPES[recipe]
    restore(model)
    if precision == "bf16_perturbed":
        perturb(model)
    if precision.startswith("bf16"):
        return "every linear layer in bf16" if not model.routers() else "every linear layer and expert in bf16"
    from torchao.quantization import quantize_

    from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, conversion_report
    from torchao_blockwise.conversion import keep_last_blocks, recommended_layers, skip_fqns

    filter_fn, has_masters = recommended_layers(model), not precision.endswith("_parameters")
    if precision in ABLATIONS:
        if model.routers():
            raise UsageError(f"{recipe}: operands are faked in linear layers alone; take a dense --preset")
        linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        return f"{ablate(model, ABLATIONS[precision], filter_fn)} of {linears} linear layers with operands as in FP8"
    if precision.startswith("fp8"):
        if "keep" in precision:
            filter_fn &= keep_last_blocks(model, 1)
        if precision == "fp8_keep_first_and_last":
            filter_fn &= skip_fqns("layers.0.*")
        config = BlockwiseFP8TrainingConfig(power_of_2_scales=precision == "fp8_power_of_2", master_weights=has_masters)
        quantize_(model, config, filter_fn=filter_fn)
    else:
        kept = 0.15 if precision.endswith("_15_percent") else 1
        parts = precision.split("_")
        config = NVFP4TrainingConfig(
            hadamard="hadamard" in parts or "full" in parts,
            stochastic_rounding="stochastic" in parts or "full" in parts,
            master_weights=has_masters,
            seed=seed,
        )
        quantize_(model, config, filter_fn=filter_fn & keep_last_blocks(model, kept))
    layers = conversion_report(model).layers
    converted = [layer for layer in layers if layer.status == "converted"]
    formats = ", ".join(sorted({layer.reason for layer in converted}))
    linears = {fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    kinds = {
        "linear layers": lambda layer: layer.fqn in linears,
        "weights of experts": lambda layer: len(layer.shape) == 3,
    }
    words = []
    for kind, is_one in kinds.items():
        done, all_of_them = (sum(map(is_one, some)) for some in (converted, layers))
        words += [f"{done} of {all_of_them} {kind}"] * (all_of_them > 0)
    return f"{' and '.join(words)} in {formats}" + (f", {fuse(model, fused)}" if fused else "")


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Make each weight the next larger number, in place."""
    for weight in model.parameters():
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))


def fuse(model: nn.Module, how: str) -> str:
    """Fuse the attention and MLPs of llm.model, as `torchao_blockwise.fuse` does those that it knows; how many.

    how: as in `Recipe`. It knows the classes of transformers and torchtitan alone, so that ours are handed one by one
    to what it runs on each. With merged projections only SwiGLU is left to be fused, which makes an MLP a SwiGLUMLP.
    Raises UsageError where nothing is left.
    """
    from llm.model import MLP, Projections
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
        raise UsageError("q, k and v, and gate and up, are one product each and share their input; add --fuse")
    return f"{count} modules fused"
