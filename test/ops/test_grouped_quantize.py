"""ops.grouped_quantize, and SwiGLU in groups: each group as if quantized alone, and nothing else written."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from gpu_steps import no_syncs
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
)
from torchao_blockwise.ops.groups.ends import padded_ends, padded_tokens
from torchao_blockwise.ops.groups.quantization import reference
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor, with_special_values

# (group ends, tokens)
GROUPS = {
    "one": ([130], 130),
    "ragged": ([5, 140, 141, 200], 200),
    "empty": ([0, 0, 20, 20, 75, 75], 75),
    "one token": ([0, 1, 1], 1),
    "whole blocks": ([128, 128, 384], 384),
    "all to one": ([0, 0, 150, 150], 150),
    "tail": ([3, 140, 140], 190),
    "tail of a token": ([1], 2),
    "all tail": ([0, 0], 140),
    "no tokens": ([0, 0, 0], 0),
    "257 groups": ([2 * i // 100 + 3 * (i > 200) for i in range(257)], 10),
}
groups = pytest.mark.parametrize("ends, tokens", GROUPS.values(), ids=GROUPS)
few_groups = pytest.mark.parametrize("ends, tokens", [GROUPS["ragged"], GROUPS["tail"]], ids=("ragged", "tail"))
formats = pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
copies = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


def int32(ends, device="cpu") -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def tokens_of(ends, tokens: int, columns: int, fmt=FP8_1X128, dtype=torch.bfloat16, device="cpu") -> torch.Tensor:
    """Values of many magnitudes in the groups, NaN and Inf after the last."""
    x = random_tensor(tokens, columns, dtype=dtype) if tokens else torch.zeros(0, columns, dtype=dtype)
    if tokens:
        x = with_special_values(x, fmt)
    x[ends[-1] :] = torch.tensor([float("nan"), float("inf")])[torch.arange(columns) % 2].to(dtype)
    return x.to(device)


def each_group_alone(x, ends, fmt: BlockFormat, rowwise=True, columnwise=True, power_of_2_scales=False) -> Copies:
    """By the plain reference, a group at a time, sizes known."""
    block, per_byte = fmt.block[1], fmt.element.per_byte
    options = {"power_of_2_scales": power_of_2_scales, "backend": "reference"}
    if fmt.has_global_scale:
        options["tensor_amax"] = x[: ends[-1]].abs().float().max() if x[: ends[-1]].numel() else torch.zeros(())
    of_rows = of_columns = None
    if rowwise:
        in_groups = torch.cat((x[: ends[-1]], torch.zeros_like(x[ends[-1] :])))
        of_rows = ops.quantize(in_groups, fmt, **options).rowwise
    if columnwise:
        rest = padded_tokens(len(x), len(ends), block)
        qdata, scale, operand = [], [], None
        for start, end in zip([0, *ends, None], [*ends, None]):
            group = x[start:end] if end is not None else x.new_zeros(rest, x.shape[1])
            operand = ops.quantize(group, fmt, rowwise=False, columnwise=True, **options).columnwise
            length = -(-group.shape[0] // block) * block
            rest -= length
            qdata.append(F.pad(operand.qdata.view(torch.uint8), (0, length // per_byte - operand.qdata.shape[1])))
            scale.append(operand.scale.view(torch.uint8) if operand.scale.itemsize == 1 else operand.scale)
        scale = torch.cat(scale, 0 if fmt.transposed_scales else 1).view(operand.scale.dtype)
        qdata = torch.cat(qdata, 1).view(operand.qdata.dtype)
        of_columns = Operand(qdata, scale, operand.global_scale, fmt.name)
    return Copies(of_rows, of_columns)


def assert_copies_equal(got: Copies, expected: Copies) -> None:
    assert type(got) is type(expected) is Copies
    for a, b in zip(got, expected):
        assert (a is None) == (b is None)
        if b is not None:
            assert_operands_equal(a, b)


GUARD, POISON = 4096, 0xA5


@pytest.fixture
def guarded(monkeypatch):
    """Copies are allocated full of poison, between guards that must be whole at the end."""
    buffers = []

    def poisoned(x, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8, device=x.device)
        buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(dtype).view(shape)

    def new_empty(fmt, x, *shape):
        return (
            poisoned(x, fmt.qdata_shape(*shape), fmt.element.storage_dtype),
            poisoned(x, fmt.scale_shape(*shape), fmt.scale_dtype),
        )

    monkeypatch.setattr(BlockFormat, "new_empty", new_empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == POISON).all() and (buffer[-GUARD:] == POISON).all(), "written out of bounds"


# --- each group alone -------------------------------------------------------------------------------------------------


@backends
@formats
@groups
def test_each_group_is_quantized_alone(ends, tokens, fmt, backend, guarded, device):
    x = tokens_of(ends, tokens, 144, fmt, device=device)
    got = ops.grouped_quantize(x, int32(ends, device), fmt, columnwise=True, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt))
    for operand in got:
        assert operand.qdata.is_contiguous() and operand.scale.is_contiguous()


@backends
@copies
@formats
@few_groups
def test_columns_that_are_no_whole_blocks(ends, tokens, fmt, copies, backend, guarded, device):
    x, options = tokens_of(ends, tokens, 75, fmt, device=device), {"rowwise": copies[0], "columnwise": copies[1]}
    got = ops.grouped_quantize(x, int32(ends, device), fmt, **options, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt, *copies))


@backends
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=lambda d: str(d)[6:])
@formats
def test_dtypes(fmt, dtype, backend, device):
    ends, tokens = GROUPS["tail"]
    x = tokens_of(ends, tokens, 144, fmt, dtype, device)
    got = ops.grouped_quantize(x, int32(ends, device), fmt, columnwise=True, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, fmt))


@backends
@formats
def test_strides_do_not_matter(fmt, backend, device):
    ends, tokens = GROUPS["tail"]
    x = tokens_of(ends, tokens, 144, fmt, device=device)
    expected = each_group_alone(x, ends, fmt)
    for strided in (x.mT.contiguous().mT, torch.cat((x, x), 1)[:, :144], x.repeat_interleave(2, 0)[::2]):
        got = ops.grouped_quantize(strided, int32(ends, device), fmt, columnwise=True, backend=backend)
        assert_copies_equal(got, expected)


@backends
def test_power_of_2_scales(backend, device):
    ends, tokens = GROUPS["tail"]
    x, options = tokens_of(ends, tokens, 144, device=device), {"columnwise": True, "power_of_2_scales": True}
    got = ops.grouped_quantize(x, int32(ends, device), FP8_1X128, **options, backend=backend)
    assert_copies_equal(got, each_group_alone(x, ends, FP8_1X128, power_of_2_scales=True))


@backends
def test_nan_stays_in_its_group(backend, device):
    """In FP8; beside it, in the same block of 128 tokens, another group is finite."""
    x = random_tensor(40, 32, device=device)
    x[10, 3] = float("nan")
    rowwise, columnwise = ops.grouped_quantize(x, int32([20, 40], device), FP8_1X128, columnwise=True, backend=backend)
    assert ops.dequantize(rowwise).isnan().any(1).nonzero().flatten().tolist() == [10]
    decoded = ops.dequantize(columnwise)
    assert decoded[3, 10].isnan() and decoded[:, 128:].isfinite().all()


@backends
def test_nvfp4_takes_the_amax_of_what_is_in_groups(backend, device):
    x = random_tensor(40, 32, device=device)
    x[30:] = 1e9
    ends = int32([20, 30], device)
    got = ops.grouped_quantize(x, ends, NVFP4_1X16, backend=backend).rowwise
    alone = ops.quantize(x[:30], NVFP4_1X16, backend="reference").rowwise
    assert_bitwise_equal(got.global_scale, alone.global_scale)
    amax = torch.tensor(1e3, device=device)
    given = ops.grouped_quantize(x, ends, NVFP4_1X16, tensor_amax=amax, backend=backend).rowwise
    assert_bitwise_equal(given.qdata[:30], ops.quantize(x[:30], NVFP4_1X16, tensor_amax=amax).rowwise.qdata)


# --- SwiGLU in groups -------------------------------------------------------------------------------------------------


def gate_up_dh(ends, tokens, width, device):
    gate_up = tokens_of(ends, tokens, 2 * width, device=device)
    dh = tokens_of(ends, tokens, width, device=device)
    return *(gate_up / 64).chunk(2, 1), dh


# Kernels of SwiGLU take long to interpret: groups one way, ways one grouping.
SWIGLU = [(name, 48, "both") for name in ("ragged", "empty", "tail of a token", "all tail", "no tokens")]
SWIGLU += [("tail", width, copies) for width in (48, 128) for copies in COPIES]


@backends
@pytest.mark.parametrize("name, width, copies", SWIGLU, ids=lambda value: str(value))
def test_swiglu_is_quantized_in_groups(name, width, copies, backend, guarded, device):
    (ends, tokens), copies = GROUPS[name], COPIES[copies]
    gate, up, dh = gate_up_dh(ends, tokens, width, device)
    options = CastOptions(FP8_1X128, *copies)
    h = ops.swiglu(gate, up, backend="reference")
    got = ops.swiglu_quantize(gate, up, options, groups=int32(ends, device), backend=backend)
    assert_copies_equal(got, each_group_alone(h, ends, FP8_1X128, *copies))
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="reference"), 1)
    got = ops.swiglu_backward_quantize(dh, gate, up, options, groups=int32(ends, device), backend=backend)
    assert_copies_equal(got, each_group_alone(merged, ends, FP8_1X128, *copies))


@backends
@pytest.mark.parametrize("fmt, width", ((NVFP4_1X16, 48), (FP8_1X128, 75)), ids=("nvfp4_1x16", "ragged"))
def test_swiglu_runs_as_two_operations_in_groups(fmt, width, backend, device):
    ends, tokens = GROUPS["tail"]
    gate, up, dh = gate_up_dh(ends, tokens, width, device)
    options, of = CastOptions(fmt, columnwise=True), {"groups": int32(ends, device), "backend": backend}
    h = ops.swiglu(gate, up, backend="reference")
    assert_copies_equal(ops.swiglu_quantize(gate, up, options, **of), each_group_alone(h, ends, fmt))
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="reference"), 1)
    got = ops.swiglu_backward_quantize(dh, gate, up, options, **of)
    assert_copies_equal(got, each_group_alone(merged, ends, fmt))


# --- ends that are malformed, and refusals ----------------------------------------------------------------------------

MALFORMED = {
    "decreasing": [50, 20, 90, 60],
    "beyond": [30, 1000, 2**31 - 1],
    "negative": [-5, -(2**31), 40],
    "all": [60, -1, 2**31 - 1, 3],
}


def bits_of(amax: torch.Tensor | None) -> torch.Tensor | None:
    return None if amax is None else amax.view(torch.int32)


@formats
@pytest.mark.parametrize("ends", MALFORMED.values(), ids=MALFORMED)
def test_kernels_clamp_malformed_ends(ends, fmt, guarded, device):
    """As a GPU's are, which the host does not read: nothing out of bounds, and the bits of the clamped ends."""
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    swiglu = pytest.importorskip("torchao_blockwise.ops.fused.swiglu.kernels_triton")
    x, amax = random_tensor(100, 48, dtype=torch.bfloat16, device=device), torch.tensor(9.0, device=device)
    clamped = [min(max(end, 0), 100) for end in itertools.accumulate(ends, max)]
    options, amax = CastOptions(fmt, columnwise=True), amax if fmt.has_global_scale else None
    ends, clamped = int32(ends, device), int32(clamped, device)
    expected = reference.quantize(x, clamped, options, amax)
    assert_copies_equal(reference.quantize(x, ends, options, amax), expected)
    assert_copies_equal(kernels.quantize(x, bits_of(amax), options, Groups(ends)), expected)
    if fmt is FP8_1X128:
        got = swiglu.swiglu_quantize(x, x, options, Groups(ends))
        h = ops.swiglu(x, x, backend="reference")
        assert_copies_equal(got, reference.quantize(h, clamped, options, None))


class Synchronizations(TorchDispatchMode):
    """Operations that read a device's values, or whose shapes follow from them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "unique", "_unique2"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@formats
def test_nothing_is_read_back(fmt, device):
    """Neither by the reference nor around the kernels; the check of a CPU's ends is what would."""
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    x, ends = random_tensor(20, 48, device=device), int32([3, 17], device)
    options = CastOptions(fmt, columnwise=True)
    with Synchronizations() as mode:
        amax = reference.tensor_amax(x, ends) if fmt.has_global_scale else None
        reference.quantize(x, ends, options, amax)
        kernels.quantize(x, bits_of(amax), options, Groups(ends))
    assert mode.seen == []


X, ENDS = torch.ones(4, 32), int32([1, 4])
REFUSALS = {
    "ends": (
        lambda: ops.grouped_quantize(X, int32([3, 2]), FP8_1X128),
        ValueError,
        "grouped_quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got"
        " group_ends[1] = 2 after 3; pass the cumulative sum of the groups' sizes",
    ),
    "ends of nvfp4": (
        lambda: ops.grouped_quantize(X, int32([3, 5]), NVFP4_1X16),
        ValueError,
        "grouped_quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got"
        " group_ends[1] = 5 after 3; pass the cumulative sum of the groups' sizes",
    ),
    "ends of swiglu": (
        lambda: ops.swiglu_quantize(X, X, CastOptions(FP8_1X128), groups=torch.tensor([4])),
        TypeError,
        "swiglu_quantize: group_ends must be int32, got torch.int64; use group_ends.int()",
    ),
    "ends of its gradients": (
        lambda: ops.swiglu_backward_quantize(X, X, X, CastOptions(FP8_1X128), groups=ENDS.to("meta")),
        ValueError,
        "swiglu_backward_quantize: group_ends must be on the tokens' device cpu, got meta; move it",
    ),
    "square blocks": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_128X128),
        ValueError,
        "grouped_quantize: tokens in groups need blocks of one row, got fp8_128x128; take fp8_1x128 or nvfp4_1x16,"
        " the formats of activations",
    ),
    "square blocks of swiglu": (
        lambda: ops.swiglu_quantize(X, X, CastOptions(FP8_128X128), groups=ENDS),
        ValueError,
        "swiglu_quantize: tokens in groups need blocks of one row, got fp8_128x128; take fp8_1x128 or nvfp4_1x16,"
        " the formats of activations",
    ),
    "3-D": (
        lambda: ops.grouped_quantize(X[None], ENDS, FP8_1X128),
        ValueError,
        "grouped_quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims",
    ),
    "f64": (
        lambda: ops.grouped_quantize(X.double(), ENDS, FP8_1X128),
        TypeError,
        "grouped_quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first",
    ),
    "amax": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, tensor_amax=torch.ones(())),
        ValueError,
        "grouped_quantize: fp8_1x128 has no tensor scale; leave tensor_amax out",
    ),
    "amaxes": (
        lambda: ops.grouped_quantize(X, ENDS, NVFP4_1X16, tensor_amax=torch.ones(1)),
        ValueError,
        "grouped_quantize: tensor_amax must be a float32 scalar, got torch.float32 of shape [1]",
    ),
    "nothing": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, rowwise=False),
        ValueError,
        "grouped_quantize: nothing to compute; ask for rowwise, columnwise or both",
    ),
    "backend": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, backend="cublas"),
        ValueError,
        "grouped_quantize: backend cublas has no implementation; choose one of gluon, triton, reference, or auto",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


# --- traced, and on a GPU ---------------------------------------------------------------------------------------------


@formats
def test_compiles_once_for_all_token_counts(fmt):
    def step(x, gate, group_ends):
        copies = ops.grouped_quantize(x, group_ends, fmt, columnwise=True, backend="reference")
        options = CastOptions(fmt, columnwise=True)
        fused = ops.swiglu_quantize(gate, gate, options, groups=group_ends, backend="reference")
        tokens, block = x.shape[0], fmt.block[1]
        sizes = x.new_zeros(padded_tokens(tokens, group_ends.shape[0], block))
        return copies, fused, padded_ends(group_ends, tokens, block), sizes

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (300, 129, 200, 517):
        x, gate = random_tensor(tokens, 160), random_tensor(tokens, 64)
        for t in (x, gate):
            torch._dynamo.mark_dynamic(t, 0)
        ends = int32([7, 7, tokens - 20, tokens - 3])
        *got, got_ends, got_sizes = compiled(x, gate, ends)
        *expected, expected_ends, expected_sizes = step(x, gate, ends)
        for copies, wanted in zip(got, expected, strict=True):
            assert_copies_equal(copies, wanted)
        assert_bitwise_equal(got_ends, expected_ends)
        assert_bitwise_equal(got_sizes, expected_sizes)
    assert counter.frame_count == 1


@pytest.mark.gpu
@formats
def test_a_graph_follows_the_routing(fmt):
    """Captured once; ends that change are those of the next replay."""
    x, ends = random_tensor(1000, 256, dtype=torch.bfloat16, device="cuda"), int32([1000, 1000, 1000], "cuda")

    def step():
        return ops.grouped_quantize(x, ends, fmt, columnwise=True, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in ([10, 500, 700], [0, 0, 0], [333, 333, 1000]):
        ends.copy_(int32(sizes))
        graph.replay()
        assert_copies_equal(captured, ops.grouped_quantize(x, ends, fmt, columnwise=True, backend="reference"))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("ends", ([1, 130, 4000], [4097] * 128, list(range(0, 4096, 32))), ids=("few", "one", "many"))
def test_large(ends, fmt):
    x = tokens_of(ends, 4100, 2048, fmt, device="cuda")
    group_ends, options = int32(ends, "cuda"), {"columnwise": True}
    with no_syncs():
        got = ops.grouped_quantize(x, group_ends, fmt, **options, backend="triton")
    assert_copies_equal(got, ops.grouped_quantize(x, group_ends, fmt, **options, backend="reference"))
