"""Updates of weights: by operations of other libraries, by a rule; of quantized ones by adapters."""

import pickle

import pytest
import torch
from helpers import FP8, NVFP4, both_formats, converted, every_kind, master, mlp, replace, weight
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

N, K = 96, 64


def gradients(model, seed: int) -> None:
    for index, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + index))


# --- the rule ---------------------------------------------------------------------------------------------------------

OPERATIONS = {
    "update": "(Tensor(a!) w, Tensor g, Tensor(b!)? state=None, Tensor? scales=None) -> ()",
    "update_named": "(str name, Tensor(a!) g, Tensor(b!) w) -> ()",
    "returns": "(Tensor(a!) w, Tensor g) -> Tensor",
    "reads": "(Tensor w, Tensor(a!) out) -> ()",
    "updates_two": "(Tensor(a!) w, Tensor(b!) g) -> ()",
    "updates_many": "(Tensor(a!)[] w, Tensor[] g) -> ()",
}


@pytest.fixture(scope="module")
def others():
    with torch.library._scoped_library("rule_of_updates", "FRAGMENT") as library:
        for name, schema in OPERATIONS.items():
            library.define(f"{name}{schema}")

        def update(w, g, state=None, scales=None):
            w.sub_(g[-1] if g.dim() > w.dim() else g.view(w.shape), alpha=0.1)

        library.impl("update", update, "CompositeExplicitAutograd")
        torch.library.register_fake("rule_of_updates::update", update, lib=library)
        torch.library.register_fake("rule_of_updates::update_named", lambda name, g, w: None, lib=library)
        library.impl("update_named", lambda name, g, w: update(w, g), "CompositeExplicitAutograd")
        yield torch.ops.rule_of_updates


def matrix(*shape: int) -> torch.Tensor:
    return weight(*(shape or (N, K)), seed=1)


ALLOWED = {
    "of_a_gradient": lambda ops, w: ops.update(w, matrix()),
    "second_argument": lambda ops, w: ops.update_named("sgd", matrix(), w),
    "state_in_bytes": lambda ops, w: ops.update(w, matrix(), torch.zeros(N, K, dtype=torch.uint8), torch.ones(24)),
    "stack_of_states": lambda ops, w: ops.update(w, matrix(), torch.zeros(2, N, K)),
    "flat_gradient": lambda ops, w: ops.update(w, matrix().flatten()),
}


@pytest.mark.parametrize("grad", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("use", ALLOWED.values(), ids=ALLOWED)
def test_updates_change_the_values(others, use, grad):
    w = master(N, K)
    version, before = w._version, w.quantized()
    with grad():
        assert use(others, w) is None
    assert_bitwise_equal(w.hp, weight(N, K).sub(matrix(), alpha=0.1))
    assert not torch.equal(w.quantized().qdata, before.qdata) or not torch.equal(w.quantized().scale, before.scale)
    assert w._version > version, "what autograd saved of it is stale"


def test_compiled_updates(others, fresh_dynamo):
    def step(w, g):
        others.update(w, g)
        others.update_named("sgd", g, w)

    w = master(N, K)
    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend="aot_eager")(w, matrix())
    assert_bitwise_equal(w.hp, weight(N, K).sub(matrix(), alpha=0.1).sub(matrix(), alpha=0.1))


REFUSED = {
    "tokens": lambda ops, w: ops.update(w, matrix(8, K)),
    "output": lambda ops, w: ops.update(w, matrix(), matrix(N, 8)),
    "transposed_gradient": lambda ops, w: ops.update(w, matrix(K, N)),
    "returns": lambda ops, w: ops.returns(w, matrix()),
    "reads": lambda ops, w: ops.reads(w, matrix()),
    "not_the_weight": lambda ops, w: ops.update(matrix(), w),
    "weight_and_weight": lambda ops, w: ops.updates_two(w, w),
    "many": lambda ops, w: ops.updates_many([w, master(N, K)], [matrix(), matrix()]),
    "row": lambda ops, w: ops.update(w[0], matrix()),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_everything_else_is_refused_with_the_layers_name(others, use):
    model = mlp(FP8, features=(K, N, K))
    w = model[0].weight
    before = w.hp.clone()
    message = r"rule_of_updates\.\w+.*0\.weight .*weight\.hp.*MasterWeightOptimizer"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message):
        use(others, w)
    assert torch.equal(w.hp, before)


# --- quantized Parameters ---------------------------------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("name", ("AdamW", "Muon"))
def test_plain_optimizers_of_quantized_parameters_name_the_optimizer_of_masters(config, compiled, name, fresh_dynamo):
    model = converted(nn.Sequential(nn.Linear(K, N, bias=False)), replace(config, master_weights=False))
    optimizer = getattr(torch.optim, name)(model.parameters())
    gradients(model, 0)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    with pytest.raises(Exception, match=r"0\.weight.*MasterWeightOptimizer"):
        step()
    optimizer = MasterWeightOptimizer(getattr(torch.optim, name), model)
    gradients(model, 0)
    optimizer.step()


def loaded(layer):
    """As `torch.load` makes it: without the values that it was quantized from."""
    return pickle.loads(pickle.dumps(layer))


def unfrozen(layer):
    """Frozen when it was converted, and trained later."""
    other = nn.Linear(K, N, bias=False)
    other.weight.requires_grad_(False)
    quantize_(other, layer.weight.config)
    other.weight.requires_grad_(True)
    return other


@both_formats
@pytest.mark.parametrize("made", (lambda layer: layer, loaded, unfrozen), ids=("converted", "loaded", "unfrozen"))
def test_small_steps_of_a_weight_that_trains_are_refused(made, config):
    """Each would be rounded away."""
    layer = converted(nn.Linear(K, N, bias=False), replace(config, master_weights=False))
    weight = made(layer).weight
    assert weight.requires_grad
    for alias in (weight.data, weight.detach()):
        with pytest.raises(NotImplementedError, match="MasterWeightOptimizer"):
            alias.add_(torch.full((N, K), 1e-5))


def test_the_error_of_a_plain_optimizer_names_three_weights():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
    quantize_(model, replace(FP8, master_weights=False))
    gradients(model, 0)
    with pytest.raises(NotImplementedError, match=r"\(0.weight, 1.weight, 2.weight and 2 more\).*MasterWeight"):
        torch.optim.AdamW(model.parameters(), foreach=True).step()


@every_kind
def test_an_adapters_factors_are_added_to_a_quantized_weight(from_hp):
    """`baddbmm` gives a master weight of the decoded values and their product; of any others it is a GEMM."""
    w, b, a = random_tensor(2, 32, 48), random_tensor(2, 32, 4), random_tensor(2, 4, 48)
    weight = from_hp(w)
    with pytest.raises(NotImplementedError, match="an adapter b @ a can be added only to a converted weight"):
        torch.baddbmm(weight, b, a)
    weight.config, weight.layer = NVFP4 if "NVFP4" in type(weight).__name__ else FP8, "experts.up"
    total = torch.baddbmm(weight, b.clone().requires_grad_(), a, alpha=0.5)
    assert type(total) is MasterWeightTensor and total.layer == "experts.up" and total.config.master_weights
    assert_bitwise_equal(total.hp.detach(), torch.baddbmm(weight.dequantize(), b, a, alpha=0.5))
    assert total.requires_grad
    with pytest.raises(NotImplementedError, match="an adapter b @ a can be added only to a converted weight"):
        torch.baddbmm(torch.zeros(2, 4, 48), torch.zeros(2, 4, 32), weight)
