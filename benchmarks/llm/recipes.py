"""The precisions that are compared: how each changes the model."""

from __future__ import annotations

from torch import nn

RECIPES = ("bf16", "fp8", "nvfp4")


def convert(model: nn.Module, recipe: str) -> str:
    """Make the decoder's linear layers and experts train in `recipe`, in place; what became of them, in a few words.

    bf16: unchanged, autocast runs its products in bf16. fp8: DeepSeek-V3's blockwise FP8. nvfp4: the last block is
    kept in high precision as well. The head and the routers always keep high precision.
    Source: arXiv 2412.19437 §3.3; arXiv 2509.25149 §4.
    """
    if recipe == "bf16":
        return "every linear layer in bf16" if not model.routers() else "every linear layer and expert in bf16"
    from torchao.quantization import quantize_

    from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, conversion_report
    from torchao_blockwise.conversion import keep_last_blocks, linears_and_experts, skip_lm_head

    filter_fn = linears_and_experts() & skip_lm_head()
    if recipe == "fp8":
        quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=filter_fn)
    else:
        quantize_(model, NVFP4TrainingConfig(), filter_fn=filter_fn & keep_last_blocks(model, 1))
    layers = conversion_report(model).layers
    converted = [layer for layer in layers if layer.status == "converted"]
    formats = ", ".join(sorted({layer.reason for layer in converted}))
    words = []
    for kind, dims in (("linear layers", 2), ("weights of experts", 3)):
        done, all_of_them = (sum(len(layer.shape) == dims for layer in some) for some in (converted, layers))
        words += [f"{done} of {all_of_them} {kind}"] * (all_of_them > 0)
    return f"{' and '.join(words)} in {formats}"
