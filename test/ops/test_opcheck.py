"""Each op through `torch.library.opcheck`, and under torch.compile: same bits, no graph break, no recompile."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Groups, hadamard_number
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

library = torch.ops.torchao_blockwise
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
square_formats = pytest.mark.parametrize("fmt", (FP8_128X128, NVFP4_16X16), ids=lambda f: f.name)
SHAPES = [(33, 150), (48, 64), (1, 128), (128, 1), (0, 16), (2, 5, 32)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
PAIRS = ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16))
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(fmt.name for fmt in pair))
# No autograd registration: the ops run below autograd and are not differentiable.
TESTS = ("test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op, args) -> None:
    """opcheck's own tests; its test_schema cannot compare fp8 inputs, so the schema is checked here, bit by bit."""
    assert set(torch.library.opcheck(op, args, test_utils=TESTS).values()) == {"SUCCESS"}
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    before = [x.clone() for x in inputs]
    outputs = op(*args)
    for x, copy in zip(inputs, before):
        assert_bitwise_equal(x, copy, "an input that was written to")
    tensors = [*inputs, *(outputs if isinstance(outputs, (tuple, list)) else (outputs,))]
    storages = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    assert len(set(storages)) == len(storages), "an output shares memory with an input or another output"


def amax_of(x: torch.Tensor, fmt):
    return library.tensor_amax_bits(x, None, False, "auto") if fmt.has_global_scale else None


# (rowwise, columnwise) that operations are asked for.
COPIES = ((True, False), (False, True), (True, True))
copies_asked = pytest.mark.parametrize("copies", COPIES, ids=("rowwise", "columnwise", "both"))


# No groups, no random bits: the arguments of `quantize` behind its options.
PLAIN = None, None, None, 0, 0, 0, -1


def options_of(fmt, copies, padded: bool) -> tuple:
    """`CastOptions` as a schema has them."""
    return fmt.name, *copies, False, padded, 0, False


def quantize(x: torch.Tensor, fmt):
    return ops.quantize(x, fmt, backend="reference").rowwise


# --- opcheck ----------------------------------------------------------------------------------------------------------


@copies_asked
@shapes
@formats
def test_quantize(fmt, shape, copies):
    x = random_tensor(*shape)
    op = (library.quantize_both if all(copies) else library.quantize).default
    for padded in (False, True):
        opcheck(op, (x, amax_of(x, fmt), *options_of(fmt, copies, padded), *PLAIN, "reference"))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=lambda d: str(d)[6:])
@shapes
def test_tensor_amax_bits(shape, dtype):
    opcheck(library.tensor_amax_bits.default, (random_tensor(*shape, dtype=dtype), None, False, "auto"))
    opcheck(library.tensor_amax_bits.default, (random_tensor(3, *shape, dtype=dtype), None, True, "auto"))


@pytest.mark.parametrize("amax", (0.0, 3.5), ids=str)
def test_global_scale(amax):
    opcheck(library.global_scale.default, (torch.tensor(amax).view(torch.int32), "auto"))


@shapes
@formats
def test_dequantize(fmt, shape):
    opcheck(library.dequantize.default, (*quantize(random_tensor(*shape), fmt), shape[-1], torch.bfloat16))


@shapes
@square_formats
def test_transpose(fmt, shape):
    q = quantize(random_tensor(*shape), fmt)
    opcheck(library.transpose.default, (*q, shape[-1], "reference"))


@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("product", ((5, 7, 33), (0, 16, 32), (16, 16, 128)), ids=lambda p: "M{}N{}K{}".format(*p))
@pairs
def test_matmul(pair, product, bias):
    m, n, k = product
    a, b = quantize(random_tensor(m, k), pair[0]), quantize(random_tensor(n, k), pair[1])
    bias = torch.ones(n) if bias else None
    opcheck(library.matmul.default, (*a, *b, torch.bfloat16, bias, "reference"))


def test_add_matmul():
    """Changes `out` and nothing else; opcheck's own comparison of changed inputs knows no fp8."""
    a, b = quantize(random_tensor(5, 33), FP8_1X128), quantize(random_tensor(7, 33), FP8_1X128)
    arguments = (torch.zeros(5, 7), *a, *b, "reference")
    assert torch.library.opcheck(library.add_matmul_.default, arguments, test_utils="test_faketensor")
    before = [x.clone() for x in (a.qdata, a.scale, b.qdata, b.scale)]
    assert library.add_matmul_(*arguments) is None
    for x, copy in zip((a.qdata, a.scale, b.qdata, b.scale), before):
        assert_bitwise_equal(x, copy, "an input that was written to")


MATRICES = [(33, 150), (48, 64), (0, 16)]
matrices = pytest.mark.parametrize("shape", MATRICES, ids=shape_id)
layers = pytest.mark.parametrize("layer", (False, True), ids=("rms", "layer"))


def normalize_arguments(shape, layer: bool) -> tuple:
    x, weight = random_tensor(*shape, dtype=torch.bfloat16), torch.ones(shape[1])
    *mean, rstd = library.norm_statistics(x, layer, 1e-5, "reference")
    return x, weight, None, mean[0] if mean else None, rstd, torch.bfloat16


@layers
@matrices
def test_norm(shape, layer):
    arguments = normalize_arguments(shape, layer)
    opcheck(library.norm_statistics.default, (arguments[0], layer, 1e-5, "reference"))
    opcheck(library.normalize.default, (*arguments, "reference"))


@copies_asked
@layers
@matrices
def test_norm_quantize(layer, shape, copies):
    arguments = normalize_arguments(shape, layer)
    for padded in (False, True):
        opcheck(library.norm_quantize.default, (*arguments, *options_of(FP8_1X128, copies, padded), "reference"))


def swiglu_inputs(*shape) -> list[torch.Tensor]:
    """dh, gate, up."""
    return [random_tensor(*shape, dtype=torch.bfloat16, seed=s) / 64 for s in range(3)]


@matrices
def test_swiglu(shape):
    dh, gate, up = swiglu_inputs(*shape)
    opcheck(library.swiglu.default, (gate, up, "reference"))
    opcheck(library.swiglu_backward.default, (dh, gate, up, "reference"))


@copies_asked
@matrices
def test_swiglu_quantize(shape, copies):
    dh, gate, up = swiglu_inputs(*shape)
    for padded in (False, True):
        rest = *options_of(FP8_1X128, copies, padded), None, None, "reference"
        opcheck(library.swiglu_quantize.default, (gate, up, *rest))
        opcheck(library.swiglu_backward_quantize.default, (dh, gate, up, *rest))


GROUP_ENDS = {"ragged": ((3, 3, 20), 33), "a token": ((1,), 1), "none": ((0, 0), 0)}


@pytest.mark.parametrize("ends, tokens", GROUP_ENDS.values(), ids=GROUP_ENDS)
@pytest.mark.parametrize("each", (False, True), ids=("all", "each"))
def test_amax_bits_of_groups(each, ends, tokens):
    x, ends = torch.randn(tokens, 48, dtype=torch.bfloat16), torch.tensor(ends, dtype=torch.int32)
    opcheck(library.tensor_amax_bits.default, (x, ends, each, "auto"))


@copies_asked
@pytest.mark.parametrize("groups", GROUP_ENDS.values(), ids=GROUP_ENDS)
@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=("fp8", "nvfp4"))
def test_grouped_quantize(fmt, groups, copies):
    ends, tokens = groups
    dh, gate, up = (torch.randn(tokens, 48, dtype=torch.bfloat16) for _ in range(3))
    ends, options = torch.tensor(ends, dtype=torch.int32), options_of(fmt, copies, True)
    amax = library.tensor_amax_bits(gate, ends, False, "auto") if fmt.has_global_scale else None
    op = (library.quantize_both if all(copies) else library.quantize).default
    opcheck(op, (gate, amax, *options, ends, *PLAIN[1:], "reference"))
    if fmt is FP8_1X128:
        tables = library.group_tables(ends, tokens, fmt.name, "reference")
        for groups in ((ends, None), (ends, tables)):
            opcheck(library.swiglu_quantize.default, (gate, up, *options, *groups, "reference"))
            opcheck(library.swiglu_backward_quantize.default, (dh, gate, up, *options, *groups, "reference"))


@pytest.mark.parametrize("ends, tokens", GROUP_ENDS.values(), ids=GROUP_ENDS)
@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=("fp8", "nvfp4"))
def test_group_tables(fmt, ends, tokens):
    opcheck(library.group_tables.default, (torch.tensor(ends, dtype=torch.int32), tokens, fmt.name, "reference"))


@pytest.mark.parametrize("ends, tokens", GROUP_ENDS.values(), ids=GROUP_ENDS)
@pytest.mark.parametrize("pair", (PAIRS[0], PAIRS[2]), ids=("fp8", "nvfp4"))
def test_grouped_matmul(pair, ends, tokens):
    x, dy, w = torch.randn(tokens, 33), torch.randn(tokens, 48), torch.randn(len(ends), 48, 33)
    groups, options = Groups(torch.tensor(ends, dtype=torch.int32)), (torch.bfloat16, "reference")
    fmt, weight_fmt = pair
    a, b = quantize(x, fmt), quantize(w, weight_fmt)
    opcheck(library.grouped_matmul.default, (*a, *b, *groups, "m", *options))
    columnwise = {"rowwise": False, "columnwise": True, "backend": "reference"}
    a, b = (ops.quantize(t, fmt, groups=groups, **columnwise).columnwise for t in (dy, x))
    opcheck(library.grouped_matmul.default, (*a, *b, *groups, "k", *options))
    arguments = (torch.zeros_like(w), *a, *b, *groups, "reference")
    assert torch.library.opcheck(library.add_grouped_matmul_.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("weighted", (False, True), ids=("plain", "weighted"))
@pytest.mark.parametrize("tokens", (0, 1, 9), ids=lambda t: f"T{t}")
def test_permute(tokens, weighted):
    x, ids = torch.randn(tokens, 24, dtype=torch.bfloat16), torch.randint(0, 5, (tokens, 3))
    weights = torch.rand(tokens, 3) if weighted else None
    opcheck(library.permute.default, (x, ids, 4, "reference"))
    y, source, _ = library.permute(x, ids, 4, "reference")
    opcheck(library.unpermute.default, (y, source, 3, weights, "reference"))
    opcheck(library.unpermute_backward.default, (x, y if weighted else None, source, 3, weights, "reference"))


@pytest.mark.parametrize("tokens", (48, 33, 0))
@pytest.mark.parametrize("grouped", (False, True), ids=("whole", "groups"))
def test_quantize_randomized(tokens, grouped):
    x, key = random_tensor(tokens, 40), torch.tensor([1, 2, 3, 5])
    groups = (torch.tensor([tokens // 2, tokens], dtype=torch.int32) if grouped else None, None)
    opcheck(library.hadamard_amax_bits.default, (x, hadamard_number(True), *groups, False, "reference"))
    place = 1, 0, 2, -1
    for columnwise, hadamard, rounded in ((False, 0, True), (True, 0, True), (True, hadamard_number(True), False)):
        options = NVFP4_1X16.name, not columnwise, columnwise, False, True, hadamard, False
        bits = torch.ones(()).view(torch.int32), key if rounded else None
        opcheck(library.quantize.default, (x, bits[0], *options, *groups, bits[1], *place, "reference"))


def test_take_key():
    """It counts what it takes where no schema says so, and autograd does not see it either."""
    key, gradient = torch.tensor([1, 2, 3, 5]), random_tensor(4, 16)
    assert set(torch.library.opcheck(library.take_key.default, (key, gradient), test_utils=TESTS).values()) == {
        "SUCCESS"
    }
    before, version = key.tolist(), key._version
    assert library.take_key(key, gradient).tolist() == before
    assert key.tolist() == [before[0], before[1], before[2] + 1, before[3]] and key._version == version


CHECKED = {
    "quantize",
    "quantize_both",
    "tensor_amax_bits",
    "global_scale",
    "dequantize",
    "transpose",
    "matmul",
}
CHECKED |= {"add_matmul_", "norm_statistics", "normalize", "norm_quantize"}
CHECKED |= {"grouped_matmul", "add_grouped_matmul_"}
CHECKED |= {"group_tables", "permute", "unpermute", "unpermute_backward", "hadamard_amax_bits", "take_key"}
CHECKED |= {"swiglu", "swiglu_backward", "swiglu_quantize", "swiglu_backward_quantize"}


def test_every_op_of_these_folders_is_checked():
    names = ("dequantization", "fused.norm", "fused.swiglu", "gemm.grouped", "gemm.plain", "groups.permutation")
    names += ("groups.tables", "quantization")
    names += ("transposition",)
    folders = [importlib.import_module(f"torchao_blockwise.ops.{name}") for name in names]
    defined = [x.overload for folder in folders for x in vars(folder).values() if hasattr(x, "overload")]
    assert {op.name().split("::")[1] for op in defined} == CHECKED


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compile_counting(function, backend: str):
    """(compiled function, counter of graphs); a graph break raises."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def tokens(count: int) -> torch.Tensor:
    x = random_tensor(count, 160, seed=count)
    torch._dynamo.mark_dynamic(x, 0)
    return x


# All of more than one block. That one block is a case of its own, with its own graph, is PyTorch's specialization of
# sizes that equal 1, here of the scale grid.
TOKEN_COUNTS = (300, 129, 256, 517)


@formats
def test_compiled_quantize_follows_the_token_count(fmt):
    def both(x):
        return ops.quantize(x, fmt, columnwise=True, backend="reference")

    compiled, counter = compile_counting(both, "aot_eager")
    for count in TOKEN_COUNTS:
        for got, expected in zip(compiled(tokens(count)), both(tokens(count))):
            assert_operands_equal(got, expected)
    assert counter.frame_count == 1


@formats
def test_compiled_quantize_has_at_most_one_more_graph_for_a_single_block(fmt):
    def both(x):
        return ops.quantize(x, fmt, columnwise=True, backend="reference")

    compiled, counter = compile_counting(both, "aot_eager")
    for count in (300, 5, 129, 16, 13, 517, 8):
        compiled(tokens(count))
    assert counter.frame_count <= 2


@square_formats
def test_compiled_round_trip_through_the_transpose(fmt):
    def round_trip(x):
        q = ops.transpose(quantize(x, fmt), columns=160, backend="reference")
        return ops.dequantize(q, columns=x.shape[0], dtype=torch.bfloat16)

    compiled, counter = compile_counting(round_trip, "aot_eager")
    for count in TOKEN_COUNTS:
        assert_bitwise_equal(compiled(tokens(count)), round_trip(tokens(count)))
    assert counter.frame_count == 1


def linear(x, weight, bias, pair):
    return ops.matmul(quantize(x, pair[0]), weight, out_dtype=torch.bfloat16, bias=bias, backend="reference")


@pairs
def test_compiled_product_follows_the_token_count(pair):
    weight, bias = quantize(random_tensor(48, 160), pair[1]), torch.ones(48)
    compiled, counter = compile_counting(linear, "aot_eager")
    for count in TOKEN_COUNTS:
        x = tokens(count)
        assert_bitwise_equal(compiled(x, weight, bias, pair), linear(x, weight, bias, pair))
    assert counter.frame_count == 1


@pytest.mark.parametrize("pair", (PAIRS[0], PAIRS[2]), ids=("fp8", "nvfp4"))
def test_compiled_by_inductor(pair):
    weight, bias = quantize(random_tensor(48, 160), pair[1]), torch.ones(48)
    compiled, counter = compile_counting(linear, "inductor")
    for count in TOKEN_COUNTS[:2]:
        x = tokens(count)
        assert_bitwise_equal(compiled(x, weight, bias, pair), linear(x, weight, bias, pair))
    assert counter.frame_count == 1
