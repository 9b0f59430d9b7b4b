"""Modules that override forward: the first call in each mode checks that a GEMM with each weight ran."""

import contextlib
import inspect
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from every_layer import Doubling
from helpers import FP8, NVFP4, both_formats, converted, replace
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise import MasterWeightTensor, NormLinear, experts, unconvert
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.tensors import weight_uses
from torchao_blockwise.testing import assert_bitwise_equal

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([3, 1, 2])


@torch.library.custom_op("checked_forwards::opaque", mutates_args=())
def opaque(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


@opaque.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


def values(weight: torch.Tensor) -> torch.Tensor:
    return weight.hp if isinstance(weight, MasterWeightTensor) else weight.dequantize()


def scatter(layer, x):
    return x @ torch.zeros(layer.weight.shape).copy_(layer.weight).T


def saved_for_later(layer, x):
    F.linear(x, layer.weight.detach().sum(0, keepdim=True))
    return layer.other(x)


# What reads the weight and runs no low-precision GEMM with it.
MISUSES = {
    "rows": lambda layer, x: (x[:, None] * layer.weight[IDS]).sum(-1),
    "embedding": lambda layer, x: x + F.embedding(IDS, layer.weight),
    "sum": lambda layer, x: (x[:, None] * layer.weight).sum(-1),
    "copy": scatter,
    "kernel": lambda layer, x: opaque(x, values(layer.weight)),
    "norm": lambda layer, x: x * layer.weight.norm(),
    "another_layer": saved_for_later,
    "unused": lambda layer, x: 2 * x,
}
USES = {
    "super": lambda layer, x: 2 * nn.Linear.forward(layer, x),
    "cast": lambda layer, x: F.linear(x.bfloat16(), layer.weight.to(torch.bfloat16)),
    "type_as": lambda layer, x: F.linear(x, layer.weight.type_as(x)) + 1,
    "scaled": lambda layer, x: F.linear(x, layer.weight * 0.5),
    "rows": lambda layer, x: F.linear(x, layer.weight) * layer.weight[0].norm(),
    "checkpoint": lambda layer, x: checkpoint(F.linear, x, layer.weight, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(F.linear, x, layer.weight, use_reentrant=True),
}


def layer_of(forward, config=FP8):
    """A model of one converted layer with this forward pass, which holds another, `other`."""

    class Own(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.other = nn.Linear(64, 64)

        def forward(self, x):
            return forward(self, x)

    torch.manual_seed(0)
    model = converted(nn.Sequential(Own()), config)
    assert type(model[0]).__name__ == "Own" and isinstance(model[0], ConvertedLinear)
    return model


def refusal(mode="training", name="0", weights="weight"):
    return pytest.raises(
        NotImplementedError,
        match=rf"{name}: Own.forward ran no low-precision GEMM with its converted {weights} in {mode}.*"
        rf"skip_fqns\('{name}'\)",
    )


@pytest.mark.parametrize("mode", ("training", "evaluation"))
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_a_forward_pass_without_a_gemm_is_refused(misuse, mode):
    model = layer_of(misuse).train(mode == "training")
    for _ in range(2):
        with refusal(mode), torch.set_grad_enabled(mode == "training"):
            model(X)
    if misuse is MISUSES["kernel"]:
        with refusal():
            layer_of(misuse, replace(FP8, master_weights=False))(X)
    # A compiler knows that a GEMM runs, and not with which weight.
    if misuse is not saved_for_later:
        torch.compiler.reset()
        with pytest.raises(Exception, match=rf"0: Own\.forward ran no low-.* with its converted weight in {mode}"):
            torch.compile(model, backend="eager")(X)


# A quantized Parameter is not scaled, and has no rows.
OF_VALUES = {"scaled", "rows"}
USES_OF_BOTH = [(name, masters) for name in USES for masters in (True, False) if masters or name not in OF_VALUES]


@both_formats
@pytest.mark.parametrize(("name", "masters"), USES_OF_BOTH)
def test_a_forward_pass_with_one_runs_and_is_checked_once(name, config, masters, monkeypatch):
    use = USES[name]
    config = replace(config, master_weights=masters)
    model = layer_of(use, config)
    out = model(X)
    bare = nn.Linear(64, 64)
    bare.load_state_dict({k: v for k, v in model[0].state_dict().items() if not k.startswith("other")})
    quantize_(bare, config)
    assert_bitwise_equal(out, use(bare, X))
    out.sum().backward()
    assert model[0].weight.grad is not None and model[0].checked == {True}
    with torch.no_grad():
        model.eval()(X)
    assert model[0].checked == {True, False}
    monkeypatch.setattr("torchao_blockwise.nn.converted.recorded_uses", None)
    model.train()(X)
    model.eval()(X)


@pytest.mark.parametrize("name", sorted(USES.keys() - {"reentrant"}))
def test_a_compiled_one_is_one_graph_with_the_same_bits(name):
    torch.compiler.reset()
    model, compiled = (layer_of(USES[name]) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(compiled, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_bitwise_equal(run(X).detach(), model(X).detach())
    # Eager calls in between do not compile again.
    compiled(X)
    run(X)
    assert counter.frame_count == 1


def test_layers_with_a_compiled_function_inside():
    """The graph was compiled for the first layer; the second one runs it, and no compiler traces anything."""
    product = torch.compile(lambda x, weight: F.linear(x, weight), backend="aot_eager")
    model = nn.Sequential(*(layer_of(lambda layer, x: product(x, layer.weight))[0] for _ in range(3)))
    for mode in (True, False):
        model.train(mode)(X).sum().backward()
    assert all(layer.checked == {True, False} for layer in model)


def test_a_call_without_tokens_decides_nothing():
    model = layer_of(lambda layer, x: F.linear(x, layer.weight) if len(x) else x.new_empty(0, 64))
    assert model(X[:0]).shape == (0, 64) and not model[0].checked
    model(X)
    assert model[0].checked == {True}
    with refusal():
        layer_of(lambda layer, x: layer.weight[IDS] if len(x) else x)(X)


def test_threads_are_checked_by_themselves():
    """While one thread multiplies by the weight, another that does not is refused."""
    started, done = threading.Event(), threading.Event()

    def forward(layer, x):
        if threading.current_thread() is not threading.main_thread():
            started.wait(30)
            out = F.linear(x, layer.weight)
            done.set()
            return out
        started.set()
        done.wait(30)
        return x

    model = layer_of(forward)
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    with refusal():
        model(X)
    thread.join()


def test_a_forward_pass_that_raises_leaves_nothing_behind():
    model = layer_of(lambda layer, x: F.linear(x, layer.weight, None) + x[:, :7])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match"):
            model(X)
    assert weight_uses._records.stack == [] and not model[0].checked


def test_the_class_is_what_it_was_to_others():
    model = nn.Sequential(Doubling(64, 64))
    plain = repr(model[0])
    quantize_(model, FP8)
    layer = model[0]
    assert inspect.signature(layer.forward) == inspect.signature(Doubling(2, 2).forward)
    assert repr(layer) == plain[:-1] + ", weight in fp8_128x128)" and isinstance(layer, Doubling)
    assert_bitwise_equal(layer(X, factor=3.0), 1.5 * layer(X))
    quantize_(model, NVFP4)
    assert type(model[0]) is type(layer)
    unconvert(model)
    assert type(layer) is Doubling and vars(layer).keys() == vars(Doubling(2, 2)).keys()


def test_a_fused_norm_leaves_it_its_forward_pass():
    layer = converted(NormLinear.from_modules(nn.RMSNorm(64), Doubling(64, 64)), FP8)
    assert_bitwise_equal(layer(X), layer.linear(layer.norm(X)))
    assert layer.linear.checked == {True}


class Mixture(nn.Module):
    """Experts and a matrix, multiplied as a test says."""

    def __init__(self, forward):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 32, 64)), nn.Parameter(torch.randn(2, 64, 32))
        self.head, self.run = nn.Parameter(torch.randn(64, 64)), forward

    def forward(self, x):
        return self.run(self, x)


ENDS = torch.tensor([1, 3], dtype=torch.int32)


def grouped(x, weight):
    return F.grouped_mm(x, weight.mT, offs=ENDS)


def one_by_one(x, weight):
    return torch.cat([F.linear(x[:1], weight[0]), F.linear(x[1:], weight[1])])


def halves(x, weight):
    """By halves of a packed weight that are cast on every use."""
    return torch.cat([grouped(x.bfloat16(), half.bfloat16()) for half in weight.chunk(2, dim=1)], 1)


# {name: (forward pass, what it reads and does not multiply by)}
MIXTURES = {
    "grouped": (lambda m, x: grouped(grouped(x, m.up), m.down), ""),
    "grouped_cast": (lambda m, x: grouped(grouped(x.bfloat16(), m.up.bfloat16()), m.down.bfloat16()), ""),
    "one_by_one": (lambda m, x: one_by_one(one_by_one(x, m.up), m.down), ""),
    "half": (lambda m, x: grouped(x, m.up) * m.down.norm(), "down"),
    "half_cast": (lambda m, x: grouped(x.bfloat16(), m.up.bfloat16()) * m.down.norm(), "down"),
    "lookup": (lambda m, x: (x[:, None] * m.up[ENDS % 2].sum(0)).sum(-1), "up"),
    "chunk_cast": (lambda m, x: grouped(halves(x, m.up), m.down.bfloat16()), ""),
    # What a rank does whose experts have no tokens, or a module of which one part is for another kind of input.
    "no_down": (lambda m, x: grouped(x, m.up), None),
    "no_down_cast": (lambda m, x: grouped(x.bfloat16(), m.up.bfloat16()), None),
    "no_down_one_by_one": (lambda m, x: one_by_one(x, m.up), None),
    "nothing": (lambda m, x: 2 * x, None),
}
# These read or cut values, which quantized Parameters refuse.
OF_MASTERS = {"half", "half_cast", "lookup", "chunk_cast"}


def refusal_of(name: str):
    return pytest.raises(NotImplementedError, match=rf"0: Mixture\.forward ran .* with its converted {name} in tr")


@pytest.mark.parametrize("masters", (True, False))
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name, masters):
    """Those that are not used are not refused, and are checked by the first call that uses them."""
    forward, missing = MIXTURES[name]
    if name in OF_MASTERS and not masters:
        return
    model = converted(nn.Sequential(Mixture(forward)), replace(FP8, master_weights=masters), experts())
    with refusal_of(missing) if missing else contextlib.nullcontext():
        if missing is None:
            model(X)
        else:
            model(X).sum().backward()
        assert model[0].checked == (frozenset() if missing is None else {True})
        assert missing is None or model[0].down.grad is not None
    if missing is None and masters:
        model[0].run = MIXTURES["lookup"][0]
        with refusal_of("up"):
            model(X)
    unconvert(model)
    assert type(model[0]) is Mixture


def test_a_matrix_of_no_layer_and_a_later_conversion():
    model = converted(nn.Sequential(Mixture(lambda m, x: x + m.head[IDS])), FqnToConfig({"0.head": FP8}))
    with refusal_of("head"):
        model(X)
    model[0].run = lambda m, x: F.linear(x, m.head)
    model(X).sum().backward()
    assert isinstance(model[0].head, MasterWeightTensor) and model[0].head.grad is not None
    model[0].run = lambda m, x: F.linear(x, m.head) + m.up.sum()
    quantize_(model, FqnToConfig({"0.up": FP8}), filter_fn=None)
    with refusal_of("up"):
        model(X)


def lookup(layer, x):
    return (x[:, None] * layer.weight).sum(-1)


def test_an_empty_argument_hides_no_lookup():
    class Cached(nn.Linear):
        def forward(self, x, cache):
            return lookup(self, x)

    model = converted(nn.Sequential(Cached(64, 64)), FP8)
    with pytest.raises(NotImplementedError, match="ran no low-precision GEMM"):
        model[0](X, torch.empty(0))


def test_weights_of_one_name_are_told_apart():
    """Both are called "weight", as each is the root of a conversion; a pickle has no names."""
    layer = layer_of(lambda layer, x: layer.other(x) + lookup(layer, x))[0]
    for own in (layer.weight, layer.other.weight):
        own.layer = "".join(("wei", "ght"))
    loaded = pickle.loads(pickle.dumps([layer.weight, layer.other.weight]))
    for weights in ((layer.weight, layer.other.weight), loaded):
        layer.weight, layer.other.weight = weights
        with pytest.raises(NotImplementedError, match="ran no low-precision GEMM"):
            layer(X)


def test_a_plain_weight_in_its_place_is_warned_of():
    model = layer_of(lambda layer, x: F.linear(x, layer.weight.to(x.dtype)))
    plain = {"0.weight": torch.zeros(64, 64)}
    with pytest.warns(UserWarning, match="0 was .* in high precision, because its weight was replaced"):
        torch.func.functional_call(model, plain, (X,))


def test_an_inner_module_without_tokens_leaves_the_outer_one_traced():
    torch.compiler.reset()
    model = layer_of(lambda layer, x: F.linear(x, layer.weight) + layer.inner(x[:0]).sum())
    model[0].inner = layer_of(lambda layer, x: F.linear(x, layer.weight) if len(x) else x)[0]
    torch.compile(model, backend="eager", fullgraph=True)(X)


@both_formats
def test_the_linear_layer_of_falcon_is_one(config):
    """Its forward pass multiplies with `@`; the outputs and gradients are those of `nn.Linear`."""
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    found = []
    for kind in (nn.Linear, falcon.FalconLinear):
        torch.manual_seed(0)
        layer, x = converted(kind(64, 48), config), X.clone().requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        found.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for got, expected in zip(*found):
        assert_bitwise_equal(got, expected)
    assert type(unconvert(layer)) is falcon.FalconLinear


class ByHand(torch.autograd.Function):
    """x @ w.T, whose own backward pass multiplies by the weight, as fused layers of other libraries do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return multiply(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return multiply(dy, weight.transpose(-2, -1)), dy.transpose(-2, -1) @ x


def multiply(x, weight):
    return F.linear(x, weight) if weight.dim() == 2 else torch.bmm(x, weight.transpose(-2, -1))


class Reversible(torch.autograd.Function):
    """A layer that runs again in backward, without gradients, to get back its input."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x + layer(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.layer(ctx.saved_tensors[0])
        return dy, None


@both_formats
@pytest.mark.parametrize("shape", ((64, 64), (2, 64, 64)), ids=("linear", "bmm"))
def test_a_backward_pass_by_hand_is_warned_of(shape, config):
    """Its grad_weight is in high precision. Recomputed layers, and those of reversible networks, are not meant."""
    weight, x = nn.Parameter(MasterWeightTensor(torch.randn(shape), config)), torch.randn(*shape[:-2], 32, 64)
    weight.layer = "mlp.down"
    with pytest.warns(UserWarning, match="multiplies by mlp.down; .* in high precision; call the layer"):
        ByHand.apply(x.requires_grad_(), weight).sum().backward()
    layer = converted(nn.Linear(64, 64), config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use_reentrant in (False, True):
            checkpoint(multiply, x, weight, use_reentrant=use_reentrant).sum().backward()
        Reversible.apply(x, layer).sum().backward()
        with torch.no_grad():
            multiply(x, weight)
