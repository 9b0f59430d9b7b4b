"""How a call of an operation reaches its table: straight with plain tensors, else through PyTorch's dispatcher."""

import contextlib
import warnings

import pytest
import torch
from defined_ops import (
    DIRECT,
    DISPATCHED,
    ENDS,
    LEAF,
    OPERAND,
    WITH_GLOBAL,
    DispatchMode,
    X,
    assert_same,
    way,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import (
    FORMATS,
    CastOptions,
    Copies,
    Groups,
    Operand,
)
from torchao_blockwise.ops import op as op_module
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.op import Changed, ChangedList, without_grad
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

# --- straight to the table --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ways():
    """The ways that calls of `double` took, in order."""
    return []


@pytest.fixture(scope="module")
def double(define, ways):
    """double(x, y, times): x · times + y, an operation that notes the way that it was called."""

    def run(x, y, times):
        ways.append(way())
        return x * times + (0 if y is None else y)

    arguments = {"x": torch.Tensor, "y": torch.Tensor | None, "times": int, "return": torch.Tensor}
    return define(arguments, lambda x, y, times: torch.empty_like(x), run)


def ways_of(ways, call) -> list[str]:
    ways.clear()
    call()
    return list(ways)


PLAIN = {
    "a tensor": ((X, None), contextlib.nullcontext),
    "two tensors": ((X, X), contextlib.nullcontext),
    "a parameter that is frozen": ((torch.nn.Parameter(X, requires_grad=False), X), contextlib.nullcontext),
    "a leaf, without grad": ((LEAF, LEAF), torch.no_grad),
    "inference": ((X, X), torch.inference_mode),
    "autocast": ((X, X), lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize(("args", "context"), PLAIN.values(), ids=PLAIN)
def test_plain_tensors_go_straight(args, context, double, ways):
    with context():
        assert ways_of(ways, lambda: double(*args, 3)) == [DIRECT]
        assert torch.equal(double(*args, 3), double.overload(*args, 3))


def test_in_an_autograd_function_they_go_straight(double, ways):
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return double(x, None, 2)

        @staticmethod
        def backward(ctx, grad):
            return double(grad, None, 2)

    x = torch.ones(3, requires_grad=True)
    assert ways_of(ways, lambda: Layer.apply(x).sum().backward()) == [DIRECT, DIRECT]
    assert x.grad.tolist() == [2, 2, 2]


def test_no_gradient_is_asked_of_operations(double, ways):
    values = without_grad(LEAF, None, X)
    assert not values[0].requires_grad and values[1] is None and values[2] is X
    assert values[0].data_ptr() == LEAF.data_ptr()
    assert ways_of(ways, lambda: double(*values[:2], 3)) == [DIRECT]
    with torch.no_grad():
        assert without_grad(LEAF)[0] is LEAF


# --- through the dispatcher -------------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_dispatch_mode_sees_the_operation(double, ways):
    with DispatchMode() as mode:
        assert ways_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert mode.seen == [double.overload]


def test_a_function_mode_sees_the_operation(double, ways):
    with FunctionMode() as mode:
        assert ways_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert mode.seen[0] is double.overload


@pytest.mark.parametrize("position", (0, 1))
def test_a_subclass_sees_the_operation(position, double, ways):
    args = [X, X]
    args[position] = X.as_subclass(Subclass)
    Subclass.seen.clear()
    assert ways_of(ways, lambda: double(*args, 3)) == [DISPATCHED]
    assert double.overload in Subclass.seen


def test_a_profiler_records_the_operation(double, ways):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert ways_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert double.overload.name() in {event.key for event in profile.key_averages()}
    assert ways_of(ways, lambda: double(X, X, 3)) == [DIRECT]


@pytest.mark.parametrize("position", (0, 1))
def test_autograd_sees_the_operation(position, double, ways):
    """It says, or leaves out, what it must of operations that have no gradient."""
    args = [X, X]
    args[position] = LEAF
    assert ways_of(ways, lambda: double(*args, 3)) == [DISPATCHED]


# An operand's tensors, and what says whether one is on its own; groups likewise.
INSIDE = {
    "qdata": (Operand, lambda t: Operand(t, X, None, "fp8_1x128")),
    "scale": (Operand, lambda t: Operand(X, t, None, "fp8_1x128")),
    "global scale": (Operand, lambda t: Operand(X, X, t, "nvfp4_1x16")),
    "ends": (Groups, lambda t: Groups(t)),
    "tables": (Groups, lambda t: Groups(X, t)),
    "groups, maybe": (Groups | None, lambda t: Groups(X, t)),
}


@pytest.mark.parametrize(("annotation", "value"), INSIDE.values(), ids=INSIDE)
def test_tensors_inside_of_values_are_looked_at(annotation, value, define):
    seen = []
    op = define({"x": torch.Tensor, "n": int, "value": annotation}, run=lambda x, n, value: seen.append(way()))
    op(X, 3, value(X))
    for other in (X.as_subclass(Subclass), LEAF):
        op(X, 3, value(other))
    assert seen == [DIRECT, DISPATCHED, DISPATCHED]
    op(X, 3, value(X.to("meta")))
    assert len(seen) == 3


def test_meta_tensors_take_the_fake(double, ways):
    ways.clear()
    assert double(X.to("meta"), None, 3).shape == X.shape
    assert ways == []


def test_fake_tensors_take_the_fake(double, ways):
    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    ways.clear()
    assert type(double(fake, None, 3)) is type(fake)
    with mode:
        assert type(double(torch.empty(2, 3), None, 3)) is type(fake)
    assert ways == []


def test_compilers_see_the_operation(double, fresh_dynamo):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: double(x, None, 3) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), X * 3 + 1)
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert double.overload in targets


@pytest.mark.parametrize("groups", (None, Groups(ENDS), Groups(ENDS, ENDS + 1)), ids=("none", "ends", "tables"))
def test_whole_values_are_compiled(groups, define, fresh_dynamo):
    """Taken apart and put together in one graph, without a break; inputs of it are tensors alone."""

    def fake(x, groups, options):
        return Copies(x._replace(qdata=x.qdata.new_empty(x.qdata.shape), scale=x.scale.new_empty(x.scale.shape)), None)

    def run(x, groups, options):
        factor = options.padded + (0 if groups is None else sum(t.sum() for t in groups if t is not None))
        return Copies(x._replace(qdata=x.qdata.clone(), scale=(x.scale.float() * factor).to(x.scale.dtype)), None)

    op = define({"x": Operand, "groups": Groups | None, "options": CastOptions, "return": Operand}, fake, run)

    def both(x, groups):
        options = CastOptions(FORMATS[x.format_name], padded=True)
        return op(x, groups, options).rowwise

    for x in (OPERAND, WITH_GLOBAL):
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        got, expected = compiled(x, groups), both(x, groups)
        assert_bitwise_equal(got.qdata, expected.qdata)
        assert_bitwise_equal(got.scale, expected.scale)


def test_a_trace_holds_the_operation(double):
    with warnings.catch_warnings():
        # That tracing is deprecated.
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda x: double(x, None, 3), (X,)).graph
    assert double.overload.name() in str(graph)


def test_transforms_are_noticed():
    seen = []
    torch.func.vmap(lambda x: (seen.append(_compat.is_watched()), x)[1])(X)
    assert seen == [True]
    assert not _compat.is_watched()


@pytest.mark.parametrize("annotation", (Changed, ChangedList), ids=("a tensor", "a list"))
def test_operations_that_change_arguments_are_always_dispatched(annotation, define):
    """Else functionalization would not see the change."""
    seen = []
    op = define({"y": torch.Tensor, "x": annotation}, run=lambda y, x: seen.append(way()) or [t.add_(1) for t in x])
    x = torch.zeros(3, 3)
    assert op(X, x if annotation is Changed else [x]) is None
    assert seen == [DISPATCHED] and x.tolist() == [[1, 1, 1]] * 3


def test_operations_on_lists_are_always_dispatched(define):
    seen = []
    op = define({"xs": list[torch.Tensor], "n": int}, run=lambda xs, n: seen.append(way()))
    op([X, X], 3)
    assert seen == [DISPATCHED]


# --- sharding rules ---------------------------------------------------------------------------------------------------


def test_rules_are_of_whole_values(define, monkeypatch):
    """Whole specs in, placements of whole values out; None stands for all parts of a value."""
    from torch.distributed.tensor import Replicate, Shard

    rules, seen = {}, []
    monkeypatch.setattr(op_module._compat, "register_sharding", rules.__setitem__)

    def rule(x, a, groups, backend):
        seen.append((x, a, groups, backend))
        return [
            ([Replicate()], [Replicate(), Operand(Replicate(), Replicate(), None, None), None, None]),
            ([Shard(0)], [Shard(0), Operand(Shard(0), Shard(1), Replicate(), None), None, None]),
        ]

    arguments = {"x": torch.Tensor, "a": Operand, "groups": Groups, "backend": Backend, "return": torch.Tensor}
    op = define(arguments, sharding=rule)
    # A spec is whatever PyTorch gives in a tensor's place.
    answer = rules[op.overload]("spec", *WITH_GLOBAL, ENDS, None, "triton")
    assert_same(list(seen[0]), ["spec", WITH_GLOBAL, Groups(ENDS), Backend.TRITON])
    assert answer == [
        ([Replicate()], [Replicate(), Replicate(), Replicate(), None, None, None, None, None]),
        ([Shard(0)], [Shard(0), Shard(0), Shard(1), Replicate(), None, None, None, None]),
    ]


# --- the package's operations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_both_ways_give_the_same_bits(fmt):
    x = random_tensor(40, 48, dtype=torch.bfloat16, seed=3)

    def results():
        copies = ops.quantize(x, fmt, columnwise=True, backend="reference")
        q = ops.quantize(x, fmt, rowwise=False, columnwise=True, backend="reference").columnwise
        other = (
            ops.transpose(q, backend="reference").qdata
            if FORMATS[fmt].is_square
            else ops.matmul(q, q, out_dtype=torch.float32, backend="reference")
        )
        return [*copies, ops.quantize(x, fmt, backend="reference").rowwise, q], [ops.dequantize(q), other]

    operands, tensors = results()
    with DispatchMode() as mode:
        seen_operands, seen_tensors = results()
    assert {"quantize", "quantize_both", "dequantize"} <= {func.__name__.split(".")[0] for func in mode.seen}
    for got, expected in zip(seen_operands, operands, strict=True):
        assert_operands_equal(got, expected)
    for got, expected in zip(seen_tensors, tensors, strict=True):
        assert_bitwise_equal(got, expected)
