"""Memory of LoRA on frozen bases: bf16, quantized Parameters in FP8 and NVFP4, and bitsandbytes' NF4 where it is there.

A small Llama with adapters on all linear layers of its blocks takes a step on the CPU, whose bytes `memory_report`
counts. The head and the embedding stay in bf16. Writes benchmarks/results/adapter_memory.json and .md.

    python benchmarks/adapter_memory.py [--hidden 1024 --layers 4 --tokens 512]
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import peft
import torch
import transformers
from environment import environment
from report import RESULTS, markdown, save
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig, recommended_layers
from torchao_blockwise.diagnostics import memory_report

COLUMNS = ("bits a base weight", "base MiB", "saved for backward MiB", "peak of a step MiB")


def blockwise(config) -> Callable[[nn.Module], int]:
    def convert(model: nn.Module) -> int:
        quantize_(model, config(master_weights=False), filter_fn=recommended_layers(model))
        return 0

    return convert


def nf4(model: nn.Module) -> int:
    """NF4 with quantized constants, as QLoRA has it; returns the bytes of constants, which are no Parameters."""
    import bitsandbytes as bnb

    constants = 0
    for name, layer in base_layers(model).items():
        weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        quantized = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        quantized.weight = weight
        model.set_submodule(name, quantized.to("cpu"))
        state = quantized.weight.quant_state
        # The tables of codes are shared by all weights.
        constants += state.absmax.nbytes + state.state2.absmax.nbytes + state.offset.nbytes
    return constants


# What each does to a model; it returns bytes that are held beside Parameters.
BASES: dict[str, Callable[[nn.Module], int]] = {
    "bf16": lambda model: 0,
    "FP8, quantized Parameters": blockwise(BlockwiseFP8TrainingConfig),
    "NVFP4, quantized Parameters": blockwise(NVFP4TrainingConfig),
    "NF4 of bitsandbytes": nf4,
}


def base_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers but the head."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in found.items() if name != "lm_head"}


def nbytes(weight: torch.Tensor) -> int:
    """Of a weight, and of what a quantized one is made of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(nbytes(getattr(weight, name)) for name in names)


def measured(hidden: int, layers: int, tokens: int, convert: Callable[[nn.Module], int]) -> dict[str, float]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    elements = sum(layer.weight.numel() for layer in base_layers(model).values())
    beside = convert(model)
    base = sum(nbytes(layer.weight) for layer in base_layers(model).values()) + beside
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    ids = torch.randint(1024, (1, tokens))
    held = memory_report(adapted, {"input_ids": ids, "labels": ids}).measured
    values = (8 * base / elements, base / 2**20, held.saved / 2**20, (held.peak + beside) / 2**20)
    return dict(zip(COLUMNS, values))


def rows_of(hidden: int, layers: int, tokens: int) -> dict[str, dict[str, float]]:
    there = {name: base for name, base in BASES.items() if base is not nf4 or importlib.util.find_spec("bitsandbytes")}
    return {name: measured(hidden, layers, tokens, base) for name, base in there.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    cells = ([name, f"{row[COLUMNS[0]]:.3f}", *(f"{row[c]:.1f}" for c in COLUMNS[1:])] for name, row in rows.items())
    return markdown(["LoRA on", *COLUMNS], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 1024), ("layers", 4), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    rows = rows_of(args.hidden, args.layers, args.tokens)
    text = table(rows)
    print(text)
    shape = {k: v for k, v in vars(args).items() if k != "out"}
    content = {"shape": shape, "environment": environment(torch.device("cpu")), "rows": rows}
    save(args.out, "adapter_memory", content, text)


if __name__ == "__main__":
    main()
