"""Memory of a stack of linear layers, forward and backward: bf16, FP8 and NVFP4 and their policies.

For each variant what a step has allocated, in MiB: weights, gradients, what is held between forward and backward, and
the peak of all together, without the step's inputs. Checks that the policies `save_activations` and `master_weights`
give the same gradients, bit for bit.

    python benchmarks/bench_memory.py [--dim 4096 --hidden 14336 --layers 4 --tokens 8192] [--out FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from common import driver
from common.environment import slug
from common.layers import Layer, step_memory
from common.report import markdown, save_rows
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
SMOKE = {"dim": 128, "hidden": 256, "layers": 1, "tokens": 64}


def make(args, config, device: torch.device) -> Layer:
    torch.manual_seed(0)
    pairs = [(args.dim, args.hidden), (args.hidden, args.dim)] * args.layers
    model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs)).to(device, torch.bfloat16)
    if config is not None:
        quantize_(model, config)
    return Layer(model, model)


def measure(args, config, device: torch.device) -> tuple[dict[str, float | None], list[torch.Tensor]]:
    """The columns of a step's memory, which only a GPU's allocator counts, and the weights' gradients."""
    torch.manual_seed(1)
    x = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x, requires_grad=False)
    _, _, *gradients = make(args, config, device).step(x, dy)
    memory = step_memory(lambda: make(args, config, device), x, dy)
    shown = {
        "weights": "weights",
        "gradients": "gradients",
        "held": "held between forward and backward",
        "step": "peak of a step",
    }
    row = {f"{text} MiB": memory and getattr(memory, name) / 2**20 for name, text in shown.items()}
    return row, gradients


def main(argv: Sequence[str] | None = None) -> int:
    parser = driver.parser(__doc__)
    driver.add_numbers(parser, dim=4096, hidden=14336, layers=4, tokens=8192)
    args, device = driver.parse(parser, argv)
    if args.smoke:
        vars(args).update(SMOKE)
    rows: dict[str, dict] = {}
    expected = None
    for name, config in VARIANTS.items():
        rows[name], gradients = measure(args, config, device)
        rows[name]["gradients equal fp8's"] = None
        if name.startswith("fp8"):
            expected = expected or gradients
            rows[name]["gradients equal fp8's"] = same = all(map(torch.equal, gradients, expected))
            assert same, f"{name}: gradients differ from those of fp8"
        del gradients
        torch.cuda.empty_cache()

    def text(value) -> str:
        return "-" if value is None else str(value) if isinstance(value, bool) else f"{value:.0f}"

    columns = list(rows["bf16"])
    table = markdown(["", *columns], ([name, *(text(row[c]) for c in columns)] for name, row in rows.items()))
    save_rows(args, f"memory_{slug(device)}", device, rows, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
