"""Memory of a stack of linear layers, forward and backward: bf16 against FP8 and NVFP4 and their two policies.

For each variant: bytes of weights as products read them, bytes held between forward and backward, and the peak of the
step above its start. Checks first that the policies `columnwise` and `save_activations` give the same gradients, bit
for bit. Writes benchmarks/results/memory_<device>.json and .md.

    python benchmarks/bench_memory.py [--dim 4096 --hidden 14336 --layers 4 --tokens 8192]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from environment import environment, slug, write_json, write_text
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig

RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS = {
    "bf16": None,
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8, columnwise cached": BlockwiseFP8TrainingConfig(columnwise="cached"),
    "fp8, high-precision activations": BlockwiseFP8TrainingConfig(save_activations="high_precision"),
    "fp8, no master weights": BlockwiseFP8TrainingConfig(master_weights=False),
    "nvfp4": NVFP4TrainingConfig(),
    "nvfp4, no master weights": NVFP4TrainingConfig(master_weights=False),
}
SAME_BITS = [name for name in VARIANTS if name.startswith("fp8")]


def make(args, config) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        m
        for _ in range(args.layers)
        for m in (nn.Linear(args.dim, args.hidden, bias=False), nn.Linear(args.hidden, args.dim, bias=False))
    ]
    model = nn.Sequential(*layers).to(device="cuda", dtype=torch.bfloat16)
    if config is not None:
        quantize_(model, config)
    return model


def step(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> int:
    """One forward and backward without optimizer; the bytes allocated between the two."""
    y = model(x)
    held = torch.cuda.memory_allocated()
    y.backward(dy)
    return held


def measure(args, config) -> tuple[dict, list[torch.Tensor]]:
    before_model = torch.cuda.memory_allocated()
    model = make(args, config)
    x = torch.randn(args.tokens, args.dim, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    step(model, x, dy)
    # Gradients exist from here on, as they do in every step but the first.
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    weights = [m.weight for m in model if isinstance(m, nn.Linear)]
    resident = torch.cuda.memory_allocated() - before_model - x.nbytes - dy.nbytes
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    held = step(model, x, dy)
    torch.cuda.synchronize()
    row = {
        "weights, gradients and kept copies MiB": resident / 2**20,
        "held between forward and backward MiB": (held - start) / 2**20,
        "peak of the step above its start MiB": (torch.cuda.max_memory_allocated() - start) / 2**20,
    }
    return row, [w.grad.detach().clone() for w in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 4096), ("hidden", 14336), ("layers", 4), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_memory: needs a CUDA GPU, whose allocator it reads; none found\n")
    rows, reference = {}, None
    for name, config in VARIANTS.items():
        rows[name], grads = measure(args, config)
        if name in SAME_BITS:
            reference = reference or grads
            same = all(torch.equal(a, b) for a, b in zip(grads, reference))
            rows[name]["gradients equal fp8's"] = same
            assert same, f"{name}: gradients differ from those of {SAME_BITS[0]}"
        del grads
        torch.cuda.empty_cache()
    text = table(rows)
    print(text)
    name = f"memory_{slug(torch.device('cuda'))}"
    content = {"shape": vars(args), "environment": environment(torch.device("cuda")), "rows": rows}
    write_json(RESULTS / f"{name}.json", content)
    write_text(RESULTS / f"{name}.md", text + "\n")


def table(rows: dict[str, dict]) -> str:
    columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(f"{row[c]:.0f}" for c in columns) + " |" for name, row in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
