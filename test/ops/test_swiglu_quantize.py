"""ops.swiglu_quantize: e^x of its own against fp64, SwiGLU and its gradients, and their bits beside `quantize`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, CastOptions
from torchao_blockwise.ops.fused.swiglu import exponential, reference
from torchao_blockwise.testing import SHAPES, assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
EVERY_SHAPE = (*SHAPES, (130, 48), (16, 256), (272, 128), (144, 400))
# H of whole blocks, of 16s, and ragged: the merged gradient has a block with parts of both, or has not.
shapes = pytest.mark.parametrize("shape", EVERY_SHAPE, ids=shape_id)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
# Many programs take seconds in the interpreter: large shapes have both copies at once, and one dtype.
LARGE = ((257, 384), (300, 576), (272, 128), (144, 400))
ROWWISE, BOTH = CastOptions(FP8_1X128), CastOptions(FP8_1X128, columnwise=True)
ULP = torch.finfo(torch.float32).eps

try:
    import triton
    import triton.language as tl

    from torchao_blockwise.ops.device.elements import reciprocal
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def _reciprocal_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
        offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y_ptr + offsets, reciprocal(tl.load(x_ptr + offsets)))


def gate_up_dh(*shape, dtype=torch.bfloat16, device="cpu"):
    """gate and up as halves of one projection, and a gradient; the gate reaches far into both tails."""
    m, h = shape
    gate_up = random_tensor(m, 2 * h, dtype=dtype, device=device)
    dh = random_tensor(m, h, dtype=dtype, device=device, seed=1)
    return *gate_up.chunk(2, 1), dh


def sigmoid(g):
    """Of the reference, which the tests of accuracy hold to fp64."""
    return reference.sigmoid(g)


def swiglu_by_hand(gate, up):
    g = gate.float()
    return ((g * sigmoid(g)) * up.float()).to(gate.dtype)


def gradients_by_hand(dh, gate, up):
    d, g, u = dh.float(), gate.float(), up.float()
    s = sigmoid(g)
    dgate = (d * u) * (s * (1 + g * (1 - s)))
    return dgate.to(gate.dtype), (d * (g * s)).to(gate.dtype)


def quantized(x, options):
    """By the reference, as an operation of its own."""
    return ops.quantize_by(x, options, backend="reference")


def assert_copies_equal(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_operands_equal(a, b)


def assert_both_are_quantized(gate, up, dh, options, backend) -> None:
    """SwiGLU and its gradients, as `quantized` does it to what they are by hand."""
    got = ops.swiglu_quantize(gate, up, options, backend=backend)
    assert_copies_equal(got, quantized(swiglu_by_hand(gate, up), options))
    got = ops.swiglu_backward_quantize(dh, gate, up, options, backend=backend)
    assert_copies_equal(got, quantized(torch.cat(gradients_by_hand(dh, gate, up), 1), options))


# --- accuracy ---------------------------------------------------------------------------------------------------------


def test_error_of_exp():
    """That of its argument, whose product with log2(e) is rounded, and three roundings."""
    x = torch.linspace(exponential.LOW, exponential.HIGH, 1_000_003)
    exact = x.double().exp()
    assert ((reference.exp(x) - exact).abs() <= (3 + x.abs()) * ULP * exact).all()
    assert reference.exp(torch.tensor(0.0)) == 1


def test_error_of_sigmoid():
    x = torch.linspace(-exponential.HIGH, 200, 1_000_003)
    exact = x.double().sigmoid()
    bound = (3 - x.clamp(max=0)) * ULP * exact + 1.01 * exponential.LEAST
    assert ((sigmoid(x) - exact).abs() <= bound).all()
    zero, half, one = sigmoid(torch.tensor([-exponential.HIGH, 0.0, 20.0]))
    assert zero == 0 and half == 0.5 and one == 1
    assert sigmoid(torch.tensor([-1e30, -float("inf")])).tolist() == [0, 0]
    assert 1 + reference.exp(torch.tensor(exponential.HIGH)).double() < 2.0**126


@pytest.mark.gpu
def test_reciprocals_are_rounded_right():
    """Of every mantissa, in the first binade and in the last."""
    mantissas = torch.arange(2**23, dtype=torch.int32, device="cuda")
    x = torch.cat([mantissas + (exponent + 127 << 23) for exponent in (0, 125)]).view(torch.float32)
    y = torch.empty_like(x)
    _reciprocal_kernel[(x.numel() // 1024,)](x, y, SIZE=1024)
    assert_bitwise_equal(y, (1 / x.double()).float())


@backends
@dtypes
def test_agrees_with_pytorch(dtype, backend, device):
    """Forward and backward against fp64: half an ulp of the dtype, and those of fp32 that sigmoid has."""
    gate, up, dh = (t / 64 for t in gate_up_dh(64, 200, dtype=dtype, device=device))
    g, u = (t.double().requires_grad_() for t in (gate, up))
    h = F.silu(g) * u
    h.backward(dh.double())
    s = g.detach().sigmoid()
    eps = torch.finfo(dtype).eps / 2 + (5 + g.detach().abs()) * ULP + 1.01 * exponential.LEAST / s
    smallest = torch.finfo(dtype).smallest_normal
    got = ops.swiglu(gate, up, backend=backend), *ops.swiglu_backward(dh, gate, up, backend=backend)
    # 1 + g · (1 - s): around its zero its terms set the error, and 1 - s is off by an ulp of 1 until s is 1, at 17.
    dgate_terms = (dh.double() * u * g.sigmoid()).abs() * (1 + g.abs() * (1 - g.sigmoid()) + g.abs().clamp(max=17))
    for a, exact, terms in zip(got, (h, g.grad, u.grad), (h.abs(), dgate_terms, u.grad.abs())):
        assert ((a.double() - exact).abs() <= eps * terms.detach() + smallest).all()


# --- bits -------------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize(
    ("shape", "dtype"), [(s, d) for s in EVERY_SHAPE for d in DTYPES if s not in LARGE or d is DTYPES[0]], ids=str
)
def test_swiglu_and_its_gradients_are_their_definitions(shape, dtype, backend, device):
    gate, up, dh = gate_up_dh(*shape, dtype=dtype, device=device)
    gate, up, dh = gate / 16, up / 16, dh / 16
    assert_bitwise_equal(ops.swiglu(gate, up, backend=backend), swiglu_by_hand(gate, up))
    got, expected = ops.swiglu_backward(dh, gate, up, backend=backend), gradients_by_hand(dh, gate, up)
    for a, b, name in zip(got, expected, ("dgate", "dup")):
        assert a.is_contiguous()
        assert_bitwise_equal(a, b, name)


@backends
@pytest.mark.parametrize(
    ("shape", "copies"), [(s, c) for s in EVERY_SHAPE for c in COPIES if s not in LARGE or c == "both"], ids=str
)
def test_quantized_in_the_same_pass(shape, copies, backend, device):
    gate, up, dh = gate_up_dh(*shape, device=device)
    copies = COPIES[copies]
    # A rowwise copy knows no padding.
    for padded in (False, True) if copies[1] else (False,):
        assert_both_are_quantized(gate, up, dh, CastOptions(FP8_1X128, *copies, padded=padded), backend)


@backends
@dtypes
def test_dtypes(dtype, backend, device):
    gate, up, dh = gate_up_dh(65, 200, dtype=dtype, device=device)
    assert_both_are_quantized(gate / 16, up / 16, dh.float() / 16, BOTH, backend)


@backends
def test_power_of_2_scales(backend, device):
    gate, up, dh = gate_up_dh(65, 128, device=device)
    for options in (ROWWISE, BOTH):
        assert_both_are_quantized(gate, up, dh, options._replace(power_of_2_scales=True), backend)


@backends
@pytest.mark.parametrize(
    "layout", (lambda x: x.mT.contiguous().mT, lambda x: x[::2], lambda x: x[:, 1:]), ids=("transposed", "rows", "odd")
)
def test_strides_do_not_matter(layout, backend, device):
    gate, up, dh = gate_up_dh(48, 145, device=device)
    gate, up, dh = layout(gate), layout(up), layout(dh)
    plain = [t.clone(memory_format=torch.contiguous_format) for t in (gate, up, dh)]
    expected = ops.swiglu_quantize(*plain[:2], BOTH, backend="reference")
    assert_copies_equal(ops.swiglu_quantize(gate, up, BOTH, backend=backend), expected)
    expected = ops.swiglu_backward_quantize(plain[2], *plain[:2], BOTH, backend="reference")
    assert_copies_equal(ops.swiglu_backward_quantize(dh, gate, up, BOTH, backend=backend), expected)


@backends
@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not FP8_1X128], ids=lambda f: f.name)
def test_other_formats_run_as_two_operations(fmt, backend, device):
    assert_both_are_quantized(*gate_up_dh(33, 150, device=device), CastOptions(fmt, columnwise=True), backend)


@backends
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")), ids=str)
@pytest.mark.parametrize("where", ("gate", "up", "dh"))
def test_special_numbers_never_become_finite(where, value, backend, device):
    tensors = dict(zip(("gate", "up", "dh"), (t / 64 for t in gate_up_dh(9, 150, device=device))))
    tensors[where][4, 6] = value
    gate, up, dh = tensors.values()
    h, gradients = ops.swiglu(gate, up, backend=backend), ops.swiglu_backward(dh, gate, up, backend=backend)
    expected = F.silu(gate.float()) * up.float()
    assert h[4, 6].isfinite() == expected[4, 6].isfinite()
    assert any(not g[4, 6].isfinite() for g in gradients)
    rowwise, _ = ops.swiglu_quantize(gate, up, ROWWISE, backend=backend)
    assert ops.dequantize(rowwise)[4, 6].isfinite() == h[4, 6].isfinite()
    assert ops.dequantize(rowwise)[3].isfinite().all()


X = torch.ones(4, 32)
REFUSALS = {
    "shape": (
        lambda: ops.swiglu(X, X[:, 1:]),
        ValueError,
        "swiglu: gate and up must agree in shape, got [4, 32] and [4, 31]",
    ),
    "dtype": (
        lambda: ops.swiglu_quantize(X, X.bfloat16(), ROWWISE),
        TypeError,
        "swiglu_quantize: gate and up must have one dtype, got torch.float32 and torch.bfloat16",
    ),
    "f64": (
        lambda: ops.swiglu_backward(X.double(), X, X),
        TypeError,
        "swiglu_backward: dh must be bfloat16, float16 or float32, got torch.float64; cast it first",
    ),
    "3-D": (
        lambda: ops.swiglu(X[None], X[None]),
        ValueError,
        "swiglu: gate must be [M, H], got shape [1, 4, 32]; reshape it",
    ),
    "nothing": (
        lambda: ops.swiglu_backward_quantize(X, X, X, CastOptions(FP8_1X128, rowwise=False)),
        ValueError,
        "swiglu_backward_quantize: nothing to compute; ask for rowwise, columnwise or both",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "auto"))
@pytest.mark.parametrize("shape", ((4096, 2048), (4097, 1407)), ids=shape_id)
def test_one_pass_has_the_bits_of_two_kernels_and_of_the_reference(shape, backend):
    gate, up, dh = gate_up_dh(*shape, device="cuda")
    got = ops.swiglu_quantize(gate, up, BOTH, backend=backend)
    h = ops.swiglu(gate, up, backend="triton")
    assert_copies_equal(got, ops.quantize(h, FP8_1X128, columnwise=True, backend="triton"))
    assert_copies_equal(got, ops.swiglu_quantize(gate, up, BOTH, backend="reference"))
    got = ops.swiglu_backward_quantize(dh, gate, up, BOTH, backend=backend)
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="triton"), 1)
    assert_copies_equal(got, ops.quantize(merged, FP8_1X128, columnwise=True, backend="triton"))
    assert_copies_equal(got, ops.swiglu_backward_quantize(dh, gate, up, BOTH, backend="reference"))
