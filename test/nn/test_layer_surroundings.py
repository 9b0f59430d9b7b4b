"""Every layer where others observe it, hold its weights in a buffer, or change them between forward and backward."""

import pytest
import torch
from every_layer import CONFIGS, every_model, make, tokens
from helpers import FP8, NVFP4, NoHostReads, assert_same, both_formats, forward_backward, replace
from torch import nn

from torchao_blockwise import linear
from torchao_blockwise.nn import grouped_linear
from torchao_blockwise.nn.activations import observe
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def matrices(layer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.dim() > 1}


# --- observers --------------------------------------------------------------------------------------------------------


class Observed:
    """(weight, x, groups, dy) of each GEMM, in the order of forward passes."""

    def __init__(self):
        self.gemms = []

    def __call__(self, weight, x, spec, grad_enabled):
        gemm = [weight, x, spec.groups, None]
        self.gemms.append(gemm)

        def observe_gradient(dy):
            assert gemm[3] is None, "reported twice"
            gemm[3] = dy

        return observe_gradient

    def __enter__(self):
        assert observe(self) is None
        return self

    def __exit__(self, *exception):
        assert observe(None) is self


@both_formats
@every_model
def test_gradients_follow_from_what_is_observed(config, model):
    """By that and nothing else they can be computed again. Nothing is observed in graphs, nor afterwards."""
    layer, x = make(model, config), tokens(model)
    for p in layer.parameters():
        # Norms begin with ones, which would hide that they are left out.
        if p.dim() == 1:
            p.data.add_(torch.randn(p.shape) / 8)
    expected = forward_backward(layer, x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with Observed() as observed:
        assert_same(forward_backward(layer, x), expected)
        count = len(observed.gemms)
        compiled(x)
    layer(x)
    assert count == len(observed.gemms)
    grads = {p: p.grad for p in matrices(layer).values()}
    assert sorted(id(gemm[0]) for gemm in observed.gemms) == sorted(map(id, grads))
    for p, _, groups, dy in observed.gemms:
        p.grad = None
        x = next(gemm[1] for gemm in observed.gemms if gemm[0] is p)
        (linear(x, p) if groups is None else grouped_linear(x, p, groups.ends)).backward(dy)
        assert_bitwise_equal(p.grad, grads[p])


PROFILED = {"linear": "linear", "norm_linear": "NormLinear", "swiglu_mlp": "SwiGLUMLP", "experts": "swiglu_experts",
            "grouped": "grouped_linear"}  # fmt: skip


@pytest.mark.parametrize("how", ("grad", "main_grad", "compiled"))
@pytest.mark.parametrize(("model", "name"), PROFILED.items(), ids=PROFILED)
def test_profiles_name_passes_in_eager_mode(model, name, how):
    """A compiled graph has operations, whose names profiles show anyway."""
    layer = make(model, FP8)
    for p in layer.parameters() if how == "main_grad" else ():
        p.main_grad = torch.zeros(p.shape)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if how == "compiled" else layer
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(tokens(model).requires_grad_()).sum().backward()
    found = [e for e in profile.events() if e.name.startswith("torchao_blockwise.")]
    names = [e.name for e in sorted(found, key=lambda e: e.time_range.start)]
    passes = () if how == "compiled" else ("forward", "backward")
    assert names == [f"torchao_blockwise.{name}.{step}" for step in passes]


class NoHostCopies(NoHostReads):
    """Raises where an operation copies to a device, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        assert device is None or torch.device(device).type == "meta", f"{func} copies to {device}"
        return super().__torch_dispatch__(func, types, args, kwargs)


@every_model
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_step_asks_for_a_value(model, config):
    """The layer's own calls; inside operations this is checked on a GPU, because checks on a CPU do read values."""
    layer, x = make(model, config), tokens(model).requires_grad_()
    with NoHostCopies():
        layer(x).sum().backward()
    assert x.grad.any()


# --- flat buffers -----------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("config", ("fp8", "nvfp4", "high_precision"))
def test_weights_in_one_flat_buffer(model, config, device):
    """At other distances in each layer, which run in turn: what is kept of one layer is not taken for another."""
    separate, flat = ([make(model, CONFIGS[config], torch.bfloat16).to(device) for _ in range(3)] for _ in range(2))
    xs = [tokens(model, 256).to(device, torch.bfloat16) for _ in range(3)]
    buffer, end = torch.zeros(2**19, dtype=torch.bfloat16, device=device), 0
    for layer, gap in zip(flat, (0, 1024, 4096)):
        for p in layer.parameters():
            with torch.no_grad():
                p.data = buffer[end : end + p.numel()].view(p.shape).copy_(getattr(p, "hp", p))
            assert p.untyped_storage().data_ptr() == buffer.data_ptr()
            # Addresses stay multiples of 16 bytes.
            end += -(-p.numel() // 64) * 64 + gap
    # Those in one buffer first: nothing that is kept of the others may make them right.
    got, expected = (
        [result for _ in range(3) for layer, x in zip(layers, xs) for result in forward_backward(layer, x)]
        for layers in (flat, separate)
    )
    assert_same(got, expected)


# --- weights that change between forward and backward -----------------------------------------------------------------


def adamw(weight, foreach: bool) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, foreach=foreach).step()


WRITERS = {
    "copy_": lambda weight: weight.copy_(torch.randn(weight.shape)),
    "add_": lambda weight: weight.add_(1),
    "optimizer": lambda weight: adamw(weight, foreach=False),
    "foreach_optimizer": lambda weight: adamw(weight, foreach=True),
}
BACKENDS = (None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow))
QUANTIZED = {"fp8_weight": replace(FP8, master_weights=False), "nvfp4_weight": replace(NVFP4, master_weights=False)}


def assert_refused(run, x, weight, write) -> None:
    out = run(x)
    with torch.no_grad():
        write(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    # What is computed of the new values is let through.
    run(x).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@both_formats
@every_model
def test_autograd_refuses_a_change_before_backward(model, config, backend):
    """As of a plain layer."""
    layer, x = make(model, config), tokens(model).requires_grad_()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    for weight in matrices(layer).values():
        for write in WRITERS.values():
            assert_refused(run, x, weight, write)


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
@pytest.mark.parametrize("config", QUANTIZED.values(), ids=QUANTIZED)
@every_model
def test_graphs_hold_payloads_until_backward_and_no_transposed_copies(model, config, backend):
    """Else autograd would not see that a payload changes."""
    layer, x = make(model, config), tokens(model).requires_grad_()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    for weight in matrices(layer).values():
        if backend is not None:
            out = run(x)
            held = [t.view(torch.uint8) for t in out.grad_fn.saved_tensors if t.dtype == weight.qdata.dtype]
            assert any(t.data_ptr() == weight.qdata.data_ptr() for t in held)
            transposed = weight.columnwise()[0].view(torch.uint8)
            assert not any(torch.equal(t, transposed) for t in held)
        assert_refused(run, x, weight, WRITERS["copy_"])


def change_and_use(layer, weight, new, x):
    """The output before and after the weight is set to `new`, in one graph."""
    before = layer(x).detach()
    with torch.no_grad():
        weight.copy_(new)
    return before, layer(x)


@pytest.mark.parametrize("backend", BACKENDS[1:], ids=str)
@pytest.mark.parametrize("config", (FP8, NVFP4, *QUANTIZED.values()), ids=("fp8", "nvfp4", *QUANTIZED))
@every_model
def test_a_change_inside_a_graph_is_seen_by_what_follows(model, config, backend):
    if (model, backend) == ("two", "inductor"):
        pytest.skip("inductor rounds the activation between the layers differently, so other codes follow")
    compiled, runs = torch.compile(change_and_use, backend=backend, fullgraph=True), []
    x = tokens(model).requires_grad_()
    for run in (change_and_use, compiled):
        layer, x.grad = make(model, config), None
        weight = next(iter(matrices(layer).values()))
        new = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            without_grad = run(layer, weight, new, x)[1]
        before, after = run(layer, weight, -new, x)
        after.sum().backward()
        runs.append((without_grad, before, after, x.grad, *(p.grad for p in layer.parameters())))
    torch.testing.assert_close(*reversed(runs))
