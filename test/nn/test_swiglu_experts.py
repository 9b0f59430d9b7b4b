"""SwiGLUExperts: the bits of the operations it is made of, every routing, in high precision, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, NVFP4, replace, weight_calls
from swiglu_layers import (
    DIM,
    HIDDEN,
    ROUTINGS,
    assert_same,
    composed,
    experts_of,
    inputs_of,
    recipes,
    results,
    routings,
)
from torchao.quantization import quantize_

from torchao_blockwise import NVFP4Tensor, experts
from torchao_blockwise.nn import SwiGLUExperts, swiglu_experts
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")

# --- bits -------------------------------------------------------------------------------------------------------------


@recipes
@routings
def test_bits_are_those_of_the_operations(routing, config):
    module = experts_of(config, len(routing[0]))
    x, dy, ends = inputs_of(routing)
    got = results(module, x, dy, ends)
    assert_same(got, results(module, x, dy, ends, composed(module)))
    assert all(t.isfinite().all() for t in got.values())
    last = routing[0][-1]
    assert not got["out"][last:].any() and not got["x"][last:].any()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    for name in ("gate_up", "down"):
        assert not got[name][sizes == 0].any(), "an expert without tokens has a gradient of exact zeros"
        assert got[name][sizes > 0].flatten(1).any(1).all()


@pytest.mark.parametrize("hidden", (96, 128, 130), ids=str)
def test_blocks_of_both_halves(hidden):
    """Blocks of the merged gradient hold parts of both; rows of the second half start off 16 bytes."""
    module = experts_of(FP8, 3, hidden=hidden)
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(module, *inputs), results(module, *inputs, composed(module)))


@pytest.mark.parametrize("weights", (torch.float32, torch.bfloat16), ids=lambda d: f"weights_{str(d)[6:]}")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=lambda d: str(d)[6:])
def test_dtypes(dtype, weights):
    module = experts_of(FP8, 3, dtype=weights)
    inputs = inputs_of(ROUTINGS["ragged"], dtype=dtype)
    got = results(module, *inputs)
    assert_same(got, results(module, *inputs, composed(module)))
    assert (got["out"].dtype, got["x"].dtype, got["down"].dtype) == (dtype, dtype, weights)


VARIANTS = {
    "high_precision": {"save_activations": "high_precision"},
    "reference": {"backend": "reference"},
    "no_master": {"master_weights": False},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("base", (FP8, NVFP4), ids=("fp8", "nvfp4"))
def test_options_do_not_change_bits(base, variant):
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(experts_of(replace(base, **variant), 3), *inputs), results(experts_of(base, 3), *inputs))


def test_each_weight_keeps_its_own_recipe():
    module = experts_of(FP8, 3)
    module.down = experts_of(NVFP4, 3).down
    inputs = inputs_of(ROUTINGS["ragged"])
    assert_same(results(module, *inputs), results(module, *inputs, composed(module)))


@pytest.mark.parametrize("save", ("fp8", "high_precision"))
@pytest.mark.parametrize("needs", ("x", "gate_up", "down", "none"))
def test_only_the_gradients_that_are_needed(needs, save):
    module = experts_of(replace(FP8, save_activations=save), 3)
    x, dy, ends = inputs_of(ROUTINGS["ragged"])
    expected = results(module, x, dy, ends)
    parts = {"x": x, **dict(module.named_parameters())}
    for name, t in parts.items():
        t.grad = None
        t.requires_grad_(name == needs)
    out = module(x, ends)
    assert out.requires_grad == (needs != "none")
    if needs != "none":
        out.backward(dy)
    for name, t in parts.items():
        assert (t.grad is not None) == (name == needs)
        if name == needs:
            assert_bitwise_equal(t.grad, expected[name], name)


def test_autocast_computes_in_its_dtype():
    module, (x, _, ends) = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, ends)
    assert_bitwise_equal(got, module(x.bfloat16(), ends))


def test_gradients_are_added_to_main_grad():
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    expected = results(module, *inputs)
    for p in module.parameters():
        p.main_grad = torch.ones(p.shape)
    got = results(module, *inputs)
    for name, p in module.named_parameters():
        assert got[name] is None and p.grad_added_to_main_grad
        torch.testing.assert_close(p.main_grad - 1, expected[name], atol=1e-6, rtol=1e-5)


def test_weights_are_quantized_where_products_read_them():
    module, inputs = experts_of(FP8, 3), inputs_of(ROUTINGS["ragged"])
    with weight_calls() as calls:
        results(module, *inputs)
    assert (calls.quantize, calls.columnwise, calls.transpose) == (4, 2, 0)
    with torch.no_grad():
        module.down.mul_(2)
    fresh = experts_of(FP8, 3)
    fresh.load_state_dict(module.state_dict())
    assert_same(results(module, *inputs), results(fresh, *inputs))


@recipes
@pytest.mark.parametrize("master_weights", (True, False), ids=("master", "quantised"))
def test_quantize_converts_it(config, master_weights):
    config = replace(config, master_weights=master_weights)
    module, inputs = experts_of(None, 3), inputs_of(ROUTINGS["tail"])
    plain = {name: t.clone() for name, t in module.state_dict().items()}
    quantize_(module, config, filter_fn=experts())
    assert_same(results(module, *inputs), results(experts_of(config, 3), *inputs))
    saved = module.state_dict()
    assert saved.keys() == plain.keys()
    if master_weights:
        assert all(type(t) is torch.Tensor and torch.equal(t, plain[name]) for name, t in saved.items())
    fresh = SwiGLUExperts(3, DIM, HIDDEN)
    quantize_(fresh, config, filter_fn=experts())
    fresh.load_state_dict(saved)
    assert_same(results(fresh, *inputs), results(module, *inputs))


# --- in high precision ------------------------------------------------------------------------------------------------


def by_loop(module, x, ends):
    """Expert by expert, rows after the last group left out."""
    parts, start = [], 0
    for g, end in enumerate(ends.tolist()):
        gate, up = (x[start:end] @ module.gate_up[g].to(x.dtype).T).chunk(2, 1)
        parts.append((F.silu(gate) * up) @ module.down[g].to(x.dtype).T)
        start = end
    return torch.cat((*parts, torch.zeros_like(x[start:])))


@pytest.mark.parametrize("autocast", (False, True), ids=("plain", "autocast"))
@routings
def test_unconverted_it_is_a_loop_over_experts(routing, autocast):
    module = experts_of(None, len(routing[0]))
    x, dy, ends = inputs_of(routing)
    expected = results(module, x, dy, ends, lambda x, ends: by_loop(module, x, ends))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = results(module, x, dy, ends)
    assert got["out"].dtype == (torch.bfloat16 if autocast else torch.float32)
    for name, value in expected.items():
        assert got[name].isfinite().all()
        assert relative_error(got[name], value) < (2e-2 if autocast else 1e-5), name


@pytest.mark.parametrize("which", ("gate_up", "down"))
def test_one_weight_alone_may_be_converted(which):
    module, plain = experts_of(None, 3), experts_of(None, 3)
    setattr(module, which, getattr(experts_of(FP8, 3), which))
    inputs = inputs_of(ROUTINGS["tail"])
    got, expected = results(module, *inputs), results(plain, *inputs)
    for name, value in expected.items():
        assert 0 < relative_error(got[name], value) < 0.1, name


def test_the_error_is_that_of_low_precision():
    exact, module = experts_of(None, 3, 256, 384).double(), experts_of(FP8, 3, 256, 384)
    x, dy, ends = torch.randn(300, 256), torch.randn(300, 256), torch.tensor([100, 110, 300], dtype=torch.int32)
    expected = results(exact, x.double(), dy.double(), ends, lambda x, ends: by_loop(exact, x, ends))
    got = results(module, x, dy, ends)
    for name, value in expected.items():
        assert relative_error(got[name], value) < 0.1, name


# --- refusals ---------------------------------------------------------------------------------------------------------

X, ENDS = torch.zeros(6, DIM), torch.tensor([2, 6], dtype=torch.int32)
GATE_UP, DOWN = torch.zeros(2, 2 * HIDDEN, DIM), torch.zeros(2, DIM, HIDDEN)


@pytest.mark.parametrize(
    "args, error, message",
    (
        ((X.int(), GATE_UP, DOWN), TypeError, "swiglu_experts: x must be bfloat16, float16 or float32, got"),
        ((X[None], GATE_UP, DOWN), ValueError, r"x must be \[M, K\], gate_up \[E, 2H, K\] and down \[E, K, H\], got"),
        ((X, GATE_UP[0], DOWN), ValueError, r"gate_up \[E, 2H, K\]"),
        ((X, GATE_UP[:, :HIDDEN], DOWN), ValueError, "must agree"),
        ((X, GATE_UP[:1], DOWN), ValueError, "must agree"),
        ((X[:, :5], GATE_UP, DOWN), ValueError, "must agree"),
        ((X, GATE_UP, NVFP4Tensor.from_hp(DOWN, block_size=(1, 16))), ValueError, r"down with blocks of \(1, 16\)"),
        ((X, GATE_UP.to("meta"), DOWN), ValueError, "x is on cpu, gate_up on meta, down on cpu; move them together"),
    ),
)  # fmt: skip
def test_refusals(args, error, message):
    with pytest.raises(error, match=message):
        swiglu_experts(*args, ENDS)


@pytest.mark.parametrize("config", (FP8, None), ids=("fp8", "high_precision"))
@pytest.mark.parametrize(
    "ends, error, message",
    (
        ([3, 2], ValueError, r"group_ends\[1\] = 2"),
        ([3, 7], ValueError, r"group_ends\[1\] = 7"),
        ([-1, 6], ValueError, r"group_ends\[0\] = -1"),
        ([6], ValueError, r"group_ends must be \[E\] = \[2\], got shape \[1\]"),
    ),
)
def test_malformed_ends_are_refused_on_a_cpu(config, ends, error, message):
    module = experts_of(config, 2)
    with pytest.raises(error, match=message):
        module(X, torch.tensor(ends, dtype=torch.int32))
