"""Memory of LoRA on frozen bases: bf16, quantized Parameters in FP8 and NVFP4, and bitsandbytes' NF4 if installed.

A small Llama is written in bf16, FP8 and NVFP4, and loaded for adapters from each of these files; transformers loads
NF4 from the bf16 files. With adapters on all linear layers of its blocks it takes a step on the CPU, whose bytes
`memory_report` counts. The head and the embedding stay in bf16. Writes benchmarks/results/adapter_memory.json and .md.

    python benchmarks/adapter_memory.py [--hidden 1024 --layers 4 --tokens 512] [--out FOLDER]
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from common import driver
from common.report import markdown, save_rows
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    NVFP4TrainingConfig,
    checkpoint,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.diagnostics import memory_report
from torchao_blockwise.integrations.transformers import from_pretrained

COLUMNS = ("bits a base weight", "base MiB", "saved for backward MiB", "peak of a step MiB")
# (recipe, format of the files, config that writes them) of each base; NF4 is bitsandbytes'.
BASES = {
    "bf16": (None, None, None),
    "FP8, quantized Parameters": ("fp8", "fp8_block", BlockwiseFP8TrainingConfig()),
    "NVFP4, quantized Parameters": ("nvfp4", "nvfp4_modelopt", NVFP4TrainingConfig()),
    "NF4 of bitsandbytes": None,
}


def write(folder: Path, hidden: int, layers: int, name: str) -> None:
    """Write a Llama with random weights to `folder`, in the format of this base."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers,
        num_attention_heads=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    _, format, config = BASES[name] or (None, None, None)
    if format is None:
        model.save_pretrained(folder)
        return
    quantize_(model, config, filter_fn=linears_and_experts() & skip_lm_head())
    checkpoint.export(model, folder, format)


def load(folder: Path, name: str) -> nn.Module:
    if BASES[name] is not None:
        return from_pretrained(folder, BASES[name][0], "adapters", dtype=torch.bfloat16)
    # As in QLoRA: constants are quantized too.
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )


def base_layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]


def constants_of(weight: torch.Tensor) -> int:
    """Bytes of NF4's constants, which are not Parameters. All weights share the tables of codes."""
    state = getattr(weight, "quant_state", None)
    return 0 if state is None else state.absmax.nbytes + state.state2.absmax.nbytes + state.offset.nbytes


def measured(hidden: int, layers: int, tokens: int, name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "x"
        write(folder, hidden, layers, name)
        model = load(folder, name)
    weights = [layer.weight for layer in base_layers(model)]
    elements = sum(layer.in_features * layer.out_features for layer in base_layers(model))
    constants = sum(map(constants_of, weights))
    base = sum(weight.nbytes for weight in weights) + constants
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    ids = torch.randint(1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    held = memory_report(adapted, {"input_ids": ids, "labels": ids}).measured
    values = (8 * base / elements, base / 2**20, held.saved / 2**20, (held.peak + constants) / 2**20)
    return dict(zip(COLUMNS, values))


def main(arguments: list[str] | None = None) -> None:
    parser = driver.parser(__doc__)
    driver.add_numbers(parser, hidden=1024, layers=4, tokens=512)
    args = parser.parse_args(arguments)
    has_nf4 = importlib.util.find_spec("bitsandbytes") is not None
    rows = {
        name: measured(args.hidden, args.layers, args.tokens, name) for name, base in BASES.items() if base or has_nf4
    }
    cells = ([name, f"{row[COLUMNS[0]]:.3f}", *(f"{row[c]:.1f}" for c in COLUMNS[1:])] for name, row in rows.items())
    save_rows(args, "adapter_memory", torch.device("cpu"), rows, markdown(["LoRA on", *COLUMNS], cells))


if __name__ == "__main__":
    main()
