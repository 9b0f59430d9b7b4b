"""A Llama of transformers, fused or not, under FSDP2 or a plan of tensor parallelism: the bits are the same."""

import torch
import torch.distributed as dist
from exported_models import language_model
from fsdp_models import CONFIGS
from helpers import assert_same
from shared_inputs import Counter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import quantize_

from torchao_blockwise import _compat, fuse, fusion_report, skip_lm_head

SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_key_value_heads": 4}


def llama(config: str, order: str):
    model = language_model("Llama", None, **SIZES)
    if order == "before":
        fuse(model)
    quantize_(model, CONFIGS[config], filter_fn=skip_lm_head())
    if order == "after":
        fuse(model)
    return model


def steps(model, count: int = 2) -> tuple[list[torch.Tensor], int]:
    """(losses, gradients and weights after each of some steps, how much was quantized in their forward passes)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    results, quantized = [], 0
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 64, (2, 17), generator=generator)
        with Counter() as counter:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        quantized += counter.quantized
        loss.backward()
        results += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    local = [_compat.local_of(x) for x in (*results, *(p.detach() for p in model.parameters()))]
    return [getattr(x, "hp", x) for x in local], quantized


def shard(model, mesh, inside: bool = False, compiled: bool = False, **options) -> None:
    """FSDP2 over layers, over attention and MLPs in them too, or over layers that are compiled one by one."""
    for layer in model.model.layers:
        if compiled:
            layer.compile(backend="aot_eager")
        for module in (layer.self_attn, layer.mlp) if inside else ():
            fully_shard(module, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


# A plan of tensor parallelism, for attention and for MLPs.
_COLUMNS, _ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
PLAN = dict.fromkeys(_COLUMNS, ColwiseParallel()) | dict.fromkeys(_ROWS, RowwiseParallel())


def split(model, mesh) -> None:
    """A plan of tensor parallelism reaches layers as before; they hold DTensors, and share nothing."""
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            parallelize_module(module, mesh, {n: style for n, style in PLAN.items() if hasattr(module, n)})


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
# Way → (what shards the model, how often an input of attention or MLP is shared in two steps of two layers).
WAYS = {
    "layers": (shard, {}, 2 * 2 * 3),
    "inside": (shard, {"inside": True}, 2 * 2 * 3),
    "mixed": (shard, MIXED, 2 * 2 * 3),
    "inside_mixed": (shard, {"inside": True, **MIXED}, 2 * 2 * 3),
    "compiled": (shard, {"compiled": True}, None),
    "tensor_parallel": (split, {}, 0),
}
# (way, recipe, whether it is fused before or after `quantize_`)
CASES = {
    2: (
        [("inside_mixed", "fp8", "before"), ("compiled", "fp8", "after"), ("tensor_parallel", "nvfp4", "before")],
        [
            ("layers", "fp8", "after"),
            ("inside", "nvfp4", "after"),
            ("mixed", "nvfp4", "before"),
            ("tensor_parallel", "fp8", "after"),
        ],
    )
}


def start(rank: int, ranks: int):
    def run(way: str, config: str, order: str) -> None:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        shard_by, options, shared = WAYS[way]
        results = []
        for kind in (order, ""):
            torch._dynamo.reset()
            model = llama(config, kind)
            shard_by(model, mesh, **options)
            results.append(steps(model))
            if kind and way == "tensor_parallel":
                reasons = {module.reason for module in fusion_report(model).modules}
                assert reasons == {f"the weight of {name} is a shard" for name in ("q_proj", "gate_proj")}
            elif kind and way != "compiled":
                assert {module.status for module in fusion_report(model).modules} == {"sharded"}
        (fused, less), (plain, more) = results
        assert_same(fused, plain)
        assert shared is None or more - less == shared, (more, less)

    return run
