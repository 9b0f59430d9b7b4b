"""Norms, SwiGLU and its gradients: their accuracy, their bits, and those of copies that are made in the same pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from quantize_cases import INPUTS, assert_same, backends

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, CastOptions
from torchao_blockwise.ops.fused import exponential, reference
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, shape_id

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
kinds = pytest.mark.parametrize("kind", ("rms", "layer"))
# Empty, below a block, a block, ragged. Widths are of whole blocks, of 16s, and of neither: the merged gradient of
# SwiGLU has a block with parts of both halves, or has not.
SHAPES = (
    (0, 128), (128, 0), (1, 1), (16, 16), (63, 500), (129, 127), (130, 48), (16, 256), (272, 128), (144, 400),
)  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
ROWWISE, BOTH = CastOptions(FP8_1X128), CastOptions(FP8_1X128, columnwise=True)
COLUMNWISE = BOTH._replace(rowwise=False)
SQUARES = CastOptions(FP8_1X128, columnwise=True, columnwise_format_name="fp8_128x128")
EPS, ULP = 1e-5, torch.finfo(torch.float32).eps

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


# --- what is computed -------------------------------------------------------------------------------------------------


def vectors(count, dtype=torch.float32, device="cpu"):
    """(weight, bias), scaled so that no value is lost in 16 bits."""
    return tuple(random_tensor(1, count, dtype=dtype, seed=s, device=device)[0] / 16 for s in (1, 2))


def norm_of(x, kind="rms", dtype=None, weight=None, bias=None) -> ops.Norm:
    """With the reference's statistics."""
    statistics = ops.norm_statistics(x, kind, EPS, backend="reference")
    return ops.Norm(x, weight, bias, *statistics, dtype or x.dtype)


class Activation(NamedTuple):
    """inputs: of x, gate and up [M, K]; values: a matrix, of inputs; quantized: its copies by the fused operation."""

    inputs: Callable[..., tuple[Any, ...]]
    reference: Callable[..., torch.Tensor]
    values: Callable[..., torch.Tensor]
    quantized: Callable[..., Any]


def _norm(kind):
    def inputs(x, *_):
        return (norm_of(x, kind, None, *vectors(x.shape[1], device=x.device)),)

    return Activation(inputs, reference.normalize, ops.normalize, ops.norm_quantize)


ACTIVATIONS = {
    "rms": _norm("rms"),
    "layer": _norm("layer"),
    "swiglu": Activation(lambda x, gate, up: (gate, up), reference.swiglu, ops.swiglu, ops.swiglu_quantize),
    "swiglu backward": Activation(
        lambda x, gate, up: (x, gate, up),
        lambda *inputs: torch.cat(reference.swiglu_backward(*inputs), 1),
        lambda *inputs, backend: torch.cat(ops.swiglu_backward(*inputs, backend=backend), 1),
        ops.swiglu_backward_quantize,
    ),
}
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def tensors(*shape, dtype=torch.bfloat16, device="cpu"):
    """x, and gate and up as halves of one projection; the gate reaches far into both tails."""
    m, k = shape
    gate_up = random_tensor(m, 2 * k, dtype=dtype, device=device)
    return random_tensor(m, k, dtype=dtype, device=device, seed=1), *gate_up.chunk(2, 1)


def assert_quantized(activation, inputs, options, backend) -> None:
    """In one pass, as by the reference one operation after the other."""
    expected = ops.quantize_by(activation.reference(*inputs), options, backend="reference")
    assert_same(activation.quantized(*inputs, options, backend=backend), expected)


# --- accuracy ---------------------------------------------------------------------------------------------------------


def assert_statistics(got, x, kind) -> None:
    """Those of the rows in fp64, except for some ulps."""
    mean, rstd = got
    exact = x.double()
    if kind == "layer":
        assert ((mean - exact.mean(-1)).abs() <= 1e-6 * exact.abs().mean(-1)).all()
        # In a row of one element x - mean is exactly 0.
        exact = exact - (exact if x.shape[1] == 1 else exact.mean(-1, keepdim=True))
    expected = (exact.square().mean(-1) + EPS).rsqrt()
    assert ((rstd - expected).abs() <= 5e-7 * expected).all()
    assert (mean is None) == (kind == "rms") and rstd.dtype == torch.float32


# Programs of eight rows that are read once, of four, two and one, and of rows in a loop; few have all of their rows.
ROWS = {
    shape_id(s): random_tensor(*s) for s in ((9, 1), (9, 127), (17, 512), (7, 513), (5, 1500), (3, 4096), (5, 8193))
}
# Squares are of differences from the mean: E[x²] - E[x]² would leave an ulp of 1000² of them.
ROWS |= {
    f"far from zero {columns}": torch.randn(5, columns, generator=torch.Generator().manual_seed(0)) + 1000
    for columns in (511, 8193)
}
WIDE = random_tensor(10, 1000)
ROWS |= {"slice": WIDE[:, 500:], "steps": WIDE[::2, ::2], "transposed": WIDE[:, 1:501].mT.contiguous().mT}


@backends
@dtypes
@kinds
@pytest.mark.parametrize("x", ROWS.values(), ids=ROWS)
def test_statistics_are_those_of_the_fp64_rows(x, kind, dtype, backend, device):
    x = x.to(device, dtype)
    assert_statistics(ops.norm_statistics(x, kind, EPS, backend=backend), x, kind)


@backends
@kinds
def test_statistics_of_bad_rows(kind, backend, device):
    x = torch.ones(4, 40, device=device)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    _, rstd = ops.norm_statistics(x, kind, EPS, backend=backend)
    assert rstd[1].isnan() and not (rstd[2] > 0) and rstd[[0, 3]].isfinite().all()


def test_error_of_exp_and_sigmoid():
    """That of exp's argument, whose product with log2(e) is rounded, and three roundings."""
    x = torch.linspace(exponential.LOW, exponential.HIGH, 1_000_003)
    exact = x.double().exp()
    assert ((reference.exp(x) - exact).abs() <= (3 + x.abs()) * ULP * exact).all()
    assert reference.exp(torch.tensor(0.0)) == 1
    assert 1 + reference.exp(torch.tensor(exponential.HIGH)).double() < 2.0**126
    x = torch.linspace(-exponential.HIGH, 200, 1_000_003)
    exact = x.double().sigmoid()
    bound = (3 - x.clamp(max=0)) * ULP * exact + 1.01 * exponential.LEAST
    assert ((reference.sigmoid(x) - exact).abs() <= bound).all()
    x = torch.tensor([-exponential.HIGH, 0.0, 20.0, -1e30, -float("inf"), float("inf"), float("nan")])
    *values, nan = reference.sigmoid(x).tolist()
    assert values == [0, 0.5, 1, 0, 0, 1] and nan != nan


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
@kinds
def test_normalize_agrees_with_pytorch(kind, dtype, backend, device):
    """Against fp64: half an ulp of the dtype, and those of fp32 that the statistics and each step have."""
    x, (w, b) = random_tensor(64, 200, dtype=dtype, device=device), vectors(200, dtype, device)
    norm = norm_of(x, kind, None, w, b)
    exact, of = x.double(), {"weight": w.double(), "eps": EPS}
    exact = F.layer_norm(exact, (200,), **of) if kind == "layer" else F.rms_norm(exact, (200,), **of)
    terms = (x.double().abs() + x.double().abs().mean(-1, keepdim=True)) * norm.rstd[:, None] * w.double().abs()
    bound = torch.finfo(dtype).eps / 2 * (exact + b.double()).abs() + 12 * ULP * (terms + b.double().abs())
    error = (ops.normalize(norm, backend=backend).double() - (exact + b.double())).abs()
    assert (error <= bound + torch.finfo(dtype).smallest_normal).all()


@backends
@dtypes
def test_swiglu_agrees_with_pytorch(dtype, backend, device):
    """Forward and backward against fp64: half an ulp of the dtype, and those of fp32 that sigmoid has."""
    dh, gate, up = (t / 64 for t in tensors(64, 200, dtype=dtype, device=device))
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
        assert a.is_contiguous()
        assert ((a.double() - exact).abs() <= eps * terms.detach() + smallest).all()


# --- bits -------------------------------------------------------------------------------------------------------------


@backends
@activations
@shapes
def test_shapes(shape, activation, backend, device):
    inputs = activation.inputs(*(t / 16 for t in tensors(*shape, device=device)))
    assert_bitwise_equal(activation.values(*inputs, backend=backend), activation.reference(*inputs))
    for options in (ROWWISE, BOTH, BOTH._replace(padded=True), SQUARES):
        assert_quantized(activation, inputs, options, backend)


def not_finite(x):
    """`x` with NaN, Inf and -Inf in place of its largest magnitudes, which each input has elsewhere."""
    values = x.new_tensor([float("nan"), float("inf"), -float("inf")])
    return x.flatten().index_copy(0, x.abs().flatten().topk(3).indices, values).view(x.shape)


@backends
@pytest.mark.parametrize("parts", ((False, False), (True, False), (False, True)), ids=("bare", "weight", "bias"))
@pytest.mark.parametrize("of", DTYPES, ids=lambda d: f"vectors_{str(d)[6:]}")
@dtypes
def test_norms_of_other_vectors_and_to_other_dtypes(dtype, of, parts, backend, device):
    weight, bias = (t if part else None for t, part in zip(vectors(150, of, device), parts))
    norm = norm_of(random_tensor(33, 150, dtype=dtype, device=device), "layer", torch.bfloat16, weight, bias)
    assert_quantized(ACTIVATIONS["layer"], (norm,), BOTH, backend)


@backends
@activations
@pytest.mark.parametrize("change", (*INPUTS.values(), not_finite), ids=(*INPUTS, "not finite"))
def test_values_dtypes_and_strides(change, activation, backend, device):
    inputs = activation.inputs(*(change(x / 16) for x in tensors(48, 145, device=device)))
    if isinstance(inputs[0], ops.Norm):
        inputs = (inputs[0]._replace(weight=torch.arange(2 * inputs[0].x.shape[1], device=device).float()[::2]),)
    powers_of_2 = (options._replace(power_of_2_scales=True) for options in (ROWWISE, BOTH))
    for options in (BOTH, COLUMNWISE, *powers_of_2):
        assert_quantized(activation, inputs, options, backend)


@backends
@activations
@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not FP8_1X128], ids=lambda f: f.name)
def test_other_formats_run_as_two_operations(fmt, activation, backend, device):
    inputs = activation.inputs(*tensors(33, 150, device=device))
    assert_quantized(activation, inputs, CastOptions(fmt, columnwise=True), backend)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@activations
@pytest.mark.parametrize("backend", ("triton", "auto"))
@pytest.mark.parametrize("shape", ((4096, 7168), (4097, 1407)), ids=shape_id)
def test_one_pass_has_the_bits_of_two_kernels_and_of_the_reference(shape, backend, activation):
    inputs = activation.inputs(*tensors(*shape, device="cuda"))
    got = activation.quantized(*inputs, BOTH, backend=backend)
    y = activation.values(*inputs, backend="triton")
    assert_same(got, ops.quantize(y, FP8_1X128, columnwise=True, backend="triton"))
    assert_same(got, activation.quantized(*inputs, BOTH, backend="reference"))
