"""ops.matmul and ops.grouped_matmul against the fp64 product of the decoded operands, within an error budget."""

import importlib

import pytest
import torch
from gpu_steps import capture
from grouped_products import (
    PAIRS,
    ROUTINGS,
    Case,
    K,
    N,
    assert_adds,
    assert_close_to_each_group,
    assert_nan_stays_in_its_group,
    backends,
    case_id,
    pair_id,
)
from product_budgets import OUT_DTYPES, accumulation_unit, assert_within_budget
from scaled_products import decoded

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops.groups.ends import clamped_ends
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

# An operand with square blocks comes second: nothing in training has it first, and only the reference computes that.
SQUARE_FIRST = [
    (a, b) for fmts in ((FP8_1X128, FP8_128X128), (NVFP4_1X16, NVFP4_16X16)) for a in fmts[1:] for b in fmts
]
# (M, N, K): empty in each dim, one element, one block, ragged in each dim, odd K, several blocks.
PRODUCTS = (
    (0, 16, 128), (16, 0, 128), (16, 16, 0), (0, 0, 0), (1, 1, 1), (1, 16, 128), (16, 1, 16), (128, 128, 128),
    (33, 47, 65), (63, 100, 500), (130, 129, 257), (64, 32, 592),
)  # fmt: skip
# More than a warp has lanes, not a power of two, most of them empty. Along "k" each group is a program, which take
# long in the interpreter.
MANY = {
    along: ([{3: 2, 31: 1, 32: 1, 40: 3, count - 2: 2}.get(g, 0) for g in range(count)], 2)
    for along, count in (("m", 300), ("k", 300 if torch.cuda.is_available() else 70))
}
pairs = pytest.mark.parametrize("pair", PAIRS[""], ids=pair_id)


def of_kinds(*alongs: str):
    kinds = [(along, pair) for along in alongs for pair in PAIRS[along]]
    return pytest.mark.parametrize(("along", "pair"), kinds, ids=[f"{a or 'plain'}-{pair_id(p)}" for a, p in kinds])


every_kind, grouped_kinds = of_kinds("", "m", "k"), of_kinds("m", "k")


def plain(product, pair, device="cpu") -> Case:
    m, n, k = product
    return Case("", pair, ([m], 0), device, n, k)


def rows():
    """(along, pair, routing, n, k)."""
    for pair in PAIRS[""]:
        yield from (("", pair, ([m], 0), n, k) for m, n, k in PRODUCTS)
    for along in "mk":
        for pair in PAIRS[along]:
            yield from ((along, pair, routing, N, K) for routing in ROUTINGS.values())
            features = ((0, 32), (32, 0), (1, 1), (129, 65), (130, 272))
            yield from ((along, pair, ([3, 0, 140], 5), n, k) for n, k in features)
            yield along, pair, MANY[along], 16, 32
            if pair[0].has_global_scale:
                yield from ((along, pair, (*routing, (True, True)), N, K) for routing in ROUTINGS.values())
                some = ROUTINGS["ragged_and_a_tail"]
                yield from ((along, pair, (*some, own), N, K) for own in ((True, False), (False, True)))
    for pair in PAIRS["m"]:
        # Tiles of all heights.
        yield from (("m", pair, ([tokens + 3, 0, tokens - 3], 0), N, K) for tokens in (16, 64, 200))


def of_rows(*alongs: str):
    chosen = [row for row in rows() if row[0] in alongs]
    ids = [case_id(*row)[:80] for row in chosen]
    return pytest.mark.parametrize(("along", "pair", "routing", "n", "k"), chosen, ids=ids)


# --- error budgets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs are made of NaN: what is not written shows."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@backends
@of_rows("", "m", "k")
@pytest.mark.usefixtures("poisoned_memory")
def test_is_within_the_error_budget(along, pair, routing, n, k, backend, device):
    case = Case(along, pair, routing, device, n, k)
    out = case.run(backend=backend)
    assert out.shape == ((len(case.sizes), n, k) if along == "k" else (case.tokens, n))
    assert out.is_contiguous() and out.dtype is torch.float32
    assert_close_to_each_group(case, out, backend)
    if along and backend == "reference":
        for index, a, b in case.groups():
            expected = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
            assert_bitwise_equal(out[index], expected.expand_as(out[index]))
    if not along and k == 0:
        bias = torch.arange(float(n), device=device)
        assert torch.equal(case.run(backend=backend, bias=bias), bias.expand(case.tokens, -1))


@pytest.mark.parametrize("pair", SQUARE_FIRST, ids=pair_id)
def test_reference_multiplies_square_blocks_first_too(pair):
    for product in PRODUCTS:
        case = plain(product, pair)
        assert_within_budget(case.run(backend="reference"), case.a, case.b, case.k, 2.0**-24)


@backends
@every_kind
def test_rounds_to_out_dtype_whatever_autocast_says(along, pair, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    for out_dtype in OUT_DTYPES:
        out = case.run(out_dtype, backend=backend)
        assert out.dtype is out_dtype
        assert_close_to_each_group(case, out, backend)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert_bitwise_equal(case.run(out_dtype, backend=backend), out)


@backends
@pytest.mark.parametrize(
    ("out_dtype", "bias_dtype"),
    ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float16)),
    ids=("bfloat16_of_float32", "float16_of_bfloat16", "float32_of_float16"),
)
@pairs
def test_bias_is_added_before_the_only_rounding(pair, bias_dtype, out_dtype, backend, device):
    case = plain((37, 40, 200), pair, device)
    bias = torch.linspace(-9, 9, 40, device=device).to(bias_dtype)
    out = case.run(out_dtype, bias=bias, backend=backend)
    assert out.dtype is out_dtype
    assert_within_budget(out, case.a, case.b, 200, accumulation_unit(backend, pair[0], device), bias)


@backends
@pairs
def test_small_integers_and_zeros_multiply_exactly(pair, backend, device):
    values = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, -4.0], device=device)
    generator = torch.Generator().manual_seed(0)
    a, b = (values[torch.randint(0, 6, (n, 256), generator=generator).to(device)] for n in (48, 32))
    # An amax of 448 = 7 · 64 or 2688 makes all scales powers of two; it meets zeros in the other operand.
    top = 448.0 if pair[0].element is E4M3 else 6.0
    for x, other, column in ((a, b, 0), (b, a, 1)):
        block = pair[0].block[1]
        x[:, column::block], other[:, column::block] = top, 0.0
    a[5] = 0.0
    case = plain((48, 32, 256), pair, device)
    case.a, case.b = (ops.quantize(x, fmt, backend="reference").rowwise for x, fmt in zip((a, b), pair))
    out = case.run(backend=backend)
    # In NVFP4 global_scale = 6 / 2688 rounds.
    rtol = 0 if pair[0].element is E4M3 else 2.0**-21
    torch.testing.assert_close(out, (a.double() @ b.double().mT).float(), rtol=rtol, atol=0)


@grouped_kinds
def test_programs_write_nothing_of_each_other(along, pair, device, monkeypatch):
    """Bits do not depend on the order of programs: here the last one comes first."""
    if device == "cuda":
        pytest.skip("a GPU takes another order")
    case = Case(along, pair, ROUTINGS["ragged_and_a_tail"], device)
    expected = case.run(backend="triton")
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    in_order = interpreter.set_grid_idx
    monkeypatch.setattr(interpreter, "set_grid_idx", lambda x, y, z: in_order(interpreter.grid_dim[0] - 1 - x, y, z))
    assert_bitwise_equal(case.run(backend="triton"), expected)


def before_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory that goes on with bytes of 0xff: NaN in every dtype."""
    memory = torch.full((x.numel() + 2**16,), 0xFF, dtype=torch.uint8, device=x.device)
    memory = torch.cat((x.contiguous().view(torch.uint8).flatten(), memory))
    return memory[: x.nbytes].view(x.dtype).view(x.shape)


@grouped_kinds
@pytest.mark.parametrize(
    "ends", ([10, 4, 30], [10, 500, 20], [-5, -1, 12], [2**31 - 1, -(2**31), 7], [-(2**31)] * 3), ids=str
)
def test_kernels_clamp_what_nobody_checks(along, pair, ends, device, machine):
    """As on a GPU, where the host looks at no value: the result is that of the ends clamped."""
    # Padded, the tokens fill rows of 16 bytes in both formats: behind a row lies the next one.
    case = Case(along, pair, ([10, 10, 10], 21), device)
    case.a, case.b = (x._replace(qdata=before_nan(x.qdata), scale=before_nan(x.scale)) for x in (case.a, case.b))
    machine.reads_no_group_ends()
    case.ends = torch.tensor(ends, dtype=torch.int32, device=device)
    out = case.run(backend="triton")
    limit = case.tokens if along == "m" else case.a.qdata.shape[1] * case.a.format.element.per_byte
    case.sizes = clamped_ends(case.ends, limit).diff(prepend=case.ends.new_zeros(1)).tolist()
    assert_close_to_each_group(case, out, "triton")


# --- NaN and Inf ------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=str)
@pairs
def test_what_is_not_finite_reaches_its_row_in_fp8_and_all_in_nvfp4(pair, value, backend, device):
    x, case = [random_tensor(*shape, device=device) * 2.0**-6 for shape in ((40, 300), (300, 300))], None
    rows = slice(290 // pair[1].block[0] * pair[1].block[0], None if pair[1].block[0] > 1 else 291)
    for hurt, at, hit in ((0, (7, 200), (7, slice(None))), (1, (290, 299), (slice(None), rows))):
        case = plain((40, 300, 300), pair, device)
        poisoned = [t.clone() for t in x]
        poisoned[hurt][at] = value
        case.a, case.b = (ops.quantize(t, fmt, backend="reference").rowwise for t, fmt in zip(poisoned, pair))
        expected = torch.ones(40, 300, dtype=torch.bool, device=device)
        expected[hit if pair[0].element is E4M3 else ...] = False
        assert torch.equal(case.run(torch.bfloat16, backend=backend).isfinite(), expected)


@backends
@grouped_kinds
def test_nan_stays_in_its_group(along, pair, backend, device):
    assert_nan_stays_in_its_group(along, pair, device, lambda case: case.run(backend=backend))


# --- adding to a gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("reference", "triton", None), ids=str)
@of_rows("", "k")
def test_adds_to_a_gradient(along, pair, routing, n, k, backend, device):
    case = Case(along, pair, routing, device, n, k)
    right = case.run(backend=backend)

    def add(out):
        before = out._version
        assert case.add(out, backend=backend) is out
        assert out._version > before

    assert_adds(case, add, right)


# --- FP4 instructions -------------------------------------------------------------------------------------------------

FP4_ROWS = [row for row in rows() if row[1][0] is NVFP4_1X16 and len(row[2]) == 2]


@pytest.fixture
def dots(monkeypatch) -> list:
    """The shapes of the `tl.dot_scaled` that a launch takes, which the interpreter computes by the documented formula.

    Packed elements and block scales reach the dot as they lie in memory, so what can be wrong is which of them: rows
    and columns, first and second element of a byte, masks at ragged ends, scales of square blocks.
    """
    if not ops.backend.interpreting():
        pytest.skip("the interpreter runs where there is no GPU")
    interpreter, seen = pytest.importorskip("triton.runtime.interpreter"), []

    def create_dot_scaled(builder, a, a_scale, a_kind, b, b_scale, b_kind, fast, a_along_k, b_along_k, acc):
        assert a_along_k and b_along_k and a_scale.dtype.scalar.name == b_scale.dtype.scalar.name == "fp8e4nv"
        x, xs, y, ys, sums = (torch.tensor(t.data) for t in (a, a_scale, b, b_scale, acc))
        seen.append((len(x), len(ys), 2 * len(y)))
        xs, ys = (scale.view(torch.uint8).view(torch.float8_e4m3fn) for scale in (xs, ys))
        out = sums.double() + decoded(x, xs) @ decoded(y.mT, ys).mT
        return interpreter.TensorHandle(out.float().numpy(), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)
    kernels = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_triton")
    monkeypatch.setattr(kernels, "decodes", lambda fmt, device: False)
    return seen


@pytest.mark.parametrize(("along", "pair", "routing", "n", "k"), FP4_ROWS, ids=[case_id(*row)[:80] for row in FP4_ROWS])
def test_gemms_by_fp4_instructions(along, pair, routing, n, k, dots):
    case = Case(along, pair, routing, "cpu", n, k)
    out = case.run(backend="triton")
    assert_close_to_each_group(case, out, "triton")
    assert bool(dots) == (0 not in (sum(case.sizes), n, k)) and all(dot[0] == 128 for dot in dots)
    if not along and 0 not in (*out.shape, k):
        bias, before = torch.linspace(-9, 9, n), torch.randn_like(out)
        assert torch.equal(case.add(before.clone(), backend="triton"), before + out)
        out = case.run(torch.bfloat16, bias=bias, backend="triton")
        assert_within_budget(out, case.a, case.b, k, accumulation_unit("triton", pair[0], "cpu"), bias)
        case.a.scale.view(torch.uint8)[-1, 0] = 0x7F
        out = case.run(backend="triton")
        assert out[-1].isnan().all() and out.isnan().sum() == n


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_weights_of_more_than_2_to_the_31_elements(pair):
    """The last experts lie behind what 32 bits can address."""
    experts, n, k = 34, 8192, 8192
    w = torch.zeros(1, n, k, device="cuda", dtype=torch.bfloat16).normal_()
    weight = ops.quantize(w, pair[1]).rowwise
    b = weight._replace(
        qdata=weight.qdata.expand(experts, -1, -1).contiguous(), scale=weight.scale.expand(experts, -1, -1).contiguous()
    )
    a = ops.quantize(torch.randn(300, k, device="cuda"), pair[0]).rowwise
    ends = torch.zeros(experts, dtype=torch.int32, device="cuda")
    ends[-2:] = torch.tensor([100, 300])
    out = ops.grouped_matmul(a, b, ends, out_dtype=torch.float32, backend="triton")
    only = weight._replace(qdata=weight.qdata[0], scale=weight.scale[0])
    assert_within_budget(out, a, only, k, accumulation_unit("triton", a.format, "cuda"))


@pytest.mark.gpu
@grouped_kinds
@pytest.mark.parametrize("backend", ("triton", None))
@pytest.mark.filterwarnings("ignore:.*auto uses")
def test_a_cuda_graph_follows_the_routing(along, pair, backend):
    """One capture, replayed with other ends: nothing of them is on the host. On Hopper AUTO takes Gluon."""
    case = Case(along, pair, ([300, 0, 60, 140], 12), "cuda")
    graph, out = capture(lambda: case.run(backend=backend))
    for sizes in ((0, 128, 256, 0), (512, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)):
        case.ends.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        assert_bitwise_equal(out, case.run(backend=backend))
