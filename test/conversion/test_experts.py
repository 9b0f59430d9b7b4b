"""Experts: which modules and Parameters are converted, by filter and by name, and what is refused."""

from __future__ import annotations

import weakref

import pytest
import torch
from expert_modules import ENDS, EXPERTS, LINEARS, Experts, Model, X, accepted, kinds, named
from helpers import FP8, NVFP4, every_recipe, replace
from torch import nn
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import (
    BlockwiseFP8Tensor,
    MasterWeightTensor,
    NVFP4Tensor,
    conversion_report,
    dry_run,
    experts,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    min_features,
    skip_fqns,
    skip_lm_head,
    skip_routers,
)
from torchao_blockwise.conversion import convert_module, why_not_convertible
from torchao_blockwise.conversion.filters import skip_reason

pytestmark = pytest.mark.usefixtures("no_interpreter")


# --- filters ----------------------------------------------------------------------------------------------------------


def test_experts_are_what_holds_stacks_of_matrices():
    assert accepted(experts()) == EXPERTS and accepted(is_linear()) == LINEARS
    assert not experts()(nn.Conv1d(4, 4, 3), "conv") and not experts()(nn.Embedding(4, 4), "embed")
    assert not experts()(nn.LazyLinear(4), "lazy") and not experts()(nn.LazyConv1d(4, 3), "lazy")
    quantised = Experts()
    quantize_(quantised, FP8, experts())
    assert experts()(quantised, "")


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda m: is_linear() | experts(), [*LINEARS, *EXPERTS]),
        (lambda m: linears_and_experts(), [*EXPERTS, "layers.0.attention", "layers.1.attention", "lm_head"]),
        (lambda m: linears_and_experts() & skip_lm_head(), [*EXPERTS, "layers.0.attention", "layers.1.attention"]),
        (lambda m: experts() & skip_fqns("layers.0.*"), EXPERTS[1:]),
        (lambda m: skip_fqns("layers.0.*") & experts(), EXPERTS[1:]),
        (lambda m: skip_fqns("layers.0.*"), LINEARS[2:]),
        (lambda m: (experts() & keep_last_blocks(m, 1)) | (is_linear() & skip_routers()),
         [EXPERTS[0], "layers.0.attention", "layers.1.attention", "lm_head"]),
        (lambda m: experts() | skip_routers(), [*EXPERTS, "layers.0.attention", "layers.1.attention", "lm_head"]),
        (lambda m: experts() & is_linear(), []),
        (lambda m: experts() & min_features(65), []),
        (lambda m: experts() & min_features(64), EXPERTS),
        (lambda m: experts() | (lambda module, fqn: fqn == "lm_head"), [*EXPERTS, "lm_head"]),
        (lambda m: (lambda module, fqn: fqn == "lm_head") | experts(), [*EXPERTS, "lm_head"]),
        (lambda m: experts() & (lambda module, fqn: "1" in fqn), EXPERTS[1:]),
    ],
    ids=("or", "both", "no_head", "and_skip", "skip_and", "skip_alone", "each_its_own", "or_skip", "nothing_is_both",
         "too_small", "large_enough", "or_function", "function_or", "and_function"),
)  # fmt: skip
def test_filters_combine(make, left):
    model = Model()
    assert sorted(accepted(make(model), model)) == sorted(left)


@pytest.mark.parametrize(
    ("fqn", "shape", "is_router"),
    [
        ("layers.0.router", (64, 8), True),
        ("layers.0.mlp.gate", (64, 8), True),
        ("moe.router.gate", (64, 8), True),
        ("router.proj", (64, 8), True),
        ("mlp.shared_expert_gate", (64, 1), True),
        ("mlp.gate", (64, 128), False),
        ("mlp.gate_proj", (64, 8), False),
        ("router.attention.out", (64, 8), False),
        ("lm_head", (64, 8), False),
    ],
)
def test_skip_routers(fqn, shape, is_router):
    assert skip_routers()(nn.Linear(*shape), fqn) is not is_router


def test_composed_filters_print_and_remember():
    model = Model()
    f = linears_and_experts() & min_features(65) & skip_fqns("a")
    assert repr(f) == "Filter((is_linear() | experts()) & skip_routers() & min_features(65) & skip_fqns('a',))"
    accepted(f, model)
    assert skip_reason(model.layers[0].experts) == "min_features: 64 < 65"
    assert skip_reason(model.layers[0].router) == "skip_routers: chooses experts"
    accepted(experts(), model)
    assert skip_reason(model.layers[0].experts) is None


# --- conversion -------------------------------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_experts_are_converted_and_nothing_else(config, master_weights):
    config, model = replace(config, master_weights=master_weights), Model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    quantize_(model, config, experts())
    quantised = BlockwiseFP8Tensor if config.quantized_activations == "fp8" else NVFP4Tensor
    assert kinds(model) == named("up", "down", kind=MasterWeightTensor if master_weights else quantised)
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    for name, p in model.named_parameters():
        if name in kinds(model):
            assert p.config == config and p.shape == values[name].shape and p.requires_grad
        hp = p.hp if isinstance(p, MasterWeightTensor) else p.dequantize() if name in kinds(model) else p
        assert torch.equal(hp, values[name]) or not master_weights
    model(X, ENDS).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts.up" in n or "experts.down" in n)


def test_the_default_filter_leaves_experts():
    model = Model()
    quantize_(model, FP8)
    assert not [n for n in kinds(model) if "experts" in n] and len(kinds(model)) == len(LINEARS)


def test_both_in_one_call():
    model = Model()
    quantize_(model, FP8, linears_and_experts() & skip_lm_head())
    attention = {f"layers.{i}.attention.weight": MasterWeightTensor for i in range(2)}
    assert kinds(model) == named("up", "down") | attention


def test_by_the_name_of_a_parameter():
    model = Model()
    by_name = {"layers.0.experts.up": FP8, r"re:layers\.1\.experts\.(up|down)": NVFP4, "lm_head.weight": FP8}
    quantize_(model, FqnToConfig(by_name), filter_fn=None)
    configs = {n: p.config for n, p in model.named_parameters() if n in kinds(model)}
    assert configs == {"layers.0.experts.up": FP8, "layers.1.experts.up": NVFP4, "layers.1.experts.down": NVFP4,
                       "lm_head.weight": FP8}  # fmt: skip
    assert all(type(v) is torch.Tensor for v in model.state_dict().values())
    model = Model()
    quantize_(model, FqnToConfig({"layers.0.experts": FP8}), filter_fn=None)
    assert kinds(model) == named("up", "down", blocks=1)
    assert convert_module(model.layers[1].experts, NVFP4, parameter_name="down") is model.layers[1].experts
    assert kinds(model.layers[1]) == {"experts.down": MasterWeightTensor}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.experts.bias", r"bias: a Parameter of shape \[4, 64\] is not a weight \[E, N, K\]; leave it out"),
        ("lm_head.bias", r"a Parameter of shape \[16\] is not a weight \[N, K\]; leave it out"),
    ],
)
def test_names_of_no_weights_are_refused(name, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        quantize_(model, FqnToConfig({name: FP8}), filter_fn=None)
    assert kinds(model) == {}


def test_identity_gradients_hooks_and_optimizers_stay():
    model, fired = Model(), []
    up = model.layers[0].experts.up
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    up.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    up.tag = "mine"
    for config in (FP8, NVFP4):
        quantize_(model, config, experts())
        assert model.layers[0].experts.up is up and up.tag == "mine" and up.config == config
    before = up.hp.clone()
    model(X, ENDS).sum().backward()
    optimizer.step()
    assert fired == [up] and not torch.equal(up.hp, before)


def test_shared_experts_stay_shared():
    model = Model()
    model.layers[1].experts.up = model.layers[0].experts.up
    quantize_(model, FP8, experts())
    assert model.layers[1].experts.up is model.layers[0].experts.up
    assert conversion_report(model).totals["bytes_before"] == 4 * (3 * 4 * 96 * 64) + sum(
        m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear)
    )


# --- refusals ---------------------------------------------------------------------------------------------------------


def _with(change):
    model = Model()
    change(model.layers[1].experts)
    return model


def _hold_weakly(module):
    module.held = weakref.ref(module.down)


def _hold_view(module):
    module.held = module.down.mT


def _double(module):
    module.down = nn.Parameter(module.down.data.double())


def _subclass(module):
    module.down = type("OwnParameter", (nn.Parameter,), {})(module.down.data)


FAILURES = {
    "double": (_double, FP8, r"down: its weight is torch.float64; cast it to bfloat16"),
    "weak_reference": (_hold_weakly, FP8, r"down: something holds a weak reference to its weight"),
    "view": (_hold_view, FP8, r"down: a view of its weight or the graph of a forward pass is alive"),
    "own_parameter": (_subclass, FP8, r"down: its weight is a OwnParameter; convert first"),
    "quantised": (lambda m: quantize_(m, replace(FP8, master_weights=False), experts()), FP8,
                  "up: its weight is a BlockwiseFP8Tensor already; convert it once"),
    "cublas": (lambda m: None, replace(FP8, backend="cublas"), r"up: cuBLAS has no products of experts; take"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "config", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_failing_conversion_names_the_parameter_and_changes_nothing(change, config, reason):
    model = _with(change)
    before = kinds(model), {n: id(p) for n, p in model.named_parameters()}
    count = 2 if config.backend.value == "cublas" else 1
    with pytest.raises(ValueError, match=f"(?s){count} of 2 layers cannot .*\n  layers.1.experts: {reason}"):
        quantize_(model, config, experts())
    assert before == (kinds(model), {n: id(p) for n, p in model.named_parameters()})
    report = dry_run(model, config, experts())
    failing = [r.fqn for r in report.layers if r.status == "cannot convert"]
    assert failing == [f"layers.{i}.experts.{name}" for i in range(2 - count, 2) for name in ("up", "down")]


def test_a_module_without_experts_is_refused():
    module = nn.Module()
    module.bias = nn.Parameter(torch.zeros(4, 8))
    reason = why_not_convertible(module, FP8)
    assert reason == "a Module is not an nn.Linear and holds no experts [E, N, K]; narrow filter_fn"


def test_quantised_experts_are_not_shared_with_other_modules():
    model = Model()
    model.conv.weight = model.layers[0].experts.up
    with pytest.raises(ValueError, match="shared with another module, Conv1d, which cannot use a quantized tensor"):
        quantize_(model, replace(FP8, master_weights=False), experts())
