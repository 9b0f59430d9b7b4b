"""Memory that layers save for backward with and without `fuse`, in each family of models that it supports.

Each model has two blocks of the real size, without the head, on the meta device: transformers' default configs, and
flavors of torchtitan. `memory_report` predicts a training step. Writes benchmarks/results/fuse_memory.json and .md.

    python benchmarks/fuse_memory.py [--tokens 4096 --only "transformers Llama"] [--out FOLDER]
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from common import driver
from common.report import markdown, save_rows
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, fuse, recommended_layers
from torchao_blockwise.diagnostics import memory_report

LAYERS = 2
RECIPES = {"FP8": BlockwiseFP8TrainingConfig(), "NVFP4": NVFP4TrainingConfig()}
HUGGING_FACE = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "DeepseekV3", "Gemma3Text")
TITAN = (("llama3", "8B"), ("qwen3", "8B"), ("qwen3", "debugmodel_non_fused_qkv"), ("deepseek_v3", "16B"))
MODELS = {f"transformers {name}": (name, None) for name in HUGGING_FACE}
MODELS |= {f"torchtitan {family} {flavor}": (family, flavor) for family, flavor in TITAN}
COLUMNS = ("model", "recipe", "fused modules", "saved MiB", "with `fuse`", "saved, ×", "peak, ×")


def model_and_batch(name: str, flavor: str | None, tokens: int) -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    if flavor is None:
        config = getattr(transformers, f"{name}Config")(num_hidden_layers=LAYERS)
        options = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts_per_tok") else {}
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16, **options)
        return model, ({"input_ids": ids, "use_cache": False},)
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = importlib.import_module(f"torchtitan.models.{name}").model_registry(flavor).model
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        # Its other implementations of attention do not run on the meta device.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build().bfloat16()
    model._skip_lm_head = True
    return model, (ids, torch.arange(tokens)[None])


def sum_of(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output.last_hidden_state).sum()


def row(model_name: str, recipe: str, tokens: int) -> dict[str, Any]:
    steps, fused = [], 0
    for with_fuse in (False, True):
        with torch.device("meta"):
            model, batch = model_and_batch(*MODELS[model_name], tokens)
        # Without the config, which would leave out one of the two blocks in NVFP4.
        quantize_(model, RECIPES[recipe], filter_fn=recommended_layers(model))
        if with_fuse:
            fused = fuse(model).to_dict()["fused"]
        steps.append(memory_report(model, *batch, loss=sum_of).predicted)
    before, after = steps
    saved, peak = after.saved / before.saved, after.peak / before.peak
    return dict(zip(COLUMNS, (model_name, recipe, fused, before.saved / 2**20, after.saved / 2**20, saved, peak)))


def main(arguments: list[str] | None = None) -> None:
    parser = driver.parser(__doc__, only=(MODELS, MODELS))
    driver.add_numbers(parser, tokens=4096)
    args = parser.parse_args(arguments)
    rows = [row(name, recipe, args.tokens) for name in args.only for recipe in RECIPES]
    formats = ("{}", "{}", "{}", "{:.0f}", "{:.0f}", "{:.3f}", "{:.3f}")
    cells = [[form.format(value) for form, value in zip(formats, row.values())] for row in rows]
    save_rows(args, "fuse_memory", torch.device("cpu"), rows, markdown(COLUMNS, cells, left=2))


if __name__ == "__main__":
    main()
