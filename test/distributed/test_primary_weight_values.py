"""Values kept for the masters of quantized weights, values loaded into these weights, and checkpoints of both."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from fsdp_models import CONFIGS, adamw, both, every_config
from helpers import RECIPES, Tied, both_formats, converted, every_recipe, replace, saved_and_loaded
from primary_weight_checks import assert_holds_masters, assert_masters, net, primary, quantized, train
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, is_linear, load_recipe_state, recipe_state, skip_fqns
from torchao_blockwise.testing import assert_bitwise_equal


@pytest.fixture(autouse=True)
def unexpected_warnings_fail():
    """Above all that masters begin with quantized values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="MasterWeightOptimizer")
        yield


def layer(config, **options):
    torch.manual_seed(0)
    made = nn.Linear(64, 48, **options)
    value = made.weight.detach().clone()
    quantize_(made, replace(config, master_weights=False, backend="reference"))
    return made, value


@every_recipe
def test_values_are_kept_until_an_optimizer_takes_them(config):
    made, value = layer(config)
    kept = weakref.ref(made.weight.pending_master.hp)
    optimizer = adamw(made)
    assert made.weight.pending_master.hp is None
    assert_bitwise_equal(optimizer.master(made.weight), value)
    assert kept() is None or kept().data_ptr() == optimizer.master(made.weight).data_ptr(), "a second copy"
    assert torch.equal(made.weight, quantized(value, made.weight))


@both_formats
def test_values_are_freed_by_the_first_use(config):
    made, _ = layer(config)
    kept = weakref.ref(made.weight.pending_master.hp)
    with torch.no_grad():
        made(torch.ones(2, 64))
    gc.collect()
    assert kept() is None and made.weight.pending_master.hp is None
    before = copy.deepcopy(made.weight)
    with pytest.warns(UserWarning, match="masters of 1 of 1 weights start from the quantized values: weight; create"):
        optimizer = adamw(made)
    assert_bitwise_equal(optimizer.master(made.weight), made.weight.dequantize())
    assert torch.equal(made.weight, before)


def test_nothing_is_kept_of_frozen_weights():
    made = converted(nn.Linear(64, 48).requires_grad_(False), replace(RECIPES["fp8"], master_weights=False))
    assert made.weight.pending_master is None


@both_formats
@pytest.mark.parametrize("treat", (copy.deepcopy, nn.Module.bfloat16), ids=("deepcopy", "cast"))
def test_values_go_with_the_weight(config, treat):
    made, value = layer(config)
    treated = treat(made)
    assert_bitwise_equal(adamw(treated).master(treated.weight), value)


def test_copies_belong_to_no_optimizer():
    made, value = layer(RECIPES["fp8"])
    optimizer = adamw(made)
    other = copy.deepcopy(made)
    made.weight.grad = torch.ones(48, 64)
    optimizer.step()
    assert not other.weight.pending_master.is_owned
    assert torch.equal(other.weight, quantized(value, other.weight)) and not torch.equal(made.weight, other.weight)


def test_pickles_hold_no_values():
    made, _ = layer(RECIPES["fp8"], bias=False)
    assert len(pickle.dumps(made.weight)) < 2 * made.weight.nbytes
    assert pickle.loads(pickle.dumps(made.weight)).pending_master is None
    other = saved_and_loaded(made.weight)
    assert torch.equal(other, made.weight) and other.pending_master is None


def test_a_gone_optimizer_owns_nothing():
    made, value = layer(RECIPES["nvfp4"])
    optimizer = adamw(made)
    assert_bitwise_equal(made.weight.pending_master.master(made.weight), value)
    del optimizer
    gc.collect()
    assert made.weight.pending_master.master(made.weight) is None
    made.load_state_dict({"weight": value, "bias": made.bias.detach()})
    assert_bitwise_equal(adamw(made).master(made.weight), value)


@both_formats
@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
def test_loads_before_the_optimizer(config, assign):
    made, value = layer(config)
    made(torch.ones(1, 64))
    made.load_state_dict({"weight": value * 3, "bias": torch.zeros(48)}, assign=assign)
    assert_bitwise_equal(adamw(made).master(made.weight), value * 3)


@both_formats
@pytest.mark.usefixtures("one_rank")
def test_a_broadcast_frees_the_values(config):
    """On the rank that sends, too, so that the masters of all ranks agree."""
    made, _ = layer(config)
    torch.distributed.broadcast(made.weight.data, 0)
    with pytest.warns(UserWarning, match="start from the quantized values: weight"):
        optimizer = adamw(made)
    assert_bitwise_equal(optimizer.master(made.weight), made.weight.dequantize())
    with pytest.raises(NotImplementedError, match="the optimizer has the master weight of weight, which a broadcast"):
        torch.distributed.broadcast(made.weight.data, 0)


def test_made_on_meta_then_loaded():
    with torch.device("meta"):
        model = net("mixed", master_weights=False, where="meta")
    model.to_empty(device="cpu")
    values = net("mixed", master_weights=True, seed=5).state_dict()
    model.load_state_dict(values)
    optimizer = adamw(model)
    assert_masters(optimizer, values)
    assert_holds_masters(optimizer, model)


@both_formats
def test_values_that_are_copied_in_later(config):
    made, value = layer(config)
    optimizer = adamw(made)
    with torch.no_grad():
        made.weight.copy_(value * 2)
        # Until the optimizer has seen them, a use does not free them.
        made(torch.ones(1, 64))
        assert_bitwise_equal(optimizer.master(made.weight), value * 2)
        other = quantized(value * 5, made.weight)
        made.weight.copy_(other)
        assert_bitwise_equal(
            optimizer.master(made.weight), other.dequantize(), "quantized values are all that is known"
        )
        optimizer.step()
        made.weight.data = value * 3
        optimizer.step()
    assert_bitwise_equal(optimizer.master(made.weight), value * 3)
    assert torch.equal(made.weight, quantized(value * 3, made.weight))


@both
def test_values_are_rounded_to_the_dtype_of_the_weight_first(config):
    """As masters are, so that a load gives the payload that was saved."""
    model, _ = primary(config, dtype=torch.bfloat16)
    values = torch.randn(model.up.weight.shape)
    with torch.no_grad():
        model.up.weight.copy_(values)
    assert torch.equal(model.up.weight, quantized(values.bfloat16(), model.up.weight))
    optimizer = adamw(model)
    assert_bitwise_equal(optimizer.master(model.up.weight), values)
    assert_holds_masters(optimizer, model)


@every_config
@pytest.mark.parametrize("order", ("model_first", "optimizer_first", "optimizer_alone"))
def test_a_run_goes_on_from_a_checkpoint(config, order):
    model, _ = primary(config)
    optimizer = adamw(model)
    train(model, optimizer, 4)
    file = io.BytesIO()
    recipe = recipe_state(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "recipe": recipe}, file)
    expected = train(model, optimizer, 4, first=4)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, _ = primary(config, seed=3)
    resumed = adamw(other)
    if order == "model_first":
        other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    if order == "optimizer_first":
        other.load_state_dict(state["model"])
    if order == "optimizer_alone":
        # The rest, which has no masters.
        rest = {n: v for n, v in state["model"].items() if other.get_parameter(n) not in resumed._weights}
        other.load_state_dict(rest, strict=False)
    load_recipe_state(other, state["recipe"])
    assert_holds_masters(resumed, other)
    assert train(other, resumed, 4, first=4) == expected


def test_quantized_payload_after_its_masters_leaves_them():
    model, _ = primary()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    masters = {n: v.clone() for n, v in optimizer.model_state_dict().items()}
    payload = copy.deepcopy(model.state_dict(keep_vars=True))
    model.load_state_dict(payload)
    assert_masters(optimizer, masters)


def test_the_state_of_a_high_precision_run_goes_on():
    plain = net("mixed", master_weights=True)
    model, _ = primary(seed=2)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    by_hand = torch.optim.AdamW([plain.get_parameter(n) for n in trained], lr=1e-2)
    train(plain, by_hand, 3)
    optimizer = adamw(model, params=[model.get_parameter(n) for n in trained])
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(by_hand.state_dict()))
    expected = train(plain, by_hand, 3, first=3)
    assert train(model, optimizer, 3, first=3) == expected


def test_tied_weights():
    model = converted(Tied(), replace(RECIPES["fp8"], backend="reference"), is_linear() & skip_fqns("blocks.*"))
    quantize_(model, CONFIGS["nvfp4"].__class__(master_weights=False, backend="reference"), skip_fqns("lm_head"))
    assert type(model.embed.weight) is MasterWeightTensor
    optimizer = adamw(model)
    assert optimizer.inner.param_groups[0]["params"][0] is model.embed.weight, "high precision is handed as it is"
    before = model.embed.weight.hp.clone()
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.embed.weight.hp)
