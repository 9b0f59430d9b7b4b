"""The quantised copy of a master weight: one quantisation a change of value, never a stale copy, none left behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, FP8_POW2, NVFP4, Tied, both_formats, cache_calls, every_recipe, master, mlp, replace, weight
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, _compat
from torchao_blockwise.tensors import weight_cache
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


def fresh(parameter):
    """What a copy of the values quantises to."""
    return MasterWeightTensor(parameter.hp.clone(), parameter.config).quantized()


@every_recipe
@pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))
def test_quantised_once_per_step_over_microbatches(config, backend):
    model = mlp(config)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with cache_calls() as calls:
        for step in range(1, 4):
            for _ in range(3):
                run(torch.randn(300, 64)).square().mean().backward()
            assert calls.quantize == 2 * step
            assert calls.transpose == 2 * 3 * step - 3 * step  # The first layer's input needs no gradient.
            optimizer.step()
            optimizer.zero_grad()


def test_cached_columnwise_is_made_once_per_step():
    model = mlp(replace(FP8, columnwise="cached"))
    with cache_calls() as calls:
        for _ in range(3):
            model(torch.randn(5, 64, requires_grad=True)).sum().backward()
    assert (calls.quantize, calls.transpose) == (2, 2)


CHANGES = {
    "add_": lambda w: w.add_(1),
    "optimizer": lambda w: torch.optim.SGD([w], lr=1.0).step(),
    "fused": lambda w: torch.optim.AdamW([w], lr=1.0, fused=True).step(),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "out": lambda w: torch.add(w.hp, 1, out=w),
    "copy_": lambda w: w.copy_(weight(40, 24, seed=3)),
    "copy_master": lambda w: w.copy_(master(40, 24, seed=3)),
    "data": lambda w: w.data.mul_(2),
    "data_of_data": lambda w: w.data.view(-1).data[3:].zero_(),
    "detach": lambda w: w.detach().zero_(),
    "set_data": lambda w: setattr(w, "data", weight(40, 24, seed=3)),
    "hp": lambda w: w.hp.add_(1),
    "hp_view": lambda w: w.hp.view(-1)[5:].fill_(2),
    "slice": lambda w: w[3:].fill_(0),
    "setitem": lambda w: w.__setitem__((slice(None), 2), 7.0),
    "transposed": lambda w: w.t()[0].mul_(3),
    "fill_diagonal_": lambda w: w.fill_diagonal_(9),
    "init": nn.init.normal_,
}


@both_formats
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_value_is_seen(config, change):
    parameter = master(40, 24, config=config)
    parameter.grad = torch.ones(40, 24)
    before, old = parameter.hp.clone(), parameter.quantized()
    assert parameter.quantized() is old
    with torch.no_grad():
        change(parameter)
    assert not torch.equal(parameter.hp, before)
    assert_operands_equal(parameter.quantized(), fresh(parameter))


def test_load_state_dict_is_seen():
    model, other = mlp(FP8), mlp(seed=1)
    model(torch.randn(2, 64))
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        assert_operands_equal(model[0].weight.quantized(), fresh(other_master := model[0].weight))
        assert_bitwise_equal(other_master.hp, other[0].weight.data)


@pytest.mark.parametrize("read", (lambda w: torch.zeros(40, 24).copy_(w), lambda w: w + 1, lambda w: w.detach().norm(),
                                  lambda w: torch._foreach_lerp_([torch.zeros(40, 24)], [w], 0.5)),
                         ids=("copy", "add", "norm", "average"))  # fmt: skip
def test_reading_is_no_change(read):
    parameter = master(40, 24)
    kept = parameter.quantized()
    with torch.no_grad():
        read(parameter)
    assert parameter.quantized() is kept


def test_drop_forgets():
    parameter = master(40, 24)
    kept = parameter.quantized()
    weight_cache.drop(parameter.hp)
    again = parameter.quantized()
    assert again is not kept
    assert_operands_equal(again, kept)


def test_another_recipe_is_another_copy():
    parameter = master(40, 24)
    parameter.quantized()
    pow2 = MasterWeightTensor(parameter.hp, FP8_POW2).quantized()
    assert (pow2.scale.log2() % 1 == 0).all()
    assert MasterWeightTensor(parameter.hp, NVFP4).quantized().fmt is NVFP4.weight_format
    assert_operands_equal(parameter.quantized(), fresh(parameter))


def test_two_aliases_see_each_others_changes():
    parameter = master(40, 24)
    alias, view = parameter.detach(), parameter.data.t()
    for x in (parameter, alias, view):
        x.quantized()
    for changed in (alias, view, parameter):
        with torch.no_grad():
            changed.add_(1)
        for x in (parameter, alias, view):
            assert_operands_equal(x.quantized(), fresh(x))


def test_a_module_used_twice_quantises_once():
    layer = mlp(FP8)[0]
    with cache_calls() as calls:
        F.linear(layer(torch.randn(2, 64)) @ torch.randn(160, 64), layer.weight).sum().backward()
    assert calls.quantize == 1


@pytest.mark.parametrize("columnwise", ("on_demand", "cached"))
def test_a_dying_master_frees_its_copies(columnwise):
    parameter = master(40, 24, config=replace(FP8, columnwise=columnwise))
    F.linear(torch.randn(2, 24, requires_grad=True), parameter).sum().backward()
    gc.collect()
    copies, count = weakref.ref(weight_cache._copies[parameter.hp]), len(weight_cache._copies)
    del parameter
    gc.collect()
    assert copies() is None and len(weight_cache._copies) == count - 1


def test_a_stale_copy_goes_before_the_new_one_comes():
    parameter = master(40, 24)
    kept = weakref.ref(parameter.quantized().qdata)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        real = weight_cache.ops.quantize
        patch.setattr(weight_cache.ops, "quantize", lambda *a, **k: (seen.append(kept()), real(*a, **k))[1])
        with torch.no_grad():
            parameter.add_(1)
        parameter.quantized()
    assert seen == [None]


@both_formats
def test_inference_mode(config):
    model, x = mlp(config), torch.randn(3, 64)
    with cache_calls() as calls, torch.inference_mode():
        outputs = [model(x) for _ in range(3)]
    assert calls.quantize == 2
    expected = model(x)
    assert all(torch.equal(out, expected) for out in outputs)
    expected.sum().backward()
    assert model[0].weight.grad is not None


def test_tensors_made_in_inference_mode_quantise_on_every_use():
    """They count no changes, so no copy can be trusted."""
    with torch.inference_mode():
        made = MasterWeightTensor(weight(40, 24), FP8)
        with cache_calls() as calls:
            first = made.quantized()
            made.mul_(-1)
            second = made.quantized()
    assert calls.quantize == 2 and made.quantized_bytes == 0
    assert_bitwise_equal(second.qdata.float(), -first.qdata.float())


# --- CUDA graphs, whose captures are told apart by numbers ------------------------------------------------------------


@pytest.fixture
def capture(monkeypatch):
    """Say which capture operations go into from now on."""

    def set_capture(number):
        monkeypatch.setattr(_compat, "capture_id", lambda x: number)

    return set_capture


def train_step(model):
    model(torch.randn(5, 64, requires_grad=True)).sum().backward()


@both_formats
def test_a_capture_quantises_once_and_uses_no_copies_of_others(config, capture):
    """Those of before are not made anew by a replay, and those of a capture hold what its last replay made."""
    model = mlp(config)
    train_step(model)
    with cache_calls() as calls:
        for made, number in enumerate((7, 8, 0), 1):
            capture(number)
            for _ in range(2):
                train_step(model)
            assert calls.quantize == 2 * made, number


def test_a_captured_change_is_seen_in_the_capture(capture):
    model = mlp(FP8)
    capture(7)
    with cache_calls() as calls:
        train_step(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        train_step(model)
    assert calls.quantize == 4


def test_a_capture_that_cannot_be_told_from_others_keeps_nothing(capture):
    model = mlp(FP8)
    capture(None)
    with cache_calls() as calls:
        train_step(model)
    # In backward straight to the columnwise copy.
    assert (calls.quantize, calls.transpose) == (4, 0)
    assert [weight_cache.kept_bytes(layer.weight.hp) for layer in (model[0], model[-1])] == [0, 0]


def test_compiled_graphs_keep_nothing_in_a_capture(capture):
    """Of what lives in the pool of its captures, the compiler knows what it made itself."""
    model = mlp(FP8)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    train_step(run)
    capture(7)
    with cache_calls() as calls:
        train_step(run)
    assert calls.quantize == 4


def test_tied_embedding_and_head():
    model = Tied()
    quantize_(model, FP8)
    tokens = torch.tensor([[1, 5, 63], [0, 5, 5]])
    with cache_calls() as calls:
        model(tokens).square().sum().backward()
    assert calls.quantize == 3
    assert_bitwise_equal(model.embed(tokens), F.embedding(tokens, model.lm_head.weight.hp))
    # The gradient is the sum of what both uses give.
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    head = nn.Linear(64, 64, bias=False)
    head.weight = nn.Parameter(plain.embed.weight.detach().clone())
    plain.lm_head = head
    for block in (*plain.blocks, plain.lm_head):
        quantize_(block, FP8)
    plain(tokens).square().sum().backward()
    assert type(model.embed.weight.grad) is torch.Tensor
    assert torch.equal(model.embed.weight.grad, plain.embed.weight.grad + plain.lm_head.weight.grad)
