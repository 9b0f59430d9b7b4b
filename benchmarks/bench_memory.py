"""Memory of a stack of linear layers, forward and backward: bf16 against FP8 and NVFP4 and their policies.

For each variant what a step has allocated, in MiB: weights, gradients, what is held between forward and backward, and
the peak of all together, without the step's inputs. Checks that the policies `save_activations` and `master_weights`
give the same gradients, bit for bit. Writes benchmarks/results/memory_<device>.json and .md.

    python benchmarks/bench_memory.py [--dim 4096 --hidden 14336 --layers 4 --tokens 8192] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from environment import environment, slug
from layers import Layer
from report import RESULTS, markdown, save
from step_memory import StepMemory, step_memory
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig

VARIANTS = {
    "bf16": None,
    "fp8": BlockwiseFP8TrainingConfig(),
    "fp8, high-precision activations": BlockwiseFP8TrainingConfig(save_activations="high_precision"),
    "fp8, no master weights": BlockwiseFP8TrainingConfig(master_weights=False),
    "nvfp4": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False),
    "nvfp4, no master weights": NVFP4TrainingConfig(hadamard=False, stochastic_rounding=False, master_weights=False),
}
SAME_BITS = [name for name in VARIANTS if name.startswith("fp8")]


def make(args, config, device: torch.device) -> Layer:
    torch.manual_seed(0)
    layers = [
        m
        for _ in range(args.layers)
        for m in (nn.Linear(args.dim, args.hidden, bias=False), nn.Linear(args.hidden, args.dim, bias=False))
    ]
    model = nn.Sequential(*layers).to(device=device, dtype=torch.bfloat16)
    if config is not None:
        quantize_(model, config)
    return Layer(model, model)


def measure(args, config, device: torch.device) -> tuple[StepMemory | None, list[torch.Tensor]]:
    """The memory of a step, and the weights' gradients of one."""
    x = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x, requires_grad=False)
    _, _, *gradients = make(args, config, device).step(x, dy)
    return step_memory(lambda: make(args, config, device), x, dy), gradients


def row_of(memory: StepMemory) -> dict[str, float]:
    shown = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "held between forward and backward": memory.held,
        "peak of a step": memory.step,
    }
    return {f"{name} MiB": nbytes / 2**20 for name, nbytes in shown.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 4096), ("hidden", 14336), ("layers", 4), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_memory: needs a CUDA GPU, whose allocator it reads; none found\n")
    device = torch.device("cuda")
    rows: dict[str, dict] = {}
    reference = None
    for name, config in VARIANTS.items():
        torch.manual_seed(1)
        memory, gradients = measure(args, config, device)
        assert memory is not None
        rows[name] = row_of(memory)
        if name in SAME_BITS:
            reference = reference or gradients
            same = all(torch.equal(a, b) for a, b in zip(gradients, reference))
            rows[name]["gradients equal fp8's"] = same
            assert same, f"{name}: gradients differ from those of {SAME_BITS[0]}"
        del gradients
        torch.cuda.empty_cache()
    text = table(rows)
    print(text)
    shape = {k: v for k, v in vars(args).items() if k != "out"}
    content = {"shape": shape, "environment": environment(device), "rows": rows}
    save(args.out, f"memory_{slug(device)}", content, text)


def table(rows: dict[str, dict]) -> str:
    columns = list(next(iter(rows.values())))
    return markdown(["", *columns], ([name, *(f"{row[c]:.0f}" for c in columns)] for name, row in rows.items()))


if __name__ == "__main__":
    main()
