"""Scales of sharded weights: which part a rank holds, when gathers are refused, and errors where ranks disagree."""

import re

import pytest
import torch
import torch.distributed as dist
from every_layer import make
from fsdp_models import CONFIGS, adamw, assert_gathers_exactly, batch, blocks, masters_of, shard, train
from helpers import FP8, NVFP4, assert_same, both_formats, mlp, replace, weight
from ranks import spawn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision
from torchao.quantization import quantize_
from wrong_ranks import go_wrong

from torchao_blockwise import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor
from torchao_blockwise.distributed import sync_weight_scales
from torchao_blockwise.tensors import QuantizedShard
from torchao_blockwise.tensors.fsdp import ShardLayout, attach


def test_a_gather_without_scales_is_refused():
    master = MasterWeightTensor(weight(40, 24), FP8)
    with pytest.raises(RuntimeError, match=r"gathers a weight of Linear\(.*were never cast.* call torchao_blockwise"):
        master.fsdp_pre_all_gather(None, None, None, nn.Linear(24, 40), None)


def test_a_copy_to_another_device_is_gathered_as_its_source():
    master = MasterWeightTensor(weight(40, 24), FP8)
    made, layout = BlockwiseFP8Tensor.from_hp(master.hp), ShardLayout("w", (40, 24), torch.float32, 0, 0, 1, FP8)
    attach(QuantizedShard(made.qdata, made.scale, layout, torch.float32), master)
    copy = master.to("cpu", copy=True)
    (payload,), _ = copy.fsdp_pre_all_gather(None, None, None, None, None)
    assert payload.data_ptr() == made.qdata.data_ptr()
    with torch.no_grad():
        copy.mul_(2)
    for other in (copy, master.to(torch.bfloat16), master.clone()):
        with pytest.raises(RuntimeError, match="sync_weight_scales"):
            other.fsdp_pre_all_gather(None, None, None, None, None)
    with torch.no_grad():
        master.mul_(2)
    with pytest.raises(RuntimeError, match="sync_weight_scales"):
        master.to("cpu", copy=True).fsdp_pre_all_gather(None, None, None, None, None)


def test_a_weight_gathered_in_high_precision_has_the_same_random_bits():
    layer, config = nn.Linear(24, 40), replace(NVFP4, stochastic_rounding=True)
    quantize_(layer, config)
    layer.weight.shard = ShardLayout("w", (40, 24), torch.float32, 0, 0, 1, config)
    sent, state = layer.weight.fsdp_pre_all_gather(None, None, None, None, None)
    whole, _ = layer.weight.fsdp_post_all_gather(sent, state, torch.float32)
    assert torch.equal(whole.hp, layer.weight.hp) and whole.layer == "weight"
    assert whole.rounding_key is layer.weight.rounding_key


def test_a_model_without_shards_has_nothing_to_do():
    sync_weight_scales(mlp(FP8))


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_change_of_dtype_before_the_first_pass(before, after, one_rank):
    """FSDP2 settles on a dtype at the first forward pass; values are rounded to the dtype of now."""
    model = shard(blocks(CONFIGS["fp8"], dtype=before), one_rank)
    sync_weight_scales(model)
    model.to(after)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    assert model(batch(dtype=after)).dtype == after
    assert_gathers_exactly(model, CONFIGS["fp8"])


def test_the_state_is_not_saved_with_the_weight(one_rank, tmp_path):
    model = shard(blocks(CONFIGS["fp8"]), one_rank)
    train(model, adamw(model), steps=1)
    local = masters_of(model)["0.up.weight"]._local_tensor
    torch.save(local, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert type(loaded) is MasterWeightTensor and set(vars(loaded)) == {"hp", "config"}
    assert (tmp_path / "w.pt").stat().st_size < 2 * local.hp.nbytes


@pytest.mark.gpu
def test_offloaded_shards_are_saved_where_they_lie():
    """On the CPU, in the memory of the masters, whatever the device of the mesh."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = shard(blocks(CONFIGS["fp8"]).cuda(), DeviceMesh("cuda", [0]), offload_policy=CPUOffloadPolicy())
        x = batch().cuda()
        before, state = model(x), model.state_dict()
        for name, p in masters_of(model).items():
            assert state[name].to_local().data_ptr() == p.to_local().hp.data_ptr()
            assert state[name].to_local().device.type == "cpu"
        state["0.up.weight"].mul_(2)
        assert not before.equal(model(x))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("config", ("fp8", "nvfp4"))
def test_a_cuda_graph_casts_shards_in_each_replay(config):
    """Forward and backward are captured after one eager pass; losses and weights are those of eager mode."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)

    def trained(capture: bool) -> list[torch.Tensor]:
        model, x = shard(blocks(CONFIGS[config]).cuda(), DeviceMesh("cuda", [0])), batch().cuda()
        optimizer, graph, stream = (
            torch.optim.SGD(model.parameters(), lr=1),
            torch.cuda.CUDAGraph(),
            torch.cuda.Stream(),
        )

        def run() -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad(set_to_none=False)
        if capture:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                loss = run()
        losses = []
        for _ in range(4):
            losses.append(graph.replay() or loss.clone() if capture else run())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [*losses, model(x), *(p.to_local().hp for p in masters_of(model).values())]

    try:
        assert_same(trained(True), trained(False))
    finally:
        dist.destroy_process_group()


@both_formats
def test_a_quantised_weight_as_strided_is_itself_or_refused(config):
    """What FSDP2 asks of a gathered tensor; other strides would cut blocks."""
    x = (BlockwiseFP8Tensor if config is FP8 else NVFP4Tensor).from_hp(weight(40, 24))
    same = torch.as_strided(x, (40, 24), (24, 1), 0)
    assert type(same) is type(x) and torch.equal(same, x)
    assert same.qdata.untyped_storage().data_ptr() == x.qdata.untyped_storage().data_ptr()
    for size, stride, offset in (((20, 24), (24, 1), 0), ((40, 24), (1, 40), 0), ((40, 24), (24, 1), 24)):
        with pytest.raises(NotImplementedError, match="as_strided: size and strides must be the tensor's own"):
            torch.as_strided(x, size, stride, offset)


# (weights, master_weights, use_orig_params, mixed precision)
FLATTENED = [("fp8", True, False, False), ("fp8", False, True, True), ("nvfp4", True, True, True)]
FLATTENED += [("nvfp4", False, False, False), ("experts", True, True, False), ("experts", True, False, True)]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize(("name", "masters", "original", "mixed"), FLATTENED)
def test_fsdp1_is_refused(name, masters, original, mixed, one_rank):
    """It would make plain tensors of the weights, and layers would train in high precision."""
    of_experts = name == "experts"
    model = make(name, FP8) if of_experts else blocks(replace(CONFIGS[name], master_weights=masters))
    policy, wrapped = MixedPrecision(param_dtype=torch.bfloat16) if mixed else None, None
    with pytest.raises((NotImplementedError, ValueError), match="FullyShardedDataParallel") as refused:
        options = {"use_orig_params": original, "mixed_precision": policy, "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, **options)
        with torch.set_grad_enabled(not mixed):
            wrapped(torch.ones(33, 64 if of_experts else 48))
    # With flat parameters only, the layer is the first to see that its weight is another tensor.
    assert (wrapped is not None) == (masters and not original)
    assert "torch.distributed.fsdp.fully_shard" in str(refused.value)
    assert not masters or re.search(r"the weight of ([01]\.up|experts\.)", str(refused.value))


def test_weights_are_flattened_where_no_layer_uses_the_result():
    vector = nn.utils.parameters_to_vector(blocks(FP8).parameters())
    assert type(vector) is torch.Tensor


# --- ranks that disagree ----------------------------------------------------------------------------------------------

TIMEOUT = 6.0
_DIFFER = r"ValueError: sync_weight_scales: ranks differ; rank 0 has {}.*, rank 1 has {}.*; create the same model"
_NO_WORD = rf"RuntimeError: sync_weight_scales: no answer from rank 1 in {TIMEOUT:.0f} s; it failed, or its model"
_ZERO = r"ValueError: MasterWeightOptimizer: ranks differ; rank 0 has {}"
# What three ranks raise, and what rank 1 does if that is something else.
WRONG = {
    "other_config": [_DIFFER.format("0.up.weight", "0.up.weight.*power_of_2_scales=True")],
    "other_shape": [_DIFFER.format(r"0.up.weight \[150, 48\]", r"0.up.weight \[151, 48\]")],
    "fails_early": [_NO_WORD + " has none of these: 0.up.weight", "FloatingPointError"],
    # Not the neighbor that saw the connection close: the one that gives no word.
    "fails_later": [
        "RuntimeError: sync_weight_scales: rank [02] could not reduce the amaxes of 4 weights, 0.up.weight the first, "
        r"with ranks \[0, 1, 2\]; no answer from rank 1 in 6 s: failed before, or busy with another collective",
        "FloatingPointError",
    ],
    "no_weights": [_NO_WORD, "Error"],
    "zero_other_shape": [_ZERO.format(r"up.weight \(fp8_128x128, ")],
    "zero_other_lr": [_ZERO.format("AdamW, shard zero1, .*lr=0.01, rank 1 has AdamW, shard zero1, .*lr=0.02")],
    "zero_other_frozen": [_ZERO.format(r"mid.weight \(fp8_128x128, ")],
    "zero_fails": ["RuntimeError: MasterWeightOptimizer: no answer from rank 1 in 6 s", "FloatingPointError"],
}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return spawn(go_wrong, 3, tmp_path_factory.mktemp("wrong"), TIMEOUT)


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_rank_and_the_weight_in_time(what, left):
    others, *one = WRONG[what]
    for of_rank, pattern in zip(left, (others, *(one or [others]), others)):
        message, seconds = of_rank[what]
        assert re.search(pattern, message, re.DOTALL), message
        assert seconds < 3 * TIMEOUT
