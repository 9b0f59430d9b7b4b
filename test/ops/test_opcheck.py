"""Each op through `torch.library.opcheck`, and under torch.compile: same bits, no graph break, no recompile."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Groups, hadamard_number
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

library = torch.ops.torchao_blockwise
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
square_formats = pytest.mark.parametrize("fmt", (FP8_128X128, NVFP4_16X16), ids=lambda f: f.name)
SHAPES = ((33, 150), (0, 16), (2, 5, 32))
PAIRS = ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16))
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(fmt.name for fmt in pair))
# No autograd registration: the ops run below autograd and are not differentiable.
TESTS = ("test_faketensor", "test_aot_dispatch_dynamic")


def quantize(x: torch.Tensor, fmt):
    return ops.quantize(x, fmt, backend="reference").rowwise


# --- opcheck ----------------------------------------------------------------------------------------------------------

# (rowwise, columnwise, padded) that operations are asked for; a rowwise copy knows no padding.
COPIES = ((True, False, False), (False, True, False), (False, True, True), (True, True, True))
ENDS = [(torch.tensor(ends, dtype=torch.int32), tokens) for ends, tokens in (((3, 3, 20), 33), ((1,), 1), ((0, 0), 0))]
# No groups, no random bits: the arguments of `quantize` behind its options.
PLAIN = None, None, None, 0, 0, 0, -1


def options_of(fmt, rowwise: bool, columnwise: bool, padded: bool, hadamard: int = 0, of_columns: str = "") -> tuple:
    """`CastOptions` as a schema has them."""
    return fmt.name, rowwise, columnwise, False, padded, hadamard, False, of_columns


def quantize_calls(both: bool):
    """(arguments) of `quantize_both`, which makes both copies, or of `quantize`, which makes one."""
    for rowwise, columnwise, padded in (copies for copies in COPIES if all(copies[:2]) == both):
        square = [(FP8_1X128, FP8_128X128.name)] if columnwise else []
        for fmt, of_columns in [(fmt, "") for fmt in FORMATS.values()] + square:
            options = options_of(fmt, rowwise, columnwise, padded, of_columns=of_columns)
            for x, ends in [(random_tensor(*shape), None) for shape in SHAPES] + [
                (random_tensor(tokens, 48), ends) for ends, tokens in ENDS if fmt.block[0] == 1 and padded
            ]:
                amax = library.tensor_amax_bits(x, ends, False, "auto") if fmt.has_global_scale else None
                yield x, amax, *options, ends, *PLAIN[1:]
    if not both:
        key, amax, number = torch.tensor([1, 2, 3, 5]), torch.ones(()).view(torch.int32), hadamard_number(True)
        for ends, tokens in (*ENDS, (None, 48)):
            for columnwise, hadamard, rounded in ((False, 0, True), (True, 0, True), (True, number, False)):
                options = options_of(NVFP4_1X16, not columnwise, columnwise, True, hadamard)
                bits = key if rounded else None
                yield random_tensor(tokens, 40), amax, *options, ends, None, bits, 1, 0, 2, -1


def norm_calls(quantizing: bool):
    for shape in SHAPES[:2]:
        x, weight = random_tensor(*shape, dtype=torch.bfloat16), torch.ones(shape[1])
        for layer in (False, True):
            *mean, rstd = library.norm_statistics(x, layer, 1e-5, "reference")
            norm = x, weight, None, mean[0] if mean else None, rstd, torch.bfloat16
            for copies in COPIES if quantizing else [()]:
                yield *norm, *(options_of(FP8_1X128, *copies) if copies else ())


def swiglu_calls(count: int, quantizing: bool):
    """count: of tensors, the last of which are gate and up."""
    for shape in SHAPES[:2]:
        tensors = [random_tensor(*shape, dtype=torch.bfloat16, seed=s) / 64 for s in range(3)][3 - count :]
        for copies in COPIES if quantizing else [()]:
            yield *tensors, *((*options_of(FP8_1X128, *copies), None, None) if copies else ())
    for ends, tokens in ENDS if quantizing else ():
        tensors = [torch.randn(tokens, 48, dtype=torch.bfloat16) for _ in range(count)]
        for tables in (None, library.group_tables(ends, tokens, FP8_1X128.name, "reference")):
            yield *tensors, *options_of(FP8_1X128, True, True, True), ends, tables


def grouped_operands(along: str):
    """(groups, experts' weight, a, b)."""
    for ends, tokens in ENDS:
        x, dy, w = torch.randn(tokens, 33), torch.randn(tokens, 48), torch.randn(len(ends), 48, 33)
        for fmt, weight_fmt in (PAIRS[0], PAIRS[2]):
            if along == "m":
                yield Groups(ends), w, quantize(x, fmt), quantize(w, weight_fmt)
            else:
                columnwise = {"rowwise": False, "columnwise": True, "backend": "reference"}
                yield Groups(ends), w, *(ops.quantize(t, fmt, groups=ends, **columnwise).columnwise for t in (dy, x))


def permuted():
    """(x, ids, y, source, weights)."""
    for tokens in (0, 1, 9):
        x, ids = torch.randn(tokens, 24, dtype=torch.bfloat16), torch.randint(0, 5, (tokens, 3))
        y, source, _ = library.permute(x, ids, 4, "reference")
        for weights in (None, torch.rand(tokens, 3)):
            yield x, ids, y, source, weights


def products():
    for m, n, k in ((5, 7, 33), (0, 16, 32), (16, 16, 128)):
        for pair in PAIRS:
            yield n, quantize(random_tensor(m, k), pair[0]), quantize(random_tensor(n, k), pair[1])


# {operation: its arguments, without the backend}
CALLS = {
    "quantize": lambda: quantize_calls(False),
    "quantize_both": lambda: quantize_calls(True),
    "tensor_amax_bits": lambda: (
        *((random_tensor(*shape, dtype=dtype), None, False) for shape in SHAPES for dtype in (torch.bfloat16,)),
        *((random_tensor(3, *shape), None, True) for shape in SHAPES),
        *((torch.randn(tokens, 48), ends, each) for ends, tokens in ENDS for each in (False, True)),
    ),
    "global_scale": lambda: ((torch.tensor(amax).view(torch.int32),) for amax in (0.0, 3.5)),
    "hadamard_amax_bits": lambda: (
        (random_tensor(tokens, 40), hadamard_number(True), ends, None, False) for ends, tokens in (*ENDS, (None, 33))
    ),
    "dequantize": lambda: (
        (*quantize(random_tensor(*shape), fmt), shape[-1], torch.bfloat16)
        for fmt in FORMATS.values()
        for shape in SHAPES
    ),
    "transpose": lambda: (
        (*quantize(random_tensor(*shape), fmt), shape[-1]) for fmt in (FP8_128X128, NVFP4_16X16) for shape in SHAPES
    ),
    "matmul": lambda: (
        (*a, *b, torch.bfloat16, bias) for n, a, b in products() for bias in (None, torch.ones(n))
    ),
    "add_matmul_": lambda: ((torch.zeros(len(a.qdata), n), *a, *b) for n, a, b in products()),
    "grouped_matmul": lambda: (
        (*a, *b, *groups, along, torch.bfloat16) for along in "mk" for groups, _, a, b in grouped_operands(along)
    ),
    "add_grouped_matmul_": lambda: (
        (torch.zeros_like(w), *a, *b, *groups) for groups, w, a, b in grouped_operands("k")
    ),
    "group_tables": lambda: ((ends, n, fmt.name) for ends, n in ENDS for fmt in (FP8_1X128, NVFP4_1X16)),
    "norm_statistics": lambda: ((x, layer, 1e-5) for x, *_ in norm_calls(False) for layer in (False, True)),
    "normalize": lambda: norm_calls(False),
    "norm_quantize": lambda: norm_calls(True),
    "swiglu": lambda: swiglu_calls(2, False),
    "swiglu_quantize": lambda: swiglu_calls(2, True),
    "swiglu_backward": lambda: swiglu_calls(3, False),
    "swiglu_backward_quantize": lambda: swiglu_calls(3, True),
    "permute": lambda: ((x, ids, 4) for x, ids, *_ in permuted()),
    "unpermute": lambda: ((y, source, 3, weights) for _, _, y, source, weights in permuted()),
    "unpermute_backward": lambda: (
        (x, None if weights is None else y, source, 3, weights) for x, _, y, source, weights in permuted()
    ),
    "take_key": lambda: ((torch.tensor([1, 2, 3, 5]), random_tensor(4, 16)),),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    """opcheck's own tests; its test_schema cannot compare fp8 inputs, so the schema is checked here, bit by bit."""
    op = getattr(library, name).default
    in_place = op._schema.is_mutable
    for args in CALLS[name]():
        if op._schema.arguments[-1].name == "backend":
            args = (*args, "reference")
        tests = TESTS[: 1 if in_place else None]
        assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}
        # It counts what it takes where no schema says so.
        inputs = [arg for arg in args[in_place or name == "take_key" :] if isinstance(arg, torch.Tensor)]
        before = [x.clone() for x in inputs]
        outputs = op(*args)
        for x, copy in zip(inputs, before):
            assert_bitwise_equal(x, copy, "an input that was written to")
        assert not in_place or outputs is None
        results = outputs if isinstance(outputs, (tuple, list)) else [x for x in (outputs,) if x is not None]
        storages = [x.untyped_storage().data_ptr() for x in (*inputs, *results) if x.numel()]
        assert len(set(storages)) == len(storages), "an output shares memory with an input or another output"


def test_take_key_counts_and_autograd_does_not_see_it():
    key = torch.tensor([1, 2, 3, 5])
    before, version = key.tolist(), key._version
    assert library.take_key(key, random_tensor(4, 16)).tolist() == before
    assert key.tolist() == [before[0], before[1], before[2] + 1, before[3]] and key._version == version


def test_every_op_of_these_folders_is_checked():
    names = ("dequantization", "fused", "gemm.grouped", "gemm.plain", "groups.permutation")
    names += ("groups.tables", "quantization.operations")
    names += ("transposition",)
    folders = [importlib.import_module(f"torchao_blockwise.ops.{name}") for name in names]
    defined = [x.overload for folder in folders for x in vars(folder).values() if hasattr(x, "overload")]
    assert {op.name().split("::")[1] for op in defined} == CALLS.keys()


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
    """By one graph, and for a single block by at most one more."""

    def both(x):
        return ops.quantize(x, fmt, columnwise=True, backend="reference")

    compiled, counter = compile_counting(both, "aot_eager")
    for count in TOKEN_COUNTS:
        for got, expected in zip(compiled(tokens(count)), both(tokens(count))):
            assert_operands_equal(got, expected)
    assert counter.frame_count == 1
    for count in (5, 16, 13, 517, 8):
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


@pytest.mark.parametrize("by", ("aot_eager", "inductor"))
@pairs
def test_compiled_product_follows_the_token_count(pair, by):
    weight, bias = quantize(random_tensor(48, 160), pair[1]), torch.ones(48)
    compiled, counter = compile_counting(linear, by)
    for count in TOKEN_COUNTS[: 2 if by == "inductor" else None]:
        x = tokens(count)
        assert_bitwise_equal(compiled(x, weight, bias, pair), linear(x, weight, bias, pair))
    assert counter.frame_count == 1
