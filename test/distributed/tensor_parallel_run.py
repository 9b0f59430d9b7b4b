"""What test_tensor_parallel.py spawns: ranks that run checks."""

from __future__ import annotations

import tensor_parallel_checks as checks
import tensor_parallel_life_checks as life
import torch.distributed as dist
from fsdp_models import CONFIGS, config_of
from fsdp_run import size_of
from ranks import device, join, run_in_turn

RANKS = 4
EVERY, BOTH = tuple(CONFIGS), ("fp8", "nvfp4")
# (check, mesh sizes, configs)
CHECKS = (
    (checks.colwise, (2, 4), EVERY),
    (checks.rowwise, (2, 4), EVERY),
    (checks.computes_in_low_precision, (2, 4), BOTH),
    (checks.sequence_parallel, (2, 4), (*BOTH, "nvfp4_full")),
    (checks.prepares_module_output, (2,), BOTH),
    (checks.loss_in_parallel, (2, 4), BOTH),
    (checks.splits_tokens_alone, (2, 4), (*BOTH, "nvfp4_full")),
    (checks.redistributes_what_lies_otherwise, (2,), BOTH),
    (checks.takes_any_tokens, (1, 2), BOTH),
    (checks.leaves_frozen_parts, (2,), BOTH),
    (life.trains, (2, 4), BOTH),
    (life.trains, (2,), ("nvfp4_full",)),
    (life.keeps_copies_in_a_scope, (2,), BOTH),
    (life.trains_in_mixed_precision, (2,), BOTH),
    (life.checkpoints_activations, (2,), (*BOTH, "nvfp4_full")),
    (life.saves_high_precision, (2,), BOTH),
    (life.catches_changes_before_backward, (2,), BOTH),
    (life.sees_changes_inside_a_graph, (2,), BOTH),
    (checks.holds_quantised_weights, (2, 4), BOTH),
    (checks.sends_quantised_weights_without_handles, (2,), BOTH),
    (life.starts_on_meta, (2,), BOTH),
    (life.is_copied_and_reported, (2,), BOTH),
    (life.refuses_cut_blocks, (2, 4), BOTH),
    (life.refuses_what_it_cannot_place, (2,), BOTH),
    (life.compiles, (2,), (*BOTH, "nvfp4_full")),
    (life.compiles_quantized_weights, (2,), BOTH),
    (life.checks_forward_passes, (2,), BOTH),
    (life.shards_in_two_dims, ((2, 2),), EVERY),
)
BY_NAME = {check.__name__: check for check, _, _ in CHECKS}
CASES = [(check.__name__, size, config) for check, sizes, configs in CHECKS for size in sizes for config in configs]


def run_checks(rank: int, ranks: int, port: int, file: str, chosen) -> None:
    """Run `chosen` cases on meshes of the first ranks, up to the first that raises; leaves what each raised."""
    join(rank, ranks, port)
    kind = device().type
    meshes = {size: dist.device_mesh.DeviceMesh(kind, list(range(size))) for size in (1, 2, 4) if size <= ranks}
    if ranks == 4:
        meshes[2, 2] = dist.device_mesh.init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))

    def run(case):
        name, size, config = case
        BY_NAME[name](meshes[size], config_of(config))

    run_in_turn(run, chosen, size_of, rank, file)
