"""The promises of all layers: the same bits whatever the options, the order of passes, compiled and checkpointed."""

import collections

import pytest
import torch
from every_layer import CONFIGS, MODELS, Halves, every_model, make, tokens
from helpers import (
    FP8,
    FP8_ROWS,
    NVFP4,
    PER_EXPERT,
    assert_same,
    both_formats,
    forward_backward,
    replace,
    weight_calls,
)
from shared_inputs import OPS, Counter, counting_backend
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, unconvert, weights_unchanged
from torchao_blockwise.ops import registry
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

formats_and_blocks = pytest.mark.parametrize(
    "config", (FP8, FP8_ROWS, NVFP4), ids=lambda config: config.grad_weight_format.name
)


def weights_of(model) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, MasterWeightTensor)}


@pytest.mark.parametrize(
    ("model", "config"),
    (*((model, FP8) for model in (*MODELS, "swiglu_linear")), ("linear", NVFP4), ("experts", NVFP4)),
)
def test_a_named_backend_reaches_every_operation(model, config, monkeypatch):
    """Those of a step that have several backends."""
    chosen, choose = {}, registry.choose

    def recorded(op, table, backend, *more):
        if len({row.backend for row in table}) > 1:
            chosen.setdefault(op, set()).add(backend)
        return choose(op, table, backend, *more)

    config = replace(config, backend="reference")
    layer = make(model, config) if model in MODELS else nn.Sequential(Halves(64, 48, bias=True))
    quantize_(layer, config, filter_fn=lambda m, fqn: isinstance(m, nn.Linear) and model not in MODELS)
    monkeypatch.setattr(registry, "choose", recorded)
    forward_backward(layer, tokens(model).requires_grad_())
    assert len(chosen) > 1 and set().union(*chosen.values()) == {Backend.REFERENCE}, chosen
    assert model != "swiglu_linear" or "swiglu_backward" in chosen


@every_model
@pytest.mark.parametrize("config", (FP8, FP8_ROWS), ids=("fp8", "rows"))
def test_saved_weights_are_quantized_once_and_give_the_same_bits(model, config):
    x = tokens(model, 130)
    expected = forward_backward(make(model, config), x)
    layer = make(model, replace(config, save_weights="quantized"))
    with Counter() as counter:
        assert_same(forward_backward(layer, x), expected)
    assert counter.ran[OPS.master_matmul] == 0 < counter.ran[OPS.quantized_matmul]
    backend, counts = counting_backend()
    assert_same(forward_backward(layer, x, torch.compile(layer, backend=backend, fullgraph=True)), expected)
    assert all(count["master_matmul"] == 0 < count["quantized_matmul"] for count in counts)
    # Eager layers use the copies that a scope keeps.
    with weights_unchanged(layer):
        assert_same(forward_backward(layer, x), expected)
        assert all(w.quantized_bytes for w in weights_of(layer).values())


@every_model
@pytest.mark.parametrize("config", (FP8, NVFP4, CONFIGS["high_precision"]), ids=("fp8", "nvfp4", "high_precision"))
def test_only_the_gradients_that_are_needed(model, config):
    layer, x = make(model, config), tokens(model).requires_grad_()
    out = layer(x)
    out.backward(torch.ones_like(out))
    parts = {"x": x, **dict(layer.named_parameters())}
    expected = {name: t.grad for name, t in parts.items()}
    for needed in (*parts, "none"):
        for name, t in parts.items():
            t.grad = None
            t.requires_grad_(name == needed)
        got = layer(x)
        assert_bitwise_equal(got.detach(), out.detach())
        assert got.requires_grad == (needed != "none")
        if needed != "none":
            got.backward(torch.ones_like(got))
            assert_bitwise_equal(parts[needed].grad, expected[needed], needed)
        assert all((t.grad is None) == (name != needed) for name, t in parts.items())


@every_model
@both_formats
@pytest.mark.parametrize("off", (torch.no_grad, torch.inference_mode))
def test_without_gradients_only_rowwise_copies_are_made(model, config, off):
    layer, x = make(model, config), tokens(model)
    expected = layer(x).detach()
    with off(), Counter() as counter:
        assert_bitwise_equal(layer(x), expected)
    assert counter.ran[OPS.quantize_both] == 0
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with off():
        assert_bitwise_equal(compiled(x), expected)


@every_model
@both_formats
def test_passes_in_any_order(model, config):
    """Several forward passes before backward, a graph that is kept, gradients that accumulate."""
    layer, xs = make(model, config), [tokens(model).requires_grad_() for _ in range(2)]
    (_, dx0, *first), (_, dx1, *second) = (forward_backward(layer, x) for x in xs)
    layer.zero_grad()
    outs = [layer(x) for x in xs]
    for out in (outs[1], outs[0]):
        out.backward(torch.ones_like(out), retain_graph=True)
    assert_same((xs[0].grad, xs[1].grad), (dx0, dx1))
    total = [a + b for a, b in zip(second, first)]
    assert_same((p.grad for p in layer.parameters()), total)
    outs[1].backward(torch.ones_like(outs[1]))
    assert_same((p.grad for p in layer.parameters()), (a + b for a, b in zip(total, second)))
    with pytest.raises(RuntimeError, match="second time"):
        outs[1].sum().backward()


@every_model
@both_formats
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_weights_are_quantized_where_gemms_read_them_and_nothing_is_kept(model, config, compiled):
    layer, x = make(model, config), tokens(model).requires_grad_()
    weights, run = weights_of(layer), torch.compile(layer, backend="aot_eager") if compiled else layer
    for _ in range(2):
        with weight_calls() as calls:
            loss = run(x).sum()
            assert (calls.quantize, calls.columnwise) == (len(weights), 0)
            loss.backward()
        assert (calls.quantize, calls.columnwise, calls.transpose) == (2 * len(weights), len(weights), 0)
    assert {w.quantized_bytes for w in weights.values()} == {0}


HOW = {
    "eager": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True),
    "checkpointed": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
}


@every_model
@both_formats
@pytest.mark.parametrize("keep", ("rowwise", "both"))
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_scope_quantizes_each_weight_once_and_changes_no_bits(model, config, keep, how):
    layer, x = make(model, config), tokens(model)
    run, expected, weights = how(layer), forward_backward(layer, x), weights_of(layer).values()
    with weights_unchanged(layer, keep=keep), weight_calls() as calls:
        for _ in range(2):
            assert_same(forward_backward(layer, x, run), expected)
        fmt = config.weight_format
        columnwise = sum(fmt.nbytes(*w.mT.shape) for w in weights) if keep == "both" else 0
        assert sum(w.quantized_bytes for w in weights) == sum(fmt.nbytes(*w.shape) for w in weights) + columnwise
    count = len(weights)
    assert (calls.quantize, calls.columnwise, calls.transpose) == (count, 0, count if keep == "both" else 2 * count)


def pinned(layer):
    def run(x):
        with save_on_cpu(pin_memory=True):
            return layer(x)

    return run


# Hooks on saved tensors pass other weights to backward than forward has read.
WITH_HOOKS = {"plain": lambda layer: layer, "checkpointed": HOW["checkpointed"], "pinned": pinned}


@every_model
@formats_and_blocks
@pytest.mark.parametrize("how", WITH_HOOKS.values(), ids=WITH_HOOKS)
def test_main_grad_takes_the_gradients_of_all_microbatches(model, config, how, device):
    """Added in fp32, in place; `.grad` stays None, and that of other parameters does not change."""
    layer, parts = make(model, config).to(device), [tokens(model).to(device) for _ in range(2)]
    expected = [forward_backward(layer, x) for x in parts]
    weights = weights_of(layer)
    for w in weights.values():
        w.main_grad = torch.full(w.shape, 0.5, device=device)
    for x, (out, grad_x, *grads) in zip(parts, expected):
        got, got_x, *got_grads = forward_backward(layer, x, how(layer))
        assert_same((got, got_x), (out, grad_x))
        for (name, p), a, b in zip(layer.named_parameters(), got_grads, grads):
            assert a is None and p.grad_added_to_main_grad if name in weights else torch.equal(a, b), name
    for (name, p), a, b in zip(layer.named_parameters(), expected[0][2:], expected[1][2:]):
        if name in weights:
            torch.testing.assert_close(p.main_grad, 0.5 + a + b, rtol=1e-6, atol=1e-5)


@every_model
@formats_and_blocks
@pytest.mark.parametrize("how", ("non_reentrant", "reentrant", "compiled"))
@pytest.mark.parametrize("save", ("quantized", "high_precision"))
def test_checkpointing(model, config, how, save):
    layer, x = make(model, config if save == "quantized" else replace(config, save_activations=save)), tokens(model)
    expected, count = forward_backward(layer, x), len(weights_of(layer))

    def run(x):
        return checkpoint(layer, x, use_reentrant=how == "reentrant")

    with weight_calls() as calls:
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert_same(forward_backward(layer, x, compiled if how == "compiled" else run), expected)
    # In forward, in the recomputation and in backward; a compiler need not compute again.
    assert calls.columnwise == count and (calls.quantize == 3 * count or how == "compiled")


@every_model
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_saved_tensors_may_move_to_the_cpu(model, config):
    """With `pin_memory`, which `offload_wrapper` sets, PyTorch copies saved weights into plain tensors."""
    layer, x = make(model, config), tokens(model)
    expected = forward_backward(layer, x)
    with save_on_cpu():
        assert_same(forward_backward(layer, x), expected)
    with save_on_cpu(pin_memory=True):
        if config.master_weights:
            assert_same(forward_backward(layer, x), expected)
        else:
            with pytest.raises(NotImplementedError, match="pin_memory=False"):
                layer(x)


GRAPHS = CONFIGS | {
    "out_dtype": replace(FP8, out_dtype=torch.bfloat16),
    "scale_per_expert": replace(PER_EXPERT, stochastic_rounding=False),
}


@every_model
@pytest.mark.parametrize("config", GRAPHS.values(), ids=GRAPHS)
def test_one_graph_for_any_number_of_tokens_and_all_steps(model, config):
    layer, counter = make(model, config), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1) if config.master_weights else None

    def run(x):
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (300, 517, 1024):
            x = tokens(model, count)
            assert_same(forward_backward(layer, x, run), forward_backward(layer, x))
            if optimizer is not None:
                optimizer.step()
    assert counter.frame_count == 1


# (layer, config, operations of the forward graph, of the backward graph).
IN_GRAPHS = {
    "linear-fp8": ("linear", FP8, "quantize_both master_matmul", "quantize_both master_matmul grad_weight"),
    "linear-nvfp4": (
        *("linear", NVFP4, "tensor_amax_bits global_scale quantize_both master_matmul"),
        "tensor_amax_bits global_scale quantize_both master_matmul grad_weight",
    ),
    "experts-fp8": (
        *("experts", FP8, "quantize_both master_matmul swiglu_quantize master_matmul"),
        "quantize_both master_matmul grad_weight swiglu_backward_quantize master_matmul grad_weight",
    ),
}


@pytest.mark.parametrize(("model", "config", "forward", "backward"), IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_operations_of_a_graph(model, config, forward, backward):
    layer, (backend, counts) = make(model, config), counting_backend()
    forward_backward(layer, tokens(model), torch.compile(layer, backend=backend, fullgraph=True))
    assert counts == [collections.Counter(names.split()) for names in (forward, backward)]


# By inductor: which results are bitwise those of eager, and how far the others may be, which are sums in another order.
INDUCTOR = {"linear": (3, 1e-6), "norm_linear": (1, 1e-5), "layer_norm_linear": (1, 1e-5), "swiglu_mlp": (4, 0.0),
            "experts": (4, 0.0), "grouped": (3, 0.0)}  # fmt: skip


@pytest.mark.parametrize(("model", "bitwise", "limit"), [(name, *row) for name, row in INDUCTOR.items()], ids=INDUCTOR)
@both_formats
def test_inductor(model, config, bitwise, limit):
    layer, x = make(model, config), tokens(model, 300)
    got, expected = forward_backward(layer, x, torch.compile(layer, fullgraph=True)), forward_backward(layer, x)
    assert_same(got[:bitwise], expected[:bitwise])
    for a, b in zip(got[bitwise:], expected[bitwise:]):
        assert relative_error(a, b) < limit


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("model", ("linear", "two", "swiglu_mlp", "experts", "grouped"))
@both_formats
def test_autocast_is_a_cast_of_the_input(model, config, compiled):
    """Of layers without a norm, which reads the input as it is, and whose gradients of the input are no sum."""
    layer, x = make(model, config), tokens(model)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer

    def autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x)

    out, grad_x, *grads = forward_backward(layer, x, autocast)
    assert out.dtype == torch.bfloat16 and grad_x.dtype == torch.float32
    want, want_x, *wanted = forward_backward(layer, x.bfloat16())
    assert_same((out, grad_x, *grads), (want, want_x.float(), *wanted))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert_bitwise_equal(run(x).detach(), layer(x).detach())


NAMES = {"linear": "linear", "norm_linear": "NormLinear", "swiglu_mlp": "SwiGLUMLP", "experts": "swiglu_experts",
         "grouped": "grouped_linear", "fused_mlp": "swiglu_linear", "fused_attention": "linear"}  # fmt: skip


@pytest.mark.parametrize(("model", "name"), NAMES.items(), ids=NAMES)
@both_formats
def test_gradients_of_gradients_raise(model, name, config):
    """Also where grad_output is a constant, which would leave the second gradient out in silence."""
    layer, x = make(model, config), tokens(model).requires_grad_()
    name = name if config is FP8 else ""
    for loss in (layer(x).sum(), layer(x).square().sum()):
        with pytest.raises(
            NotImplementedError, match=rf"{name}.*create_graph=True\) is not supported in low precision; keep the"
        ):
            torch.autograd.grad(loss, x, create_graph=True)


TRANSFORMS = {
    "vmap": lambda layer, x: torch.vmap(layer)(torch.stack([x, x])),
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "grad_of_weights": lambda layer, x: torch.func.grad(lambda p: torch.func.functional_call(layer, p, x).sum())(
        {name: p.detach() for name, p in layer.named_parameters()}
    ),
}


@every_model
@both_formats
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_raise(model, config, transform):
    layer, text = make(model, config), r"torch\.func.*; apply them to a plain copy, unconvert"
    if model == "grouped":
        # `grad` and `jvp` wrap the transposed weight before the layer sees it.
        text += "|would silently be used in high precision|forward AD with _grouped_mm"
    with pytest.raises(NotImplementedError, match=text):
        transform(layer, tokens(model))
    # Plain modules of this package run autograd functions, too.
    if model in ("linear", "two"):
        transform(unconvert(layer), tokens(model))


@pytest.mark.parametrize(("model", "name"), NAMES.items(), ids=NAMES)
@both_formats
def test_batched_gradients_raise(model, name, config):
    """As `jacobian(vectorize=True)` asks for them."""
    layer, x = make(model, config), tokens(model).requires_grad_()
    out, name = layer(x), name if config is FP8 else ""
    with pytest.raises(NotImplementedError, match=rf"{name}.*is_grads_batched=True.* is not supported"):
        torch.autograd.grad(out, x, torch.randn(2, *out.shape), is_grads_batched=True)


@every_model
@both_formats
def test_shapes_on_meta(model, config):
    with torch.device("meta"):
        got = forward_backward(make(model, config), tokens(model))
        assert all(t.device.type == "meta" for t in got)
    expected = forward_backward(make(model), tokens(model))
    assert [t.shape for t in got] == [t.shape for t in expected]
