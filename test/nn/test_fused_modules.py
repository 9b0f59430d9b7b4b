"""Fused modules: layers that share their input, MLPs that quantize SwiGLU as they compute it; bits of unfused ones."""

import collections
import contextlib
import copy
import inspect
import weakref

import pytest
import torch
import torch.nn.functional as F
from every_layer import MLP
from helpers import (
    FP8,
    FP8_POW2,
    NVFP4,
    assert_same,
    both_formats,
    converted,
    every_recipe,
    forward_backward,
    replace,
    saved_and_loaded,
)
from shared_inputs import (
    FEATURES,
    OPS,
    VARIANTS,
    Attention,
    Counter,
    attention,
    counting_backend,
    quantizations,
    tokens,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import unconvert
from torchao_blockwise.nn import swiglu_linear
from torchao_blockwise.nn.converted import restore_class
from torchao_blockwise.nn.fused_modules import FusedModule, fuse_class, why_not_shared, why_not_swiglu
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class RoundedOnce(MLP):
    """The unfused equivalent of a fused MLP."""

    def forward(self, x):
        return swiglu_linear(self.gate(x), self.up(x), self.down.weight, self.down.bias)


def mlp(config, dtype=torch.float32, fused: bool = True, cls=MLP, act: str = "act", **options) -> MLP:
    torch.manual_seed(0)
    model = converted(cls(dtype=dtype, **options), config)
    if fused:
        fuse_class(model, ("gate", "up"), down="down", act=act)
    return model


# --- bits -------------------------------------------------------------------------------------------------------------

DTYPES = {
    "fp32": (torch.float32, torch.float32, None),
    "bf16": (torch.bfloat16, torch.bfloat16, None),
    "fp32_masters": (torch.float32, torch.bfloat16, torch.bfloat16),
    "autocast": (torch.float32, torch.float32, torch.bfloat16),
}
# How a module is made, its width, and its class where it is not fused.
MODULES = {"attention": (attention, FEATURES, Attention), "mlp": (mlp, 64, RoundedOnce)}


@every_recipe
@pytest.mark.parametrize(("make", "width", "unfused"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("dtypes", "leading"), zip(DTYPES.values(), ((3, 11), (2, 0), (1,), (256,))), ids=DTYPES)
def test_bits_are_those_of_layers_that_share_nothing(config, make, width, unfused, variant, dtypes, leading):
    masters, inputs, autocast = dtypes
    config, x = replace(config, **variant), tokens(*leading, dtype=inputs, width=width)
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        expected = forward_backward(make(config, masters, fused=False, cls=unfused), x)
        assert_same(forward_backward(make(config, masters), x), expected)


def test_an_activation_that_is_no_module():
    class Calls(MLP):
        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    x = tokens(33, width=64)
    expected = forward_backward(mlp(FP8, fused=False, cls=RoundedOnce), x)
    assert_same(forward_backward(mlp(FP8, cls=Calls, act=""), x), expected)


# --- what it saves ----------------------------------------------------------------------------------------------------


@both_formats
def test_one_quantization_of_the_input(config):
    """Of four layers two read another activation in forward; backward quantizes the gradient of each."""
    model, plain, x = attention(config), attention(config, fused=False), tokens(33).requires_grad_()
    assert [quantizations(lambda m=m: m(x)) for m in (plain, model)] == [4, 2]
    assert [quantizations(lambda m=m: m(x).sum().backward()) for m in (plain, model)] == [8, 6]


@pytest.mark.parametrize("variant", (VARIANTS["default"], VARIANTS["high_precision"]), ids=("quantized", "input"))
@both_formats
def test_backward_keeps_one_copy_for_all(config, variant):
    model, x, saved = attention(replace(config, **variant)), tokens(33).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = model(x)
    copies = collections.Counter(t.untyped_storage().data_ptr() for t in saved if t.shape[-2:] in _inputs(model))
    assert [*copies.values()] == [3]
    out.sum().backward()


def _inputs(model) -> list[torch.Size]:
    """Shapes in which the input can be saved: itself, and the payload of its columnwise copy."""
    fmt = model.q.weight.config.activation_format
    return [torch.Size((33, FEATURES)), torch.Size(fmt.qdata_shape(FEATURES, 64))]


class Watching(Counter):
    """Knows the payload of the first rowwise copy."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket == OPS.quantize and self.quantized == 1:
            self.rowwise = weakref.ref(result[0])
        return result


def test_the_rowwise_copy_goes_when_the_last_layer_has_taken_it():
    held = []

    class Holding(Attention):
        def forward(self, x):
            self.q(x), self.k(x)
            held.append(watch.rowwise() is not None)
            self.v(x)
            held.append(watch.rowwise() is not None)

    with torch.no_grad(), Watching() as watch:
        attention(FP8, cls=Holding)(tokens(33))
    assert held == [True, False]


def test_swiglu_is_quantized_as_it_is_computed():
    model = mlp(FP8)
    with Counter() as counter:
        model(tokens(33, width=64)).sum().backward()
    # The input, and in backward the gradients of three layers; h comes from the operation that computes it.
    assert (counter.quantized, counter.ran[OPS.swiglu_quantize]) == (4, 1)


# --- where layers are not fused ---------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A wrapper that changes what it is given, in place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.mul_(2))


def own_forward(layer) -> None:
    forward = layer.forward
    layer.forward = lambda x: forward(x.mul_(2))


def halves(module, grad_input, grad_output):
    return (grad_input[0] / 2,)


CHANGES = {
    "pre_hook": (lambda m: m.q.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),)), "q has hooks"),
    "hook": (lambda m: m.k.register_forward_hook(lambda *_: None), "k has hooks"),
    "own_forward": (lambda m: own_forward(m.q), "q has hooks, or a separate forward pass"),
    "wrapper": (lambda m: setattr(m, "q", Doubled(m.q)), "q is a Doubled"),
    "other_config": (lambda m: quantize_(m.v, FP8_POW2), "v and q have different configs"),
    "not_converted": (lambda m: unconvert(m.v), "v is not converted"),
    "plain_weight": (
        lambda m: setattr(m.v, "weight", nn.Parameter(torch.ones(48, FEATURES))),
        "the weight of v is a Parameter",
    ),
}
CHANGES_OF_MLPS = {
    "act_hook": (lambda m: m.act.register_forward_hook(lambda _, args, out: out * 2), "act is a SiLU, or has hooks"),
    "gelu": (lambda m: setattr(m, "act", nn.GELU()), "act is a GELU, or has hooks"),
    "nvfp4": (lambda m: quantize_(m, NVFP4), "down trains in NVFP4"),
    "down_hook": (lambda m: m.down.register_forward_pre_hook(lambda _, x: (x[0] * 2,)), "down has hooks"),
    "backward_hook": (lambda m: m.down.register_full_backward_hook(halves), "down has hooks"),
    "down_wrapper": (lambda m: setattr(m, "down", nn.Sequential(m.down, nn.ReLU())), "down is a Sequential"),
}


@pytest.mark.filterwarnings("ignore:.*was converted to low precision")
@pytest.mark.parametrize("name", [*CHANGES, *CHANGES_OF_MLPS])
def test_what_is_not_fused_has_the_bits_of_before(name):
    """Whatever else sees the input, changes it or takes its place: nothing is taken of an input that is another."""
    change, reason = (CHANGES | CHANGES_OF_MLPS)[name]
    make, width, _ = MODULES["attention" if name in CHANGES else "mlp"]
    results = []
    for fused in (True, False):
        model = make(FP8, fused=fused)
        change(model)
        if fused:
            reasons = why_not_shared(model), why_not_swiglu(model) if make is mlp else None
            assert [r.startswith(reason) for r in reasons if r is not None] == [True]
        x = tokens(33, width=width).requires_grad_()
        # What changes its input in place may not change a leaf.
        out = model(x.clone())
        out.sum().backward()
        results.append((out.detach(), x.grad, *(p.grad for p in model.parameters())))
        with torch.no_grad():
            compiled = torch.compile(model, backend="aot_eager", fullgraph=name != "backward_hook")
            assert_bitwise_equal(compiled(tokens(33, width=width)), out)
    assert_same(*results)


def test_backward_hooks_of_layers_run():
    model, plain, calls = attention(FP8), attention(FP8, fused=False), []
    model.k.register_full_backward_hook(lambda *_: calls.append("after"))
    model.q.register_full_backward_pre_hook(lambda *_: calls.append("before"))
    assert_same(forward_backward(model, tokens(33)), forward_backward(plain, tokens(33)))
    assert sorted(calls) == ["after", "before"]


class TwiceOrAnother(Attention):
    """Reads its input more often than it has layers, and another tensor too."""

    def forward(self, x):
        q = self.q(x) + self.q(x)
        return self.o(q * torch.cat((self.k(x.detach() * 2), self.v(x)), -1))


def test_each_layer_is_given_what_it_is_called_with():
    model, plain = (attention(FP8, fused=fused, cls=TwiceOrAnother) for fused in (True, False))
    assert_same(forward_backward(model, tokens(33)), forward_backward(plain, tokens(33)))
    assert quantizations(lambda: model(tokens(33))) == 3


@pytest.mark.parametrize("x", (torch.ones(3, FEATURES, dtype=torch.int64), torch.ones(3, 7)), ids=("integers", "K"))
def test_errors_are_those_of_the_layer(x):
    messages = []
    for fused in (True, False):
        with pytest.raises((TypeError, ValueError), match="linear: x") as error:
            attention(FP8, fused=fused)(x)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# --- what the module is -----------------------------------------------------------------------------------------------


def test_the_module_is_of_its_class_and_can_be_what_it_was():
    model = attention(FP8)
    assert isinstance(model, FusedModule) and isinstance(model, Attention)
    assert type(model).__name__ == "Attention" and type(model).__module__ == Attention.__module__
    assert inspect.signature(type(model).forward) == inspect.signature(Attention.forward)
    restore_class(model)
    plain = attention(FP8, fused=False)
    assert type(model) is Attention and vars(model).keys() == vars(plain).keys()
    assert vars(model.q).keys() == vars(plain.q).keys()


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda m: saved_and_loaded(m, False)), ids=("deepcopy", "file"))
def test_copies_share_by_themselves(copied):
    model = attention(FP8)
    other = copied(model)
    assert why_not_shared(other) is None
    assert quantizations(lambda: other(tokens(33))) == 2
    assert_same(forward_backward(other, tokens(33)), forward_backward(model, tokens(33)))


# --- compiled ---------------------------------------------------------------------------------------------------------


def test_layers_of_a_model_that_are_compiled_one_by_one_share_their_graph():
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(*(attention(FP8) for _ in range(10)))
    for layer in model:
        layer.compile(backend=counter, fullgraph=True)
    model(tokens(33).requires_grad_()).sum().backward()
    assert counter.frame_count == 1


def test_classes_are_compiled_apart():
    """Many classes, as models and their reloads have them, do not add up to the recompilations of one."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for index in range(4):
            model = attention(FP8, cls=type(f"Attention{index}", (Attention,), {}))
            torch.compile(model, backend="eager", fullgraph=True)(tokens(33))


class Residual(nn.Module):
    """A block of a transformer without norms: its attention is not the only one to read the input."""

    def __init__(self, config, fused: bool = True, checkpointed: bool = True):
        super().__init__()
        self.attention, self.checkpointed = attention(config, fused=fused), checkpointed

    def inner(self, x):
        return x.sin() + self.attention(x) * x

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


@both_formats
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("make", (attention, Residual), ids=("whole", "checkpointed"))
def test_compiled_graphs_quantize_the_input_once(config, variant, make):
    """Gradients of all readers of the input are summed in the order of the plain model."""
    config, unfused = replace(config, **variant), {"checkpointed": False} if make is Residual else {}
    expected = forward_backward(make(config, fused=False, **unfused), tokens(33))
    backend, counts = counting_backend()
    results = forward_backward(torch.compile(make(config), backend=backend, fullgraph=True), tokens(33))
    forward, backward = (count["quantize_both"] + count["quantize"] for count in counts)
    # The input, once for q, k and v, and what `o` reads.
    assert forward == 2
    # The four gradients, and what was saved in high precision for each weight; after recomputation. PyTorch 2.11 does
    # not recompute what an autograd function saved.
    gradients = 8 if "save_activations" in variant else 4
    assert backward == gradients if make is attention else backward <= 2 + gradients
    assert_same(results, expected)


@both_formats
@pytest.mark.parametrize("make", (attention, Residual), ids=("whole", "checkpointed"))
def test_inductor_gives_the_bits_of_layers_that_share_nothing(config, make):
    expected = forward_backward(torch.compile(make(config, fused=False), fullgraph=True), tokens(33))
    torch._dynamo.reset()
    assert_same(forward_backward(torch.compile(make(config), fullgraph=True), tokens(33)), expected)


class Broken(Attention):
    """No compiler takes its forward pass whole."""

    def forward(self, x):
        q = self.q(x)
        torch._dynamo.graph_break()
        return self.o(q * torch.cat((self.k(x), self.v(x)), -1))


def test_a_forward_pass_that_is_compiled_in_parts():
    expected = forward_backward(attention(FP8, fused=False), tokens(33))
    model = attention(FP8, cls=Broken)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_same(forward_backward(compiled, tokens(33)), expected)
    assert_same(forward_backward(model, tokens(33)), expected)


class ByName(Attention):
    """Takes its input by name, gives it back, and hands one of its layers another tensor."""

    def forward(self, x):
        return self.o(self.q(x) * torch.cat((self.k(x.neg()), self.v(x)), -1)), x


def test_an_input_by_name_that_is_given_back():
    results = []
    for fused in (False, True):
        model, x = attention(FP8, fused=fused, cls=ByName), tokens(33).requires_grad_()
        out, same = torch.compile(model, backend="aot_eager", fullgraph=True)(x=x)
        (out.sum() + same.square().sum()).backward()
        results.append((x.grad, out.detach(), same.detach(), *(p.grad for p in model.parameters())))
    # What reads the input besides the layers that share it is summed by itself.
    torch.testing.assert_close(results[0][0], results[1][0])
    assert_same(*(result[1:] for result in results))
