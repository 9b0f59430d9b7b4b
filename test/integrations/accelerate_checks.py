"""Models that accelerate shards with FSDP2: every weight trains, as by `fully_shard` called by hand."""

import contextlib
import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from exported_models import language_model
from helpers import FP8, NVFP4, assert_same_tensors, converted, replace
from ranks import set_environment, values_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trainer_checks import wrapped_by

from torchao_blockwise import MasterWeightTensor, linears_and_experts, skip_lm_head
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import QuantizedShard, QuantizedTensor

CONFIGS = {
    "fp8": FP8,
    "nvfp4": NVFP4,
    "fp8_quantized": replace(FP8, master_weights=False),
    "nvfp4_quantized": replace(NVFP4, master_weights=False),
}


def model_of(kind: str, config):
    """Llama, the same with the head tied to the embedding, or Mixtral."""
    model = language_model("Mixtral" if kind == "moe" else "Llama", None, tie_word_embeddings=kind == "tied")
    if kind == "moe":
        model.set_experts_implementation("grouped_mm")
    chosen = linears_and_experts()
    return converted(model, config, chosen if kind == "tied" else chosen & skip_lm_head())


def accelerator(loads_on_one: bool, precision: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=loads_on_one
    )
    made = Accelerator(fsdp_plugin=plugin, mixed_precision=precision)
    assert made.is_fsdp2 and made.device.type == "cpu"
    return made


def sharded_by_hand(model, precision: str):
    """As accelerate shards: each block, the embedding, the norm with the head, and the rest."""
    dtype = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    inner, tied = model.model, model.lm_head.weight is model.model.embed_tokens.weight
    for block in inner.layers:
        fully_shard(block, mp_policy=policy)
    if not tied:
        fully_shard(inner.embed_tokens, mp_policy=policy)
    tail = [inner.norm, inner.embed_tokens, model.lm_head] if tied else [inner.norm, model.lm_head]
    fully_shard(tail, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, optimizer, rank: int, backward) -> list[dict]:
    """The values before the first step, after it, and after the second."""
    states = [values_of(model)]
    for step in range(2):
        ids = batch(rank, step)
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        states.append(values_of(model))
    return states


def trains(rank: int, kind: str, config: str, precision: str, loads_on_one: bool) -> None:
    """Every weight trains, bit for bit as in the model that is sharded by hand; quantized Parameters by masters."""
    is_quantized, precise = config.endswith("_quantized"), torch.autocast("cpu", torch.bfloat16, precision == "bf16")
    made = accelerator(loads_on_one, precision)
    model, other = model_of(kind, CONFIGS[config]), model_of(kind, CONFIGS[config])
    if is_quantized and loads_on_one:
        # What the first rank's state dict has.
        other.load_state_dict(other.state_dict())
        if rank:
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    count = sum(isinstance(p, (MasterWeightTensor, QuantizedTensor)) for p in model.parameters())
    # accelerate takes no model without an optimizer.
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0 if is_quantized else 1e-2))
    kinds = QuantizedShard if is_quantized else MasterWeightTensor
    assert sum(isinstance(p._local_tensor, kinds) for p in model.parameters()) == count > 0
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(map(id, model.parameters()))
    other, runs = sharded_by_hand(other, precision), []
    for m, backward, context in (
        (model, made.backward, contextlib.nullcontext()),
        (other, lambda loss: loss.backward(), precise),
    ):
        if is_quantized:
            optimizer = MasterWeightOptimizer(torch.optim.AdamW, m, lr=1e-2)
        elif m is other:
            optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        with context:
            runs.append(train(m, optimizer, rank, backward))
    for got, expected in zip(*runs, strict=True):
        assert_same_tensors(got, expected)
    for old, new in itertools.pairwise(runs[0]):
        still = [name for name in old if torch.equal(old[name], new[name])]
        assert not still, f"did not change: {still}"


# (model, recipe, precision, whether only one rank loads)
CASES = {
    2: (
        [
            ("llama", "fp8", "bf16", True),
            ("moe", "fp8", "no", True),
            ("tied", "fp8", "bf16", False),
            ("moe", "nvfp4_quantized", "no", True),
        ],
        [
            *(("llama", "fp8", *rest) for rest in (("bf16", False), ("no", True), ("no", False))),
            ("tied", "fp8", "no", True),
            ("moe", "fp8", "bf16", False),
            ("llama", "nvfp4", "no", True),
            *(("llama", "fp8_quantized", *rest) for rest in (("bf16", True), ("no", False))),
        ],
    )
}


def start(rank: int, ranks: int):
    set_environment(rank, ranks)

    def run(*case):
        with wrapped_by("fsdp"):
            trains(rank, *case)

    return run
