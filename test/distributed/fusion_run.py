"""A Llama of transformers, fused or not, under FSDP2 or a plan of tensor parallelism: the bits are the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fsdp_models import CONFIGS
from helpers import assert_same
from shared_inputs import Counter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import quantize_

from torchao_blockwise import _compat, fuse, fusion_report, skip_lm_head

SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip


def llama(config: str, order: str):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    if order == "before":
        fuse(model)
    quantize_(model, CONFIGS[config], filter_fn=skip_lm_head())
    if order == "after":
        fuse(model)
    return model


def steps(model, run=None, count: int = 2) -> tuple[list[torch.Tensor], int]:
    """(losses, gradients and weights after each of some steps, how much was quantized in their forward passes)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    results, quantized = [], 0
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 64, (2, 17), generator=generator)
        with Counter() as counter:
            loss = (model if run is None else run)(input_ids=ids, labels=ids, use_cache=False).loss
        quantized += counter.quantized
        loss.backward()
        results += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach() for p in model.parameters())], quantized


def compare(*runs) -> None:
    local = [[_compat.local_of(x) for x in run] for run in runs]
    assert_same(*([getattr(x, "hp", x) for x in run] for run in local))


def shards(rank: int, config: str, order: str, inside: bool, mixed: bool) -> None:
    """FSDP2 over layers, or over attention and MLPs in them too; the bits of a model that is not fused."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    options = {"mesh": mesh} | ({"mp_policy": policy} if mixed else {})
    results = []
    for kind in (order, ""):
        model = llama(config, kind)
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.mlp) if inside else ():
                fully_shard(module, **options)
            fully_shard(layer, **options)
        fully_shard(model, **options)
        results.append(steps(model))
        if kind:
            assert {module.status for module in fusion_report(model).modules} == {"sharded"}
    (fused, less), (plain, more) = results
    compare(fused, plain)
    # In two steps of two layers three inputs of attention and MLP.
    assert more - less == 2 * 2 * 3, (more, less)


def compiles(rank: int, config: str) -> None:
    """Layers that are compiled one by one below FSDP2."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = []
    for kind in ("after", ""):
        model = llama(config, kind)
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        results.append(steps(model)[0])
    compare(*results)


# A plan of tensor parallelism, for attention and for MLPs.
_COLUMNS, _ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
PLAN = dict.fromkeys(_COLUMNS, ColwiseParallel()) | dict.fromkeys(_ROWS, RowwiseParallel())


def splits(rank: int, config: str, order: str) -> None:
    """A plan of tensor parallelism reaches layers as before; they hold DTensors, and share nothing."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = []
    for kind in (order, ""):
        model = llama(config, kind)
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.mlp):
                parallelize_module(module, mesh, {n: style for n, style in PLAN.items() if hasattr(module, n)})
        results.append(steps(model))
        if kind:
            reasons = {module.reason for module in fusion_report(model).modules}
            assert reasons == {f"the weight of {name} is a shard" for name in ("q_proj", "gate_proj")}
    (fused, one), (plain, other) = results
    compare(fused, plain)
    assert one == other


RUNS = {"shards": shards, "compiles": compiles, "splits": splits}
NEEDS = ("transformers",)
# (what is run, recipe, and whether it is fused before or after `quantize_`, modules inside layers too, mixed precision)
CASES = {
    2: (
        [("shards", "fp8", "before", True, True), ("compiles", "fp8"), ("splits", "nvfp4", "before")],
        [
            ("shards", "fp8", "after", False, False),
            ("shards", "nvfp4", "after", True, False),
            ("shards", "nvfp4", "before", False, True),
            ("splits", "fp8", "after"),
        ],
    )
}


def start(rank: int, ranks: int):
    return lambda name, *arguments: RUNS[name](rank, *arguments)
