"""An operation's two ways: straight to the implementation, and through PyTorch's dispatcher where anything watches."""

import contextlib
import sys
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import FORMATS
from torchao_blockwise.ops import library
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

NAMESPACE = "torchao_blockwise_test"
DIRECT, DISPATCHED = "direct", "dispatched"


@pytest.fixture(scope="module")
def define():
    """`define_op` in a namespace of its own, which is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "NAMESPACE", NAMESPACE)
        patch.setattr(library, "_library", torch.library.Library(NAMESPACE, "DEF"))
        yield library.define_op


@pytest.fixture(scope="module")
def ways():
    """The ways that calls of `double` took, in order."""
    return []


@pytest.fixture(scope="module")
def double(define, ways):
    """double(x, y, times): x · times + y, an operation that notes the way that it was called."""

    def implementation(x, y, times):
        caller = sys._getframe(1).f_code
        ways.append(DIRECT if caller.co_filename == library.__file__ else DISPATCHED)
        return x * times + (0 if y is None else y)

    def fake(x, y, times):
        return torch.empty_like(x)

    return define("double(Tensor x, Tensor? y, SymInt times) -> Tensor", implementation, fake)


def way_of(ways, call) -> list[str]:
    ways.clear()
    call()
    return list(ways)


class DispatchMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


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


# --- straight ---------------------------------------------------------------------------------------------------------


X = torch.arange(6.0).reshape(2, 3)
LEAF = torch.ones(2, 3, requires_grad=True)
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
        assert way_of(ways, lambda: double(*args, 3)) == [DIRECT]
        assert torch.equal(double(*args, 3), torch.ops.torchao_blockwise_test.double(*args, 3))


def test_in_an_autograd_function_they_go_straight(double, ways):
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return double(x, None, 2)

        @staticmethod
        def backward(ctx, grad):
            return double(grad, None, 2)

    x = torch.ones(3, requires_grad=True)
    assert way_of(ways, lambda: Layer.apply(x).sum().backward()) == [DIRECT, DIRECT]
    assert x.grad.tolist() == [2, 2, 2]


# --- through the dispatcher -------------------------------------------------------------------------------------------


def test_a_dispatch_mode_sees_the_operation(double, ways):
    with DispatchMode() as mode:
        assert way_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert mode.seen == [torch.ops.torchao_blockwise_test.double.default]


def test_a_function_mode_sees_the_operation(double, ways):
    with FunctionMode() as mode:
        assert way_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert mode.seen[0] is torch.ops.torchao_blockwise_test.double.default


@pytest.mark.parametrize("position", (0, 1))
def test_a_subclass_sees_the_operation(position, double, ways):
    args = [X, X]
    args[position] = X.as_subclass(Subclass)
    Subclass.seen.clear()
    assert way_of(ways, lambda: double(*args, 3)) == [DISPATCHED]
    assert torch.ops.torchao_blockwise_test.double.default in Subclass.seen


def test_a_profiler_records_the_operation(double, ways):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert way_of(ways, lambda: double(X, X, 3)) == [DISPATCHED]
    assert f"{NAMESPACE}::double" in {event.key for event in profile.key_averages()}
    assert way_of(ways, lambda: double(X, X, 3)) == [DIRECT]


@pytest.mark.parametrize("position", (0, 1))
def test_autograd_sees_the_operation(position, double, ways):
    """It says, or leaves out, what it must of operations that have no gradient."""
    args = [X, X]
    args[position] = LEAF
    assert way_of(ways, lambda: double(*args, 3)) == [DISPATCHED]


def test_meta_tensors_take_the_fake(double, ways):
    ways.clear()
    assert double(X.to("meta"), None, 3).shape == X.shape
    assert ways == []


def test_fake_tensors_take_the_fake(double, ways):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    ways.clear()
    assert type(double(fake, None, 3)) is type(fake)
    with mode:
        assert type(double(torch.empty(2, 3), None, 3)) is type(fake)
    assert ways == []


def test_compilers_see_the_operation(double):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: double(x, None, 3) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), X * 3 + 1)
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert torch.ops.torchao_blockwise_test.double.default in targets


def test_a_trace_holds_the_operation(double):
    with warnings.catch_warnings():
        # That tracing is deprecated.
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda x: double(x, None, 3), (X,)).graph
    assert f"{NAMESPACE}::double" in str(graph)


def test_transforms_are_noticed():
    seen = []
    torch.func.vmap(lambda x: (seen.append(_compat.is_watched()), x)[1])(X)
    assert seen == [True]
    assert not _compat.is_watched()


def test_operations_that_change_arguments_are_always_dispatched(define):
    """Else nobody would count the change."""

    def add_one_(x):
        x.add_(1)

    op = define("add_one_(Tensor(a!) x) -> ()", add_one_, lambda x: None)
    x = torch.zeros(3)
    op(x)
    assert op is torch.ops.torchao_blockwise_test.add_one_.default
    assert x.tolist() == [1, 1, 1] and x._version == 1


def test_operations_on_lists_are_always_dispatched(define):
    op = define("total(Tensor[] xs) -> Tensor", lambda xs: torch.stack(xs).sum(0), lambda xs: torch.empty_like(xs[0]))
    assert torch.equal(op([X, X]), 2 * X)
    assert op is torch.ops.torchao_blockwise_test.total.default


# --- the package's operations -----------------------------------------------------------------------------------------


def tensors_of(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result if part is not None for t in tensors_of(part)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_both_ways_give_the_same_bits(fmt):
    x = random_tensor(40, 48, dtype=torch.bfloat16, seed=3)
    square = FORMATS[fmt].is_square

    def results():
        yield ops.quantize(x, fmt, backend="reference")
        yield ops.quantize(x, fmt, columnwise=True, backend="reference")
        q = ops.quantize(x, fmt, rowwise=False, columnwise=True, backend="reference")
        yield q
        yield ops.dequantize(q)
        if square:
            yield ops.transpose(q, backend="reference")
        else:
            yield ops.matmul(q, q, out_dtype=torch.float32, backend="reference")

    straight = [t for result in results() for t in tensors_of(result)]
    with DispatchMode() as mode:
        dispatched = [t for result in results() for t in tensors_of(result)]
    assert {"quantize", "quantize_both", "dequantize"} <= {func.__name__.split(".")[0] for func in mode.seen}
    for got, expected in zip(straight, dispatched, strict=True):
        assert_bitwise_equal(got, expected)
