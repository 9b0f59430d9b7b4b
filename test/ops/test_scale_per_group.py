"""Tensor scales of groups of tokens and of matrices: each has the bits that it has alone, whatever the others hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from grouped_copies import GROUPS, int32
from grouped_products import ROUTINGS, Case, assert_close_to_each_group
from product_budgets import pair_id
from quantize_cases import canonical

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    NVFP4_1X16,
    NVFP4_16X16,
    Groups,
    Operand,
    StochasticRounding,
    global_scale_of,
    hadamard_number,
)
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.quantization import tensor_amax_bits_op
from torchao_blockwise.ops.randomization import hadamard_amax_bits_op
from torchao_blockwise.ops.shards.flat import WHOLE, Shards
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

backends = pytest.mark.parametrize("backend", ("reference", "triton"))
ROUNDING = StochasticRounding(2**63 + 5, 2**32 - 1, 7)
HOW = {
    "nearest": {},
    "hadamard": {"hadamard": True},
    "stochastic": {"stochastic": ROUNDING},
    "all": {"hadamard": True, "stochastic": ROUNDING},
}
how = pytest.mark.parametrize("how", HOW.values(), ids=HOW)
# In the interpreter each of many groups takes a second.
CASES = {name: case for name, case in GROUPS.items() if name != "257 groups"}
CASES["many, few of them filled"] = [2 * i // 10 + 3 * (i > 20) for i in range(33)], 10
# All groups in the two ways that share no kernel, some of them in all ways.
_SOME = ("empty", "tail")
ways = pytest.mark.parametrize(
    ("groups", "how"), [(g, h) for g in CASES for h in HOW if g in _SOME or h in ("nearest", "all")]
)


def tokens_of(ends, tokens: int, columns: int, device, dtype=torch.bfloat16) -> torch.Tensor:
    """Groups of other magnitudes each; NaN after the last one."""
    x = random_tensor(tokens, columns, dtype=dtype) if tokens else torch.zeros(0, columns, dtype=dtype)
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        x[start:end] *= 4.0 ** (group % 7)
    x[ends[-1] :] = float("nan")
    return x.to(device)


def grouped(x, ends, how, **options):
    options = {"columnwise": True, "scale_per_group": True} | options
    return ops.grouped_quantize(x, int32(ends, x.device), NVFP4_1X16, **options, **how)


def alone(x, group: int, how) -> tuple[Operand, Operand]:
    """One group's copies, by the reference, with one tensor scale."""
    if "stochastic" in how:
        how = how | {"stochastic": how["stochastic"]._replace(expert=group)}
    return grouped(x.contiguous(), [len(x)], how, scale_per_group=False, backend="reference")


def part(copy: Operand, group: int, rows: slice, columnwise: bool) -> Operand:
    """What a copy of all groups has of one."""
    qdata, scale = copy.qdata[rows], copy.scale[rows]
    if columnwise:
        qdata, scale = (
            copy.qdata[:, rows.start // 2 : rows.stop // 2],
            copy.scale[:, rows.start // 16 : rows.stop // 16],
        )
    return canonical(Operand(qdata.contiguous(), scale.contiguous(), copy.global_scale[group], copy.format_name))


def assert_each_group_is_alone(made, x, ends, how) -> None:
    """Bits of each group by itself, the scale one of an empty group, and zeros behind the last one."""
    block = at = 0
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if start == end:
            assert all(copy.global_scale[group] == 1 for copy in made)
            continue
        of_rows, of_columns = alone(x[start:end], group, how)
        block = at - (start - end) // 16 * 16
        assert_operands_equal(part(made.rowwise, group, slice(start, end), False), canonical(of_rows))
        wanted = part(of_columns._replace(global_scale=of_columns.global_scale[None]), 0, slice(0, block - at), True)
        assert_operands_equal(part(made.columnwise, group, slice(at, block), True), wanted)
        at = block
    last = ends[-1]
    assert made.columnwise.qdata.shape[1] * 2 == padded_tokens(len(x), len(ends), 16)
    for rest in (made.rowwise.qdata[last:], made.columnwise.qdata[:, at // 2 :]):
        assert not rest.any()
    for rest in (made.rowwise.scale[last:], made.columnwise.scale[:, at // 16 :]):
        assert not rest.view(torch.uint8).any()


# --- groups of tokens -------------------------------------------------------------------------------------------------


@backends
@ways
def test_each_group_is_quantized_alone(groups, how, backend, guarded, device):
    (ends, tokens), how = CASES[groups], HOW[how]
    x = tokens_of(ends, tokens, 20, device)
    assert_each_group_is_alone(grouped(x, ends, how, backend=backend), x, ends, how)


@backends
@pytest.mark.parametrize("value", (float("nan"), float("-inf"), 0.0, 1e-40, 3e38))
@pytest.mark.parametrize("where", (3, 44), ids=("first", "last"))
def test_special_values_stay_in_their_group(where, value, backend, device):
    ends = [5, 5, 41, 45]
    x = tokens_of(ends, 48, 20, device, torch.float32)
    x[where, 7] = value
    made = grouped(x, ends, HOW["all"], backend=backend)
    assert_each_group_is_alone(made, x, ends, HOW["all"])
    finite = [bool(scale.isfinite()) for scale in made.rowwise.global_scale]
    expected = [start <= where < end and not abs(value) < float("inf") for start, end in itertools.pairwise([0, *ends])]
    assert finite == [not poisoned for poisoned in expected]


@backends
@how
def test_groups_and_strides_by_tables(how, backend, device):
    ends = [5, 40, 41, 60]
    x = tokens_of(ends, 63, 70, device)
    expected = grouped(x, ends, how, backend="reference")
    tables = ops.make_groups(int32(ends, device), 63, NVFP4_1X16)
    options = {"columnwise": True, "scale_per_group": True, "backend": backend}
    for given in (x, x.mT.contiguous().mT):
        made = ops.grouped_quantize(given, tables, NVFP4_1X16, **options, **how)
        for got, wanted in zip(made, expected, strict=True):
            assert_operands_equal(canonical(got), canonical(wanted))


@pytest.mark.parametrize("ends", ([50, 20, 90, 60], [30, 1000, 2**31 - 1], [-5, -(2**31), 40]), ids=str)
def test_kernels_clamp_malformed_ends(ends, guarded, device):
    amax = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_amax")
    both = pytest.importorskip("torchao_blockwise.ops.randomization.kernels_triton")
    clamped = [min(max(end, 0), 100) for end in itertools.accumulate(ends, max)]
    x, ends, number = random_tensor(100, 48, device=device), int32(ends, device), hadamard_number(True)
    expected = tensor_amax_bits_op(x, int32(clamped, device), True, Backend.REFERENCE)
    assert_bitwise_equal(amax.tensor_amax_bits(x, ends, True), expected)
    wanted = hadamard_amax_bits_op(x, number, Groups(int32(clamped, device)), True, Backend.REFERENCE)
    for got, right in zip(both.amaxes(x, number, Groups(ends), True), wanted, strict=True):
        assert_bitwise_equal(got, right)


@backends
def test_a_given_amax(backend, device):
    ends = [5, 5, 41, 45]
    x = tokens_of(ends, 48, 40, device)
    amax = torch.tensor([900.0, 3.0, 800.0, 1e6], device=device)
    made = grouped(x, ends, {}, tensor_amax=amax, backend=backend)
    assert_bitwise_equal(made.rowwise.global_scale, global_scale_of(amax))
    for group, (start, end) in ((0, (0, 5)), (2, (5, 41))):
        wanted = ops.quantize(x[start:end], NVFP4_1X16, tensor_amax=amax[group], backend="reference").rowwise
        assert_operands_equal(part(made.rowwise, group, slice(start, end), False), canonical(wanted))


def test_launches_do_not_depend_on_how_many_groups_there_are(device, machine):
    kernels = [
        pytest.importorskip(f"torchao_blockwise.ops.{name}")
        for name in ("quantization.kernels_amax", "quantization.kernels_triton", "quantization.kernels_chunks")
    ]
    counts = []
    for count in (2, 9):
        launches = [machine.launches_of(module) for module in kernels]
        ends = [(40 * (i + 1)) // count for i in range(count)]
        grouped(tokens_of(ends, 48, 32, device), ends, {}, backend="triton")
        counts.append([len(made) for made in launches])
    assert counts[0] == counts[1]


# --- matrices ---------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("shape", ((3, 40, 50), (2, 3, 16, 33), (1, 20, 32), (2, 0, 16)), ids=str)
@pytest.mark.parametrize("fmt", (NVFP4_1X16, NVFP4_16X16), ids=lambda f: f.name)
def test_each_matrix_is_quantized_alone(fmt, shape, backend, device):
    magnitudes = 4.0 ** torch.arange(torch.Size(shape[:-2]).numel(), device=device).view(shape[:-2])[..., None, None]
    x = (random_tensor(*shape, device=device) * magnitudes).bfloat16()
    if shape[-2] and shape[0] > 1:
        x[1].view(-1)[5] = float("nan")
    made = ops.quantize(x, fmt, columnwise=True, scale_per_group=True, backend=backend)
    for copy in made:
        assert copy.global_scale.shape == shape[:-2]
    for index in itertools.product(*map(range, shape[:-2])):
        wanted = ops.quantize(x[index], fmt, columnwise=True, backend="reference")
        for copy, right in zip(made, wanted, strict=True):
            one = Operand(copy.qdata[index], copy.scale[index], copy.global_scale[index], copy.format_name)
            assert_operands_equal(canonical(one), canonical(right))
    values = ops.dequantize(made.rowwise, columns=shape[-1])
    if shape[-2] and shape[0] > 1:
        assert values[1].isnan().any() and values[0].isfinite().all()


@backends
def test_a_cast_of_shards_gives_each_matrix_its_scale(backend, device):
    """Beside a tensor with one scale, cut anywhere: the bits of the whole."""
    shapes = ((3, 40, 50), (33, 48), (5, 17, 300))
    tensors = [random_tensor(*shape, device=device, seed=i) for i, shape in enumerate(shapes)]
    for x in tensors:
        x *= 4.0 ** torch.arange(x.shape[0], device=device).view(-1, *[1] * (x.dim() - 1)) if x.dim() > 2 else 1
    expected = [ops.quantize(x, NVFP4_16X16, scale_per_group=True, backend="reference").rowwise for x in tensors]
    pieces = [((0, x.numel() // 3), (x.numel() // 3, x.numel())) for x in tensors]
    bits = torch.zeros(sum(q.scale.numel() for q in expected), dtype=torch.int32, device=device)
    for part in range(2):
        values = [x.flatten()[slice(*at[part])] for x, at in zip(tensors, pieces)]
        starts = [at[part][0] for at in pieces]
        shards.partial_block_amax_op(bits, Shards.of(values, starts, shapes, x.dtype, NVFP4_16X16), backend)
    scales = [torch.zeros_like(q.scale) for q in expected]
    of_matrices = [torch.zeros_like(q.global_scale) for q in expected]
    whole = Shards.of([x.flatten() for x in tensors], [0] * 3, shapes, x.dtype, NVFP4_16X16)
    encode = torch.empty_like(bits, dtype=torch.float32)
    shards.block_scales_op(encode, scales, of_matrices, bits, whole.first_blocks, NVFP4_16X16, False, backend)
    targets = [torch.zeros_like(q.qdata) for q in expected]
    shards.partial_cast_op(targets, whole, encode, WHOLE, backend)
    for qdata, scale, of_matrix, q in zip(targets, scales, of_matrices, expected, strict=True):
        assert of_matrix.shape == q.global_scale.shape
        assert_operands_equal(Operand(qdata, scale, of_matrix, q.format_name), q)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_amaxes_of_matrices(dtype, device):
    pytest.importorskip("torchao_blockwise.ops.quantization.kernels_amax")
    for shape in ((3, 5, 7), (2, 2, 9, 1030), (1, 1, 1), (4, 0, 8)):
        x = random_tensor(*shape, dtype=dtype, device=device)
        got, wanted = (tensor_amax_bits_op(x, None, True, backend) for backend in (Backend.AUTO, Backend.REFERENCE))
        assert_bitwise_equal(got, wanted, str(shape))


def test_a_matrix_alone_has_one_scale():
    x = random_tensor(20, 33)
    made = ops.quantize(x, NVFP4_1X16, columnwise=True, scale_per_group=True, backend="reference")
    for got, wanted in zip(made, ops.quantize(x, NVFP4_1X16, columnwise=True, backend="reference"), strict=True):
        assert got.global_scale.dim() == 0
        assert_operands_equal(got, wanted)


# --- products ---------------------------------------------------------------------------------------------------------


PAIRS = [("m", (NVFP4_1X16, NVFP4_16X16)), ("m", (NVFP4_1X16, NVFP4_1X16)), ("k", (NVFP4_1X16, NVFP4_1X16))]
pairs = pytest.mark.parametrize(("along", "pair"), PAIRS, ids=[f"{along}-{pair_id(pair)}" for along, pair in PAIRS])
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
WHICH = {"a": (True, False), "b": (False, True), "both": (True, True)}
which = pytest.mark.parametrize("which", WHICH.values(), ids=WHICH)


class Scaled(Case):
    """A case whose operands have tensor scales of groups, other ones each."""

    def __init__(self, along, pair, routing, device, which):
        super().__init__(along, pair, routing, device)
        scales = torch.arange(1, len(self.sizes) + 1, device=device) / 8
        self.a, self.b = (
            x._replace(global_scale=x.global_scale * scales.roll(i)) if own else x
            for i, (x, own) in enumerate(zip((self.a, self.b), which))
        )

    def groups(self):
        filled = iter(g for g, _ in enumerate(self.sizes))
        for index, *operands in super().groups():
            g = next(filled)
            yield index, *(x._replace(global_scale=x.global_scale[g] if x.global_scale.dim() else x.global_scale)
                           for x in operands)  # fmt: skip


@which
@pairs
@routings
def test_reference_scales_each_group(routing, along, pair, which, device):
    case = Scaled(along, pair, routing, device, which)
    out = case.run(backend="reference")
    expected = torch.zeros_like(out)
    for index, a, b in case.groups():
        expected[index] = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert_bitwise_equal(out, expected)


@pairs
@pytest.mark.parametrize(
    ("routing", "which"), [(r, w) for r in ROUTINGS for w in WHICH if w == "both" or r == "ragged_and_a_tail"]
)
def test_triton_scales_each_group(routing, which, along, pair, guarded, device):
    case = Scaled(along, pair, ROUTINGS[routing], device, WHICH[which])
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@backends
def test_adds_to_gradients(backend, device):
    case = Scaled("k", PAIRS[2][1], ROUTINGS["ragged_and_a_tail"], device, WHICH["both"])
    start = torch.randn(len(case.sizes), case.n, case.k, device=device)
    got = case.add(start.clone(), backend=backend)
    torch.testing.assert_close(got, start + case.run(backend=backend), rtol=2.0**-20, atol=1e-6)


@backends
def test_nan_stays_in_its_group(backend, device):
    for along, pair in PAIRS[::2]:
        case = Scaled(along, pair, ([30, 0, 9, 20], 2), device, WHICH["both"])
        case.a.global_scale[[1, 2]] = float("nan")
        out = case.run(backend=backend)
        bad = slice(30, 39) if along == "m" else 2
        assert out[bad].isnan().all()
        out[bad] = 0
        assert out.isfinite().all()


# --- refusals ---------------------------------------------------------------------------------------------------------

X, W, ENDS = torch.ones(4, 32), torch.ones(2, 32, 32), torch.tensor([1, 4], dtype=torch.int32)
QX, QW = (
    ops.grouped_quantize(X, ENDS, NVFP4_1X16, scale_per_group=True, backend="reference").rowwise,
    ops.quantize(W, NVFP4_16X16, scale_per_group=True, backend="reference").rowwise,
)
REFUSALS = {
    "fp8": (
        lambda: ops.quantize(X, FP8_1X128, scale_per_group=True),
        "quantize: scale_per_group is for tensor scales, which fp8_1x128 has not; leave it out",
    ),
    "one amax": (
        lambda: ops.grouped_quantize(X, ENDS, NVFP4_1X16, scale_per_group=True, tensor_amax=torch.ones(())),
        "grouped_quantize: tensor_amax must be [2] float32, one for each group, got torch.float32 of shape []",
    ),
    "amaxes of one": (
        lambda: ops.quantize(W, NVFP4_16X16, tensor_amax=torch.ones(2)),
        "quantize: tensor_amax must be a float32 scalar, got torch.float32 of shape [2]",
    ),
    "decoded without groups": (
        lambda: ops.dequantize(QX),
        "dequantize: global_scale must be a scalar or one for each matrix of x, got [2] for payload of shape [4, 16];"
        " of tokens in groups dequantize each group's rows with its own scale",
    ),
    "other groups": (
        lambda: ops.grouped_matmul(QX, QW, torch.tensor([1, 2, 4], dtype=torch.int32), out_dtype=torch.float32),
        "grouped_matmul: global_scale of a must be a scalar or one for each group, got [2] for 3 ends",
    ),
    "plain product": (
        lambda: ops.matmul(QX, QX, out_dtype=torch.float32),
        "matmul: global_scale of a must be a scalar, got shape [2]; use grouped_matmul",
    ),
}


@pytest.mark.parametrize("call, message", REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
