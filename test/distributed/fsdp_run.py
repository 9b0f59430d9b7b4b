"""What tests of FSDP2, of checkpoints and of scales spawn: ranks that run checks, and ranks of which one goes wrong."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import checkpoint_checks as checkpoints
import expert_checks as experts
import fsdp_change_checks as change
import fsdp_checks as checks
import fsdp_life_checks as life
import primary_shard_checks as primary
import primary_shard_life_checks as primary_life
import torch
import torch.distributed as dist
from fsdp_models import CONFIGS, adamw, blocks, config_of, shard, train
from helpers import FP8, replace
from ranks import device, gpus, join, run_in_turn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torchao.quantization import quantize_

from torchao_blockwise import _compat, recommended_layers
from torchao_blockwise.distributed import collective_watchdog, watch_collectives
from torchao_blockwise.nn import SwiGLUExperts

EVERY = ("fp8", "fp8_pow2", "nvfp4")
BOTH = ("fp8", "nvfp4")
FULL = "nvfp4_full"
# How values are rounded, and activations and gradients scaled: ranks exchange nothing for these, however many they are.
OF_ELEMENTS = ("fp8_pow2", FULL)
PER_EXPERT, PER_EXPERT_NEAREST = "nvfp4_per_expert", "nvfp4_per_expert_nearest"
# (check, mesh sizes, configs)
CHECKS = (
    (checks.gathers_exactly_at_any_split, (1, 2, 3, 4), BOTH),
    (checks.gathers_special_values, (3,), EVERY),
    (checks.trains_as_unsharded, (1, 2, 3, 4), BOTH),
    (checks.trains_as_unsharded, (3,), OF_ELEMENTS),
    (checks.trains_in_one_group, (4,), BOTH),
    (checks.gives_ranks_seeds_of_their_own, (2,), (FULL,)),
    (checks.shards_columns, (1, 4), EVERY),
    (checks.reshards_after_forward, (4,), BOTH),
    (checks.reshards_to_fewer_ranks, (4,), ("fp8",)),
    (checks.offloads, (2,), (*BOTH, FULL)),
    (checks.trains_in_mixed_precision, (1, 2, 3), EVERY),
    (checks.trains_bf16, (2,), BOTH),
    (checks.accumulates, (1, 2), (*BOTH, FULL)),
    (checks.reduces_once_a_step, (4,), ("fp8",)),
    (checks.leaves_frozen_weights, (2,), BOTH),
    (checks.ties_embeddings, (1, 2), BOTH),
    (checks.checkpoints_activations, (2,), (*BOTH, FULL)),
    (checks.clips_and_steps, (2,), BOTH),
    (checks.compiles_blocks, (2,), (*BOTH, FULL)),
    (life.starts_on_meta, (4,), ("fp8", FULL)),
    (life.loads, (3,), BOTH),
    (life.follows_changes_by_hand, (1, 4), BOTH),
    (life.follows_changes_between_microbatches, (2,), BOTH),
    (life.refuses_stale_values, (2,), ("fp8",)),
    (change.follows_every_writer, (2,), BOTH),
    (change.follows_changes_between_microbatches, (2,), BOTH),
    (change.refills_what_evaluation_left_gathered, (1, 2), BOTH),
    (change.keeps_the_scales_of_what_is_gathered, (2,), BOTH),
    (change.quantizes_shards_once_in_a_scope, (1, 2), BOTH),
    (change.refuses_changes_in_a_scope, (2,), ("fp8",)),
    (change.whole_is_what_was_written, (3,), BOTH),
    (life.enters_by_other_ways, (2,), BOTH),
    (life.frees_what_it_gathers, (1, 4), BOTH),
    (life.dies_with_the_model, (2,), BOTH),
    (life.synchronises_by_hand, (1, 4), BOTH),
    (life.gathers_few_bytes, (3, 4), BOTH),
    (checks.asks_no_store, (2,), BOTH),
    (checks.shards_hybrid, ((2, 2),), BOTH),
    (life.replicates_and_groups, (2,), ("fp8",)),
    (life.gathers_by_redistribution, (2,), ("fp8",)),
    (life.checks_forward_passes, (1, 2), BOTH),
)
CHECKPOINT_CHECKS = (
    (checkpoints.holds_plain_shards, (1, 4, (2, 2)), BOTH),
    (checkpoints.resumes, (4, (2, 2)), BOTH),
    (checkpoints.reshards, (4,), BOTH),
    (checkpoints.exchanges_with_unconverted, (4,), ("fp8",)),
    (checkpoints.gives_full_state_dicts, (4,), ("fp8",)),
    (checkpoints.assigns, (4,), BOTH),
    (checkpoints.saves_asynchronously, (4,), ("fp8",)),
    (checkpoints.saves_two_dims, ((2, 2),), ("fp8",)),
    (checkpoints.saves_shared_weights, (4,), ("fp8",)),
)
PRIMARY_CHECKS = (
    (primary.gathers_exactly_at_any_split, (1, 3, 4), BOTH),
    (primary.keeps_dtypes_of_gradients, (2,), BOTH),
    (primary.trains_long, (1, 2, 4), BOTH),
    (primary.trains_in_many_ways, (2,), (*BOTH, FULL)),
    (primary.accumulates, (2,), (*BOTH, FULL)),
    (primary.compiles_blocks, (2,), ("fp8",)),
    (primary.gathers_few_bytes, (3, 4), BOTH),
    (primary_life.leaves_frozen_weights, (2,), BOTH),
    (primary_life.loads, (3,), BOTH),
    (primary_life.adopts_loads, (2,), BOTH),
    (primary_life.casts_loads_between_microbatches, (2,), BOTH),
    (primary_life.refuses_stale_values, (2,), ("fp8",)),
    (primary_life.refuses_writes_into_state_dicts, (2,), BOTH),
    (primary_life.starts_on_meta, (4,), BOTH),
    (primary_life.refuses, (2,), BOTH),
    (primary_life.reshards_to_fewer_ranks, (4,), ("fp8",)),
    (primary_life.frees_what_it_gathers, (2,), BOTH),
    (primary_life.resumes, (4,), ("nvfp4",)),
    (primary_life.reshards, (4,), BOTH),
    (primary_life.gives_full_state_dicts, (2,), BOTH),
    (primary.shards_hybrid, ((2, 2),), BOTH),
)
EXPERT_CHECKS = (
    (experts.computes_as_one_device, (1, 2, 3, 4), (*BOTH, PER_EXPERT)),
    (experts.computes_as_one_device, (3,), ("fp8_pow2", FULL)),
    (experts.exchanges_no_amaxes, (2,), (PER_EXPERT,)),
    (experts.compiles, (2,), (*BOTH, FULL, PER_EXPERT)),
    (experts.keeps_copies_in_a_scope, (2,), (*BOTH, PER_EXPERT)),
    (experts.shards_experts, (1, 3, 4), (*BOTH, FULL, PER_EXPERT)),
    (experts.trains_sharded_experts, (2, 4), (*BOTH, PER_EXPERT_NEAREST)),
    (experts.spreads_and_shards, ((2, 2),), (*BOTH, PER_EXPERT_NEAREST)),
    (experts.saves_whole_experts, (3,), BOTH),
    (experts.refuses_other_modules, (2,), ("fp8",)),
)


def name_of(check) -> str:
    return f"{check.__module__}.{check.__name__}"


BY_NAME = {name_of(check): check for check, _, _ in CHECKS + CHECKPOINT_CHECKS + PRIMARY_CHECKS + EXPERT_CHECKS}


# What resharding to a part of the ranks means shows on four of them.
FOUR_ALONE = (checks.reshards_to_fewer_ranks, primary_life.reshards_to_fewer_ranks)
# A step on the CPU rounds otherwise than one on a GPU, so that training there has nothing to be compared with.
CPU_ALONE = (checks.offloads,)


def cases(checks=CHECKS) -> list[tuple[str, int | tuple[int, int], str]]:
    """(name of a check, mesh size, name of a config)"""
    return [
        (name_of(check), size, config)
        for check, sizes, configs in checks
        for size in _sizes_here(check, sizes)
        for config in configs
    ]


def _sizes_here(check, sizes) -> tuple:
    """`sizes`, and as many ranks as there are GPUs, where those are too few for all of them."""
    scales = check not in FOUR_ALONE + CPU_ALONE and any(isinstance(size, int) for size in sizes)
    fits = any(1 < ranks_of(size) <= gpus() for size in sizes)
    return (*sizes, gpus()) if scales and not fits and gpus() > 1 else sizes


def ranks_of(size: int | tuple[int, int]) -> int:
    return size if isinstance(size, int) else size[0] * size[1]


def size_of(case) -> int:
    return ranks_of(case[1])


def may_run_on_gpus(case) -> bool:
    return BY_NAME[case[0]] not in CPU_ALONE


def run_checks(rank: int, ranks: int, port: int, file: str, chosen) -> None:
    """Run `chosen` cases on meshes of the first ranks, up to the first that raises; leaves what each raised or None."""
    join(rank, ranks, port)
    kind = device().type
    meshes = {size: DeviceMesh(kind, list(range(size))) for size in range(1, ranks + 1)}
    if ranks == 4:
        meshes[2, 2] = DeviceMesh(kind, [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))

    def run(case):
        name, size, config = case
        BY_NAME[name](meshes[size], config_of(config))

    run_in_turn(run, chosen, size_of, rank, file)


# --- one rank goes wrong ----------------------------------------------------------------------------------------------

# Over gloo: its collectives raise where a rank is missing, those of NCCL end the process.


def _other_config(rank, config):
    return blocks(replace(config, power_of_2_scales=rank == 1))


def _other_shape(rank, config):
    return blocks(config, hidden=151 if rank == 1 else 150)


def _fewer_weights(rank, config):
    model = blocks(None)
    quantize_(model, config, filter_fn=lambda m, name: name.endswith((".up", ".down")) and (rank, name) != (1, "1.up"))
    return model


def _no_weights(rank, config):
    return blocks(None if rank == 1 else config)


def _fails_early(rank, config):
    if rank == 1:
        raise FloatingPointError("rank 1 gives up")
    return blocks(config)


def _fails_later(rank, config):
    return blocks(config)


WRONG = (_other_config, _other_shape, _fewer_weights, _fails_early, _fails_later, _no_weights)


def go_wrong(rank: int, ranks: int, port: int, file: str, timeout: float) -> None:
    """Rank 1 builds another model, or fails; leaves what the rank raised each time and after how many seconds."""
    left = {}
    for build in WRONG:
        join(rank, ranks, port, seconds=timeout, name=build.__name__)
        start = time.monotonic()
        try:
            model = shard(build(rank, CONFIGS["fp8"]), DeviceMesh(device().type, list(range(ranks))))
            optimizer = adamw(model)
            train(model, optimizer, steps=1)
            if rank == 1:
                raise FloatingPointError("rank 1 gives up")
            train(model, optimizer, steps=1)
            message = "nothing"
        except Exception as e:
            message = f"{type(e).__name__}: {e}"
        left[build.__name__[1:]] = (message, time.monotonic() - start)
        torch.save(left, file)
        dist.destroy_process_group()


def come_late(rank: int, ranks: int, port: int, file: str, seconds: float) -> None:
    """The last rank pauses before the second step, so long that others lose patience; leaves what each rank logged.

    seconds: that NCCL would wait, and does on GPUs.
    """
    join(rank, ranks, port, seconds=10 * seconds if device().type == "cpu" else seconds)
    pause = 0.85 * seconds
    if device().type == "cpu":
        _compat.nccl_timeout, pause = lambda group: timedelta(seconds=seconds), 2 * seconds
    watch_collectives()
    logged = []
    collective_watchdog._log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: logged.append(record.getMessage())
    model = shard(blocks(CONFIGS["fp8"]), DeviceMesh(device().type, list(range(ranks))))
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    if rank == ranks - 1:
        time.sleep(pause)
    train(model, optimizer, steps=1)
    time.sleep(seconds)
    torch.save(logged, file)
    dist.destroy_process_group()


def fail_later(rank: int, ranks: int, port: int, file: str, seconds: float) -> None:
    """The last rank ends after the first step; leaves what each rank raised."""
    join(rank, ranks, port, seconds=seconds)
    model = shard(blocks(CONFIGS["fp8"]), DeviceMesh(device().type, list(range(ranks))))
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    message = "gave up"
    if rank < ranks - 1:
        try:
            train(model, optimizer, steps=1)
            message = "nothing"
        except RuntimeError as e:
            message = str(e)
    torch.save(message, file)


class Experts(torch.nn.Module):
    """Two experts, of FP8, that share the tokens."""

    def __init__(self):
        super().__init__()
        self.experts = SwiGLUExperts(2, 48, 64)
        quantize_(self, FP8, filter_fn=recommended_layers(self))

    def forward(self, x):
        return self.experts(x, torch.tensor([1, 2], dtype=torch.int32, device=x.device))


def flatten(rank: int, ranks: int, port: int, file: str, cases: list[tuple]) -> None:
    """Wrap converted models by FSDP1 and run them; leaves (what was raised, where) of each case."""
    join(rank, ranks, port)
    left = {}
    for case in cases:
        name, master_weights, use_orig_params, mixed = case
        model = Experts() if name == "experts" else blocks(replace(CONFIGS[name], master_weights=master_weights))
        where = "wrap"
        try:
            policy = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
            wrapped = FullyShardedDataParallel(
                model, use_orig_params=use_orig_params, mixed_precision=policy, device_id=device()
            )
            where = "forward"
            with torch.set_grad_enabled(not mixed):
                wrapped(torch.ones(2, 48, device=device()))
            left[case] = ("nothing", where)
        except Exception as e:
            left[case] = (f"{type(e).__name__}: {e}", where)
    torch.save(left, file)
    dist.destroy_process_group()
