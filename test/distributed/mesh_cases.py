"""Checks that run on meshes of ranks, as data: FSDP2, checkpoints, quantized Parameters, experts, TP and pipelines."""

import checkpoint_checks as checkpoints
import expert_checks as experts
import fsdp_checks as checks
import fsdp_life_checks as life
import pipeline_checks as pipeline
import quantized_shard_checks as quantized
import tensor_parallel_checks as tensor_parallel
import tensor_parallel_life_checks as tensor_parallel_life
from fsdp_models import CONFIGS, config_of
from ranks import device, gpus
from torch.distributed.device_mesh import DeviceMesh

EVERY = ("fp8", "fp8_pow2", "nvfp4")
BOTH = ("fp8", "nvfp4")
QUANTIZED = ("fp8_quantized", "nvfp4_quantized")
FULL = "nvfp4_full"
# How values are rounded, and activations and gradients scaled: ranks exchange nothing for these, however many they are.
OF_ELEMENTS = ("fp8_pow2", "fp8_1x128", FULL)
PER_EXPERT, PER_EXPERT_NEAREST = "nvfp4_per_expert", "nvfp4_per_expert_nearest"
# (check, mesh sizes, the config of the default tier, configs)
FSDP_CHECKS = (
    (checks.gathers_exactly_at_any_split, (1, 2, 3, 4), "fp8", BOTH),
    (checks.trains_as_unsharded, (1, 2, 3, 4), "fp8", BOTH),
    (checks.trains_as_unsharded, (3,), "fp8_pow2", OF_ELEMENTS),
    (checks.trains_as_unsharded, ((2, 2),), "fp8", BOTH),
    (checks.gives_ranks_seeds_of_their_own, (2,), FULL, ()),
    (checks.shards_columns, (1, 4), "fp8", EVERY),
    (checks.reshards_to_fewer_ranks, (4,), "fp8", ()),
    (checks.offloads, (2,), "fp8", (*BOTH, FULL)),
    (checks.trains_in_mixed_precision, (1, 2, 3), "fp8_pow2", EVERY),
    (checks.leaves_frozen_weights, (2,), "fp8", BOTH),
    (checks.ties_embeddings, (1, 2), "nvfp4", (*BOTH, FULL)),
    (checks.checkpoints_activations, (2,), FULL, (*BOTH, FULL)),
    (checks.clips_and_steps, (2,), "nvfp4", BOTH),
    (checks.compiles_blocks, (2,), "nvfp4", (*BOTH, FULL)),
    (life.starts_on_meta, (4,), FULL, ("fp8", FULL)),
    (life.refuses_stale_values, (2,), "fp8", ()),
    (life.follows_every_writer, (1, 4), "nvfp4", BOTH),
    (life.writes_as_to_plain_weights, (2,), "fp8", ()),
    (life.follows_changes_between_microbatches, (2,), "fp8", BOTH),
    (life.keeps_the_scales_of_what_is_gathered, (2,), "nvfp4", BOTH),
    (life.casts_to_the_same_scales_in_a_capture, (2,), "fp8", BOTH),
    (life.quantizes_shards_once_in_a_scope, (1, 2), "fp8", BOTH),
    (life.refuses_changes_in_a_scope, (2,), "fp8", ()),
    (life.enters_by_other_ways, (2,), "fp8", BOTH),
    (life.frees_what_it_gathers, (1, 4), "nvfp4", BOTH),
    (life.dies_with_the_model, (2,), "fp8", BOTH),
    (life.synchronises_by_hand, (1, 4), "nvfp4", BOTH),
    (life.gathers_few_bytes, (3, 4), "fp8", BOTH),
    (checks.asks_no_store, (2,), "nvfp4", BOTH),
    (life.replicates_and_groups, (2,), "fp8", ()),
    (life.gathers_by_redistribution, (2,), "fp8", ()),
    (life.checks_forward_passes, (1, 2), "fp8", BOTH),
)
CHECKPOINT_CHECKS = (
    (checkpoints.holds_plain_shards, (1, 4, (2, 2)), "nvfp4", BOTH),
    (checkpoints.reshards, (4,), "nvfp4", BOTH),
    (checkpoints.gives_full_state_dicts, (4,), "fp8", ()),
    (checkpoints.assigns, (4,), FULL, BOTH),
    (checkpoints.saves_two_dims, ((2, 2),), "fp8", ()),
    (checkpoints.saves_shared_weights, (4,), "fp8", ()),
)
QUANTIZED_CHECKS = (
    (checks.gathers_exactly_at_any_split, (1, 3, 4), "fp8_quantized", QUANTIZED),
    (quantized.trains_as_masters, (1, 2, (2, 2)), "nvfp4_quantized", QUANTIZED),
    (quantized.keeps_dtypes_of_gradients, (2,), "fp8", BOTH),
    (quantized.leaves_frozen_weights, (2,), "nvfp4_quantized", QUANTIZED),
    (quantized.follows_loads, (2, 3), "fp8_quantized", QUANTIZED),
    (life.refuses_stale_values, (2,), "nvfp4_quantized", QUANTIZED),
    (quantized.refuses, (2,), "fp8_quantized", QUANTIZED),
    (quantized.refuses_parts_of_tensor_parallelism, ((2, 2),), "nvfp4_quantized", QUANTIZED),
    (quantized.gives_full_state_dicts, (2,), "nvfp4_quantized", QUANTIZED),
    (checks.compiles_blocks, (2,), "fp8_quantized", QUANTIZED),
    (checks.reshards_to_fewer_ranks, (4,), "nvfp4_quantized", QUANTIZED),
    (life.starts_on_meta, (4,), "fp8_quantized", QUANTIZED),
    (life.infers_first, (2,), "fp8_quantized", QUANTIZED),
    (life.frees_what_it_gathers, (2,), "nvfp4_quantized", QUANTIZED),
    (life.gathers_few_bytes, (3, 4), "fp8_quantized", QUANTIZED),
    (checkpoints.reshards, (4,), "fp8_quantized", QUANTIZED),
)
EXPERT_CHECKS = (
    (experts.computes_as_one_device, (1, 2, 3, 4), "nvfp4", (*BOTH, PER_EXPERT)),
    (experts.computes_as_one_device, (3,), FULL, ("fp8_1x128", FULL)),
    (experts.exchanges_no_amaxes, (2,), PER_EXPERT, ()),
    (experts.compiles, (2,), "nvfp4", (*BOTH, FULL, PER_EXPERT)),
    (experts.keeps_copies_in_a_scope, (2,), PER_EXPERT, (*BOTH, PER_EXPERT)),
    (experts.trains_sharded_experts, (2, 3, 4), PER_EXPERT_NEAREST, (*BOTH, FULL, PER_EXPERT_NEAREST)),
    (experts.spreads_and_shards, ((2, 2),), "nvfp4", (*BOTH, PER_EXPERT_NEAREST)),
    (experts.refuses_parts_of_experts, ((2, 2),), PER_EXPERT, ()),
    (experts.multiplies_local_experts, (2,), "fp8", (PER_EXPERT_NEAREST, "fp8_quantized")),
    (experts.refuses_splits_inside_experts, (2,), "fp8", BOTH),
    (experts.refuses_other_modules, (2,), "fp8", ()),
)
TENSOR_PARALLEL_CHECKS = (
    (tensor_parallel.colwise, (2, 4), FULL, tuple(CONFIGS)),
    (tensor_parallel.rowwise, (2, 4), PER_EXPERT, tuple(CONFIGS)),
    (tensor_parallel.sequence_parallel, (2, 4), "nvfp4", (*BOTH, "fp8_1x128", FULL)),
    (tensor_parallel.splits_tokens_alone, (2, 4), FULL, (*BOTH, "fp8_1x128", FULL)),
    (tensor_parallel.redistributes_what_lies_otherwise, (2,), "fp8", BOTH),
    (tensor_parallel.runs_a_swiglu_mlp, (2,), "fp8", BOTH),
    (tensor_parallel.takes_any_tokens, (1, 2), "nvfp4", BOTH),
    (tensor_parallel.leaves_frozen_parts, (2,), "fp8", BOTH),
    (tensor_parallel_life.trains, (2, 4), "nvfp4", BOTH),
    (tensor_parallel_life.trains, (2,), FULL, ()),
    (tensor_parallel_life.keeps_copies_in_a_scope, (2,), "nvfp4", BOTH),
    (tensor_parallel_life.trains_in_mixed_precision, (2,), "fp8", BOTH),
    (tensor_parallel_life.saves_other_activations, (2,), "nvfp4", (*BOTH, FULL)),
    (tensor_parallel_life.catches_changes_before_backward, (2,), "fp8", BOTH),
    (tensor_parallel_life.sees_changes_inside_a_graph, (2,), "nvfp4", BOTH),
    (tensor_parallel.holds_quantised_weights, (2, 4), "fp8", BOTH),
    (tensor_parallel.sends_quantised_weights_without_handles, (2,), "nvfp4", BOTH),
    (tensor_parallel_life.starts_on_meta, (2,), "fp8", BOTH),
    (tensor_parallel_life.refuses_cut_blocks, (2, 4), "nvfp4", BOTH),
    (tensor_parallel_life.refuses_what_it_cannot_place, (2,), "fp8", BOTH),
    (tensor_parallel_life.compiles, (2,), "fp8", (*BOTH, FULL)),
    (tensor_parallel_life.compiles, (2,), "fp8_quantized", QUANTIZED),
    (tensor_parallel_life.checks_forward_passes, (2,), "nvfp4", BOTH),
    (tensor_parallel_life.shards_in_two_dims, ((2, 2),), PER_EXPERT_NEAREST, tuple(CONFIGS)),
)
PIPELINE_CHECKS = ((pipeline.trains_as_one_device, (2,), "fp8", (*BOTH, *QUANTIZED)),)
ALL = FSDP_CHECKS + CHECKPOINT_CHECKS + QUANTIZED_CHECKS + EXPERT_CHECKS + TENSOR_PARALLEL_CHECKS + PIPELINE_CHECKS
BY_NAME = {f"{check.__module__}.{check.__name__}": check for check, *_ in ALL}
# What resharding to a part of the ranks means shows on four of them.
FOUR_ALONE = (checks.reshards_to_fewer_ranks,)
# A step on the CPU rounds otherwise than one on a GPU, so that training there has nothing to be compared with.
CPU_ALONE = (checks.offloads,)


def _cases() -> tuple[list, list]:
    """(name of a check, mesh size, name of a config): one of each check in the default tier, and the rest."""
    default, slow = [], []
    for check, sizes, config_by_default, configs in ALL:
        first, *others = sorted(_sizes_here(check, sizes), key=lambda size: -ranks_of(None, size))
        for size in (first, *others):
            for config in dict.fromkeys((config_by_default, *configs)):
                tier = default if (size, config) == (first, config_by_default) else slow
                tier.append((f"{check.__module__}.{check.__name__}", size, config))
    return default, slow


def _sizes_here(check, sizes) -> tuple:
    """`sizes`, and as many ranks as there are GPUs, where those are too few for all of them."""
    scales = check not in FOUR_ALONE + CPU_ALONE and any(isinstance(size, int) for size in sizes)
    fits = any(1 < ranks_of(None, size) <= gpus() for size in sizes)
    return (*sizes, gpus()) if scales and not fits and gpus() > 1 else sizes


def ranks_of(name, size: int | tuple[int, int], config=None) -> int:
    return size if isinstance(size, int) else size[0] * size[1]


def on_gpus(name, size, config) -> bool:
    return BY_NAME[name] not in CPU_ALONE


CASES = {4: _cases()}


def start(rank: int, ranks: int):
    kind = device().type
    meshes = {size: DeviceMesh(kind, list(range(size))) for size in range(1, ranks + 1)}
    if ranks == 4:
        meshes[2, 2] = DeviceMesh(kind, [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
    return lambda name, size, config: BY_NAME[name](meshes[size], config_of(config))
