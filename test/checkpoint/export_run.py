"""What test_export_over_ranks.py spawns: ranks that share a model export the bytes of one device."""

from __future__ import annotations

import export_checks as checks
import gather_checks as gathers
import torch
from ranks import device, join, leave, run_each

RUNS = {
    f.__name__: f
    for f in (
        checks.shards,
        checks.shards_nvfp4,
        checks.reads_what_it_exports,
        gathers.streams,
        checks.loads,
        checks.joins_sharded_nvfp4,
        gathers.gathers_bytes,
        gathers.gathers_bytes_nvfp4,
        gathers.gathers_together,
        checks.rounds_as_it_gathers,
        checks.splits,
        checks.splits_shards,
        checks.spreads_experts,
        checks.spreads_and_shards_experts,
        checks.raises_on_all_ranks,
    )
}


def run_cases(rank: int, ranks: int, port: int, file: str, cases) -> None:
    """Leaves what was raised in each case, or None."""
    if device().type != "cpu":
        torch.set_default_device(device())
    join(rank, ranks, port, seconds=180)
    run_each(RUNS, rank, cases, file)
    leave()
