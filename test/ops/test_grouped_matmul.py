"""ops.grouped_matmul: each group as ops.matmul multiplies it; exact zeros of no group; ends of any kind; refusals."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op
from torchao_blockwise.ops.groups.ends import as_groups, clamped_ends, padded_tokens
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

sys.path.append(str(Path(__file__).parent))
from test_matmul import accumulation_unit, assert_within_budget, out_dtypes, pair_id

PAIRS = {
    "m": ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)),
    "k": ((FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_1X16)),
}
# name: (sizes of the groups, tokens after the last one)
ROUTINGS = {
    "one_group": ([130], 0),
    "one_group_and_a_tail": ([37], 3),
    "empty_first_middle_and_last": ([0, 5, 0, 0, 129, 1, 0], 0),
    "ragged_and_a_tail": ([130, 1, 64, 17], 70),
    "all_to_the_second": ([0, 200, 0, 0], 0),
    "multiples_of_every_block": ([128, 256, 128], 128),
    "nobody": ([0, 0, 0], 21),
    "no_tokens": ([0, 0], 0),
    "more_groups_than_tokens": ([1, 0, 0, 0, 0, 0, 2], 1),
    # As many tiles as there can be.
    "tiles_of_one_token": ([1, 1, 1], 1),
}
N, K = 40, 200

routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
along_and_pairs = pytest.mark.parametrize(
    ("along", "pair"),
    [(along, pair) for along, pairs in PAIRS.items() for pair in pairs],
    ids=[f"{along}-{pair_id(pair)}" for along, pairs in PAIRS.items() for pair in pairs],
)
pairs_along_k = pytest.mark.parametrize("pair", PAIRS["k"], ids=pair_id)


class Case:
    """Operands of a grouped product and, group by group, of the products that it stands for."""

    def __init__(self, along, pair, routing, device, n: int = N, k: int = K):
        sizes, tail = routing
        self.along, self.pair, self.device, self.n, self.k = along, pair, device, n, k
        self.sizes, self.tokens = sizes, sum(sizes) + tail
        self.ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
        if along == "m":
            self.a = quantize(values(self.tokens, k, 1), pair[0], device)
            self.b = quantize(random_tensor(len(sizes), n, k, seed=2) * 2.0**-6, pair[1], device)
        else:
            self.a, self.b = (
                quantize(self.padded(values(self.tokens, columns, seed)).mT, fmt, device)
                for columns, seed, fmt in ((n, 1, pair[0]), (k, 2, pair[1]))
            )

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ..] with each group padded to whole blocks: what a columnwise copy is quantized from."""
        block, rows = self.pair[0].block[1], x[: sum(self.sizes)]
        out = x.new_zeros(padded_tokens(self.tokens, len(self.sizes), block), x.shape[1])
        at = 0
        for group in rows.split(self.sizes):
            out[at : at + len(group)] = group
            at += -(-len(group) // block) * block
        return out

    def groups(self):
        """(index of the output, a, b) of each group's plain product."""
        row = block = 0
        for g, size in enumerate(self.sizes):
            if self.along == "m":
                end = row + size
                scale = self.a.scale[:, row:end] if self.a.format.transposed_scales else self.a.scale[row:end]
                a = self.a._replace(qdata=self.a.qdata[row:end], scale=scale)
                yield slice(row, end), a, self.b._replace(qdata=self.b.qdata[g], scale=self.b.scale[g])
                row = end
            else:
                end = block - (-size // self.a.format.block[1])
                yield g, *(columns(x, block, end) for x in (self.a, self.b))
                block = end

    def run(self, out_dtype=torch.float32, **options) -> torch.Tensor:
        return ops.grouped_matmul(self.a, self.b, self.ends, along=self.along, out_dtype=out_dtype, **options)

    def add(self, out, **options) -> torch.Tensor:
        return ops.add_grouped_matmul_(out, self.a, self.b, self.ends, **options)


def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    return random_tensor(rows, columns, seed=seed) * 2.0**-6


def quantize(x: torch.Tensor, fmt, device):
    return ops.quantize(x.to(device), fmt, backend="reference").rowwise


def columns(q, first: int, end: int):
    """Blocks [first, end) of an operand's contraction."""
    width = q.format.block[1] // q.format.element.per_byte
    scale = q.scale[first:end] if q.format.transposed_scales else q.scale[:, first:end]
    return q._replace(qdata=q.qdata[:, first * width : end * width], scale=scale)


def assert_close_to_each_group(case: Case, out: torch.Tensor, backend: str) -> None:
    """Within the plain product's budget in each group, and exactly zero where no group is."""
    rest = torch.ones_like(out, dtype=torch.bool)
    for index, a, b in case.groups():
        contraction = a.qdata.shape[1] * a.format.element.per_byte
        if contraction:
            assert_within_budget(out[index], a, b, contraction, accumulation_unit(backend, a.format, case.device))
            rest[index] = False
    assert (out[rest] == 0).all()


# --- values -----------------------------------------------------------------------------------------------------------


@routings
@along_and_pairs
def test_reference_is_the_plain_product_of_each_group(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = case.run(out_dtype, backend="reference")
        expected = torch.zeros_like(out)
        for index, a, b in case.groups():
            expected[index] = ops.matmul(a, b, out_dtype=out_dtype, backend="reference")
        assert_bitwise_equal(out, expected)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs are made of NaN: what is not written shows."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@routings
@along_and_pairs
@pytest.mark.usefixtures("poisoned_memory")
def test_triton_is_within_the_error_budget(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    out = case.run(backend="triton")
    shape = (case.tokens, N) if along == "m" else (len(case.sizes), N, K)
    assert out.shape == shape and out.is_contiguous() and out.dtype is torch.float32
    assert_close_to_each_group(case, out, "triton")


@backends
@pytest.mark.parametrize(("n", "k"), ((1, 1), (16, 128), (129, 65), (130, 272)), ids=str)
@along_and_pairs
def test_features(along, pair, n, k, backend, device):
    case = Case(along, pair, ([3, 0, 140], 5), device, n, k)
    assert_close_to_each_group(case, case.run(backend=backend), backend)


@backends
@out_dtypes
@along_and_pairs
def test_rounds_to_out_dtype(along, pair, out_dtype, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    out = case.run(out_dtype, backend=backend)
    assert out.dtype is out_dtype
    assert_close_to_each_group(case, out, backend)


@backends
@pytest.mark.parametrize(("n", "k"), ((0, 32), (32, 0)), ids=("N0", "K0"))
@along_and_pairs
def test_empty_features(along, pair, n, k, backend, device):
    case = Case(along, pair, ([3, 2], 1), device, n, k)
    out = case.run(backend=backend)
    assert out.shape == ((6, n) if along == "m" else (2, n, k))
    assert (out == 0).all()


@along_and_pairs
def test_many_groups(along, pair, device):
    """More than a warp has lanes, not a power of two, most of them empty."""
    # Along "k" each group is a program, which take long in the interpreter.
    groups = 300 if along == "m" or device == "cuda" else 70
    sizes = [0] * groups
    for g, size in ((3, 2), (31, 1), (32, 1), (40, 3), (groups - 2, 2)):
        sizes[g] = size
    case = Case(along, pair, (sizes, 2), device, 16, 32)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@pytest.mark.parametrize("tokens_a_group", (16, 64, 200), ids="tokens{}".format)
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tiles_of_all_heights(pair, tokens_a_group, device):
    case = Case("m", pair, ([tokens_a_group + 3, 0, tokens_a_group - 3], 0), device)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@along_and_pairs
def test_programs_write_nothing_of_each_other(along, pair, device, monkeypatch):
    """Bits do not depend on the order of programs: here the last one comes first."""
    if device == "cuda":
        pytest.skip("a GPU takes an order of its own")
    case = Case(along, pair, ROUTINGS["ragged_and_a_tail"], device)
    expected = case.run(backend="triton")
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    in_order = interpreter.set_grid_idx
    monkeypatch.setattr(interpreter, "set_grid_idx", lambda x, y, z: in_order(interpreter.grid_dim[0] - 1 - x, y, z))
    assert_bitwise_equal(case.run(backend="triton"), expected)


# --- what is of no group ----------------------------------------------------------------------------------------------


def nan_payload(q, rows: slice):
    """The operand with NaN in the payload (e4m3), or in the block scales, of these rows."""
    q = q._replace(qdata=q.qdata.clone(), scale=q.scale.clone())
    q.qdata[rows].view(torch.uint8).fill_(0x7F)
    scale = q.scale.mT[rows] if q.format.transposed_scales else q.scale[rows]
    scale.fill_(float("nan")) if scale.dtype == torch.float32 else scale.view(torch.uint8).fill_(0x7F)
    return q


@backends
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tokens_of_no_group_are_zeros_whatever_they_hold(pair, backend, device):
    case = Case("m", pair, ([130, 1, 0], 150), device)
    expected = case.run(backend=backend)
    case.a = nan_payload(case.a, slice(131, None))
    assert_bitwise_equal(case.run(backend=backend), expected)
    assert (expected[131:] == 0).all() and expected[:131].isfinite().all()


@backends
@along_and_pairs
def test_a_tensor_scale_of_nan_leaves_what_is_of_no_group_zero(along, pair, backend, device):
    if not pair[0].has_global_scale:
        pytest.skip("no tensor scale")
    case = Case(along, pair, ([0, 17, 0], 4), device)
    case.a = case.a._replace(global_scale=torch.full_like(case.a.global_scale, float("nan")))
    out = case.run(backend=backend)
    hit = out[:17] if along == "m" else out[1]
    rest = out[17:] if along == "m" else out[::2]
    assert hit.isnan().all() and (rest == 0).all()


@backends
@along_and_pairs
def test_nan_stays_in_its_group(along, pair, backend, device):
    if pair[0].element is not E4M3:
        pytest.skip("a NaN is one of the whole tensor")
    case = Case(along, pair, ([20, 150, 30], 0), device)
    expected = case.run(backend=backend)
    if along == "m":
        case.b.qdata[1].view(torch.uint8).fill_(0x7F)
        hit, rest = slice(20, 170), [slice(0, 20), slice(170, 200)]
    else:
        # The second group's 256 padded columns.
        case.a.qdata.view(torch.uint8)[:, 128:384] = 0x7F
        hit, rest = slice(1, 2), [slice(0, 1), slice(2, 3)]
    out = case.run(backend=backend)
    assert out[hit].isnan().all()
    for part in rest:
        assert_bitwise_equal(out[part], expected[part])


# --- adding to a gradient ---------------------------------------------------------------------------------------------


@backends
@routings
@pairs_along_k
def test_add_grouped_matmul(pair, routing, backend, device):
    case = Case("k", pair, routing, device)
    start = torch.randn(len(case.sizes), N, K, device=device)
    empty = [g for g, size in enumerate(case.sizes) if not size]
    # Added to zero it would lose its sign.
    start[empty] = -0.0
    out = start.clone()
    assert case.add(out, backend=backend) is out
    assert_bitwise_equal(out[empty], start[empty], "empty groups")
    full = [g for g, size in enumerate(case.sizes) if size]
    expected = start[full] + case.run(backend=backend)[full]
    torch.testing.assert_close(out[full], expected, rtol=2.0**-20, atol=1e-6)
    before = out._version
    case.add(out, backend=backend)
    assert out._version > before


# --- malformed ends ---------------------------------------------------------------------------------------------------


def before_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory that goes on with bytes of 0xff: NaN in every dtype."""
    memory = torch.full((x.numel() + 2**16,), 0xFF, dtype=torch.uint8, device=x.device)
    memory = torch.cat((x.contiguous().view(torch.uint8).flatten(), memory))
    return memory[: x.nbytes].view(x.dtype).view(x.shape)


@along_and_pairs
@pytest.mark.parametrize(
    "ends",
    ([10, 4, 30], [10, 500, 20], [-5, -1, 12], [2**31 - 1, -(2**31), 7], [-(2**31)] * 3),
    ids=("decreasing", "beyond", "negative", "extreme", "all_negative"),
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


# --- choice, meta tensors, compilation --------------------------------------------------------------------------------


@along_and_pairs
def test_auto_takes_the_first_that_can(along, pair, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    args = case.a, case.b, as_groups(case.ends), along, torch.float32
    first = next(row.backend for row in grouped_matmul_op.table if row.reason(args) is None)
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert first is Backend.TRITON or (hopper and first is Backend.GLUON)
    assert_bitwise_equal(case.run(), case.run(backend=first))


@out_dtypes
@along_and_pairs
def test_meta_tensors(along, pair, out_dtype):
    case = Case(along, pair, ([30, 0, 9], 2), "cpu")
    a, b = (Operand(*(None if t is None else t.to("meta") for t in x.tensors), x.format_name) for x in (case.a, case.b))
    out = ops.grouped_matmul(a, b, case.ends.to("meta"), along=along, out_dtype=out_dtype)
    assert (out.device.type, out.shape, out.dtype) == ("meta", case.run(backend="reference").shape, out_dtype)


@backends
@along_and_pairs
def test_autocast_changes_nothing(along, pair, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    outside = case.run(backend=backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_bitwise_equal(case.run(backend=backend), outside)


@pytest.mark.parametrize("pair", (PAIRS["m"][0], PAIRS["m"][2]), ids=pair_id)
def test_compiled_products_follow_tokens_and_routing(pair):
    """One graph for all counts of tokens and all sizes of groups, forward and backward."""
    fmt, w = pair[0], quantize(torch.randn(3, 48, 160), pair[1], "cpu")

    def products(x, dy, ends, out):
        a = ops.quantize(x, fmt, backend="reference").rowwise
        options = {"rowwise": False, "columnwise": True, "backend": "reference"}
        dy_columnwise, x_columnwise = (ops.grouped_quantize(t, ends, fmt, **options).columnwise for t in (dy, x))
        ops.add_grouped_matmul_(out, dy_columnwise, x_columnwise, ends, backend="reference")
        return (
            ops.grouped_matmul(a, w, ends, out_dtype=torch.bfloat16, backend="reference"),
            ops.grouped_matmul(
                dy_columnwise, x_columnwise, ends, along="k", out_dtype=torch.float32, backend="reference"
            ),
        )

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(products, fullgraph=True, backend=counter)
    for tokens, ends in ((300, (0, 130, 300)), (129, (129, 129, 129)), (517, (5, 6, 400)), (256, (0, 0, 0))):
        x, dy = torch.randn(tokens, 160), torch.randn(tokens, 48)
        for t in (x, dy):
            torch._dynamo.mark_dynamic(t, 0)
        ends = torch.tensor(ends, dtype=torch.int32)
        outs = torch.zeros(3, 48, 160), torch.zeros(3, 48, 160)
        for got, expected in zip(compiled(x, dy, ends, outs[0]), products(x, dy, ends, outs[1])):
            assert_bitwise_equal(got, expected)
        assert_bitwise_equal(*outs)
    assert counter.frame_count == 1


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
    plain = weight._replace(qdata=weight.qdata[0], scale=weight.scale[0])
    assert_within_budget(out, a, plain, k, accumulation_unit("triton", a.format, "cuda"))


@pytest.mark.gpu
@along_and_pairs
def test_a_cuda_graph_follows_the_routing(along, pair):
    """One capture, replayed with other ends: nothing of them is on the host."""
    case = Case(along, pair, ([300, 0, 60, 140], 12), "cuda")
    case.run(backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(backend="triton")
    for sizes in ((0, 128, 256, 0), (512, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)):
        case.ends.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        assert_bitwise_equal(out, case.run(backend="triton"))
