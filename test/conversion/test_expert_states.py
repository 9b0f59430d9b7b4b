"""Experts that were converted: state dicts, copies, casts, reports, and an optimizer with their masters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from expert_modules import ENDS, Experts, Model, X, kinds, named
from helpers import FP8, NVFP4, both_formats, every_recipe, replace, saved_and_loaded
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    conversion_report,
    dry_run,
    experts,
    is_linear,
    linears_and_experts,
    skip_lm_head,
)
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")


@both_formats
@pytest.mark.parametrize("assign", (False, True), ids=("copy", "assign"))
@pytest.mark.parametrize("direction", ("to_plain", "to_converted"))
def test_state_dicts_are_plain_and_move_both_ways(config, assign, direction):
    converted, plain = Model(), Model()
    quantize_(converted, config, linears_and_experts())
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.5)
    target, source = (plain, converted) if direction == "to_plain" else (converted, plain)
    saved = saved_and_loaded(source.state_dict())
    assert list(saved) == list(plain.state_dict()) and {type(v) for v in saved.values()} == {torch.Tensor}
    target.load_state_dict(saved, assign=assign)
    for name, p in target.state_dict().items():
        assert_bitwise_equal(p, saved[name], name)
    assert (kinds(converted) != {}) and kinds(plain) == {}
    expected = copy.deepcopy(plain)
    quantize_(expected, config, linears_and_experts())
    if direction == "to_converted":
        assert_bitwise_equal(converted(X, ENDS).detach(), expected(X, ENDS).detach())


@both_formats
@pytest.mark.parametrize("copied", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))), ids=("deepcopy", "pickle"))
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_copies_of_converted_models(config, copied, master_weights):
    model = Model()
    quantize_(model, replace(config, master_weights=master_weights), linears_and_experts())
    other = copied(model)
    assert kinds(other) == kinds(model)
    assert_bitwise_equal(other(X, ENDS).detach(), model(X, ENDS).detach())


def test_a_model_that_is_cast_after_its_conversion():
    model = Model()
    expected = copy.deepcopy(model).bfloat16()
    for m in (model, expected):
        quantize_(m, FP8, experts())
    model.bfloat16()
    assert model.layers[0].experts.up.hp.dtype == torch.bfloat16
    assert_bitwise_equal(model(X.bfloat16(), ENDS).detach(), expected(X.bfloat16(), ENDS).detach())


def test_the_report():
    model = Model(blocks=1)
    quantize_(model, NVFP4, linears_and_experts() & skip_lm_head())
    assert_expected_inline(
        str(conversion_report(model)),
        """\
layer                  status     why / format                     shape    dtype       before      after  quantized
---------------------  ---------  -------------------------------  -------  -------  ---------  ---------  ---------
layers.0.attention     converted  nvfp4_16x16                      64×64    float32   16.0 KiB   16.0 KiB          -
layers.0.router        skipped    skip_routers: chooses experts    4×64     float32    1.0 KiB    1.0 KiB          -
layers.0.experts.up    converted  nvfp4_16x16                      4×96×64  float32   96.0 KiB   96.0 KiB          -
layers.0.experts.down  converted  nvfp4_16x16                      4×64×96  float32   96.0 KiB   96.0 KiB          -
lm_head                skipped    skip_lm_head: output projection  16×64    float32    4.0 KiB    4.0 KiB          -
---------------------  ---------  -------------------------------  -------  -------  ---------  ---------  ---------
total                  3 of 5     converted                                          213.0 KiB  213.0 KiB        0 B""",
    )


@every_recipe
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
@pytest.mark.parametrize("make", (experts, linears_and_experts, is_linear), ids=("experts", "both", "linears"))
def test_a_dry_run_predicts_the_report_and_bytes(config, master_weights, make):
    model, config = Model(), replace(config, master_weights=master_weights)
    predicted = dry_run(model, config, make())
    assert kinds(model) == {}
    quantize_(model, config, make())
    real = conversion_report(model)
    assert real.layers == predicted.layers and real.totals == predicted.totals
    model(X.clone().requires_grad_(), ENDS).sum().backward()
    weights = dict(model.named_parameters())
    rows = {r.fqn: r for r in real.layers if "experts" in r.fqn}
    assert list(rows) == list(named("up", "down")) and all(r.shape == tuple(weights[n].shape) for n, r in rows.items())
    for name, row in rows.items():
        kept = getattr(weights[name], "quantized_bytes", weights[name].nbytes if name in kinds(model) else 0)
        assert row.quantized_bytes == kept


def test_a_module_of_experts_that_is_the_model_itself():
    module = Experts()
    quantize_(module, FP8, experts())
    assert kinds(module) == {"up": MasterWeightTensor, "down": MasterWeightTensor}
    assert [r.fqn for r in conversion_report(module).layers] == ["up", "down"]


@both_formats
def test_an_optimizer_with_the_masters_of_experts_trains_as_master_weights_do(config):
    from torchao_blockwise.distributed import MasterWeightOptimizer

    torch.manual_seed(0)
    masters = Model()
    quantised = copy.deepcopy(masters)
    quantize_(masters, config, linears_and_experts())
    quantize_(quantised, replace(config, master_weights=False), linears_and_experts())
    optimizers = (
        torch.optim.AdamW(masters.parameters(), lr=1e-2),
        MasterWeightOptimizer(torch.optim.AdamW, quantised, lr=1e-2),
    )
    before = quantised.layers[0].experts.up.qdata.clone()
    for step in range(3):
        losses = []
        for model, optimizer in zip((masters, quantised), optimizers):
            loss = model(X, (ENDS + step).clamp(max=9)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    up = quantised.layers[0].experts.up
    assert type(up) is (BlockwiseFP8Tensor if config is FP8 else NVFP4Tensor) and not torch.equal(up.qdata, before)
    assert_bitwise_equal(up.qdata, masters.layers[0].experts.up.quantized().qdata)
    saved = optimizers[1].model_state_dict()["layers.0.experts.up"]
    assert_bitwise_equal(saved, masters.state_dict()["layers.0.experts.up"])
