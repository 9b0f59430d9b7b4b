"""Bytes a parameter at rest, between steps: weights, masters, optimizer states.

Read off the tensors that exist after a step of AdamW on one layer. Other ranks are imagined, this one is the first.
Needs no GPU. Writes benchmarks/results/weight_bytes.json and .md.

    python benchmarks/weight_bytes.py [--features 2048 --ranks 8]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from environment import environment
from report import RESULTS, markdown, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise.distributed import MasterWeightOptimizer

FORMATS = {"FP8": BlockwiseFP8TrainingConfig, "NVFP4": NVFP4TrainingConfig}
COLUMNS = ("weight", "master", "states", "total")


def layer(features: int, dtype: torch.dtype, config=None) -> nn.Linear:
    made = nn.Linear(features, features, bias=False, dtype=dtype)
    if config is not None:
        quantize_(made, config)
    return made


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(16, model.in_features, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(x.nbytes for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))


def row(weight: int, master: int, states: int, elements: int) -> dict[str, float]:
    held = dict(zip(COLUMNS, (weight, master, states, weight + master + states)))
    return {name: count / elements for name, count in held.items()}


def plain(features: int, fp32_masters: bool) -> dict[str, float]:
    """A bf16 weight that AdamW steps itself, or through an fp32 master."""
    model = layer(features, torch.bfloat16)
    stepped = nn.Parameter(model.weight.detach().float()) if fp32_masters else model.weight
    optimizer = torch.optim.AdamW([stepped])
    stepped.grad = torch.ones_like(stepped)
    optimizer.step()
    return row(model.weight.nbytes, stepped.nbytes * fp32_masters, state_bytes(optimizer), stepped.numel())


def high_precision_parameter(features: int, config) -> dict[str, float]:
    """The Parameter is the master, and the only copy."""
    model = layer(features, torch.float32, config())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    weight = model.weight
    return row(weight.quantized_bytes, weight.hp.nbytes, state_bytes(optimizer), weight.numel())


def primary(features: int, config, mesh: DeviceMesh | None = None, **options) -> dict[str, float]:
    model = layer(features, torch.bfloat16, config(master_weights=False))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model, **options)
    step(model, optimizer)
    return optimizer.bytes_at_rest()


def rows_of(features: int, ranks: int) -> dict[str, dict[str, float]]:
    rows = {
        "bf16, AdamW in bf16": plain(features, fp32_masters=False),
        "bf16, fp32 masters": plain(features, fp32_masters=True),
    }
    for name, config in FORMATS.items():
        rows[f"{name}, `master_weights=True`"] = high_precision_parameter(features, config)
    for name, config in FORMATS.items():
        rows[f"{name}, primary weights"] = primary(features, config)
    # Makes the "fake" backend known, whose collectives move nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    for name, config in FORMATS.items():
        rows[f"{name}, primary weights, ZeRO-1 or ZeRO-2 over {ranks} ranks"] = primary(features, config, shard="zero1")
    mesh = DeviceMesh("cpu", list(range(ranks)))
    for name, config in FORMATS.items():
        rows[f"{name}, primary weights, FSDP2 over {ranks} ranks"] = primary(features, config, mesh)
    dist.destroy_process_group()
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    cells = ([name, *(f"{held[c]:.3f}" for c in COLUMNS)] for name, held in rows.items())
    return markdown(["bytes a parameter", *COLUMNS], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    rows = rows_of(args.features, args.ranks)
    text = table(rows)
    print(text)
    content = {"shape": vars(args), "environment": environment(torch.device("cpu")), "rows": rows}
    save(RESULTS, "weight_bytes", content, text)


if __name__ == "__main__":
    main()
