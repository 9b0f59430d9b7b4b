"""unconvert: the plain model again, bit for bit, in the same objects."""

import copy

import pytest
import torch
from expert_modules import Model
from helpers import FP8, Tied, assert_same_tensors, both_formats, both_masters, every_recipe, mlp, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, linears_and_experts, unconvert
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal


def train(model, optimizer, steps: int = 2) -> torch.Tensor:
    for step in range(steps):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model(x).detach()


@every_recipe
def test_a_model_that_was_converted_trains_as_one_that_was_not(config):
    """With the optimizer from before, whose states and groups hold the same objects."""
    plain, model = mlp(), mlp()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, model)]
    quantize_(model, config)
    ids, classes = [id(p) for p in model.parameters()], [type(m) for m in plain.modules()]
    assert unconvert(plain) is plain, "it was not converted"
    model[0].weight.marked = "by the program"
    assert unconvert(model) is model
    assert ids == [id(p) for p in model.parameters()] and [type(m) for m in model.modules()] == classes
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())
    assert vars(model[0].weight) == {"marked": "by the program"} and not hasattr(model[0], "fqn")
    assert not model[0]._state_dict_hooks and not model[0]._load_state_dict_pre_hooks
    assert_bitwise_equal(train(model, optimizers[1]), train(plain, optimizers[0]))
    copy.deepcopy(model).load_state_dict(plain.state_dict(), assign=True)


@both_formats
def test_values_and_gradients_of_training_stay(config):
    model = mlp(config)
    optimizer = torch.optim.AdamW(model.parameters())
    calls = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    train(model, optimizer)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    unconvert(model)
    assert_same_tensors(model.state_dict(), state)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients))
    before = len(calls)
    train(model, optimizer, steps=1)
    assert len(calls) == before + 1 and calls[-1] is model[0].weight


@both_formats
@both_masters
def test_converted_again(config, masters):
    config = replace(config, master_weights=masters)
    model = mlp(config)
    x = torch.randn(4, 64)
    expected = model(x).detach()
    weight = model[0].weight
    quantize_(unconvert(model), config)
    assert model[0].weight is weight and isinstance(weight, MasterWeightTensor) == masters
    assert_bitwise_equal(model(x).detach(), expected)


@both_formats
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_quantized_parameters_become_their_masters(config, dtype):
    model = mlp(replace(config, master_weights=False), dtype=dtype)
    owned, other = model[0].weight, model[2].weight
    optimizer = MasterWeightOptimizer(torch.optim.SGD, model, params=[owned], lr=0.1)
    master, decoded = optimizer.master(owned).clone(), other.dequantize()
    unconvert(model)
    assert model[0].weight is owned and type(owned) is nn.Parameter and owned.dtype == dtype
    assert_bitwise_equal(owned.detach(), master.to(dtype))
    assert torch.allclose(other.detach(), decoded, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_tied_frozen_and_experts_weights():
    tied, experts = Tied(), Model()
    tied.blocks[0].weight.requires_grad_(False)
    values = {name: p.detach().clone() for name, p in experts.named_parameters()}
    for model in (tied, experts):
        quantize_(model, FP8, filter_fn=linears_and_experts())
        assert any(isinstance(p, MasterWeightTensor) for p in model.parameters())
        unconvert(model)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        assert not any(m._state_dict_hooks for m in model.modules())
    assert tied.embed.weight is tied.lm_head.weight
    assert not tied.blocks[0].weight.requires_grad and tied.blocks[1].weight.requires_grad
    assert_same_tensors(dict(experts.named_parameters()), values)


def test_a_held_weight_is_refused_before_any_change():
    model = mlp(FP8)
    out = model(torch.randn(2, 64))
    with pytest.raises(
        ValueError, match=r"(?s)unconvert: 2 of 2 weights .*nothing was changed:\n  0.weight: .*free it"
    ):
        unconvert(model)
    assert isinstance(model[0].weight, MasterWeightTensor)
    del out


def test_weights_that_ranks_share_are_refused(one_rank):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(mlp(FP8), mesh=one_rank)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0.weight: it is sharded; load model.state_dict\(\) into an unconv"):
            unconvert(model)
        model(torch.randn(2, 64))
