"""Calls of an operation go through PyTorch's dispatcher: modes, subclasses, profilers and compilers see them."""

import warnings

import pytest
import torch
from defined_ops import ENDS, LEAF, OPERAND, WITH_GLOBAL, DispatchMode, X, assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from torchao_blockwise.formats import FORMATS, CastOptions, Copies, Groups, Operand
from torchao_blockwise.ops.backend import Backend
from torchao_blockwise.ops.operands import without_grad
from torchao_blockwise.ops.registry import OPTIONS, groups, operand


@pytest.fixture(scope="module")
def double(define):
    """double(x, y, times): x · times + y."""

    def run(x, y, times):
        return x * times + (0 if y is None else y)

    return define("Tensor x, Tensor? y, int times", "Tensor", run, fake=lambda x, y, times: torch.empty_like(x))


def test_no_gradient_is_asked_of_operations():
    values = without_grad(LEAF, None, X)
    assert not values[0].requires_grad and values[1] is None and values[2] is X
    assert values[0].data_ptr() == LEAF.data_ptr()
    with torch.no_grad():
        assert without_grad(LEAF)[0] is LEAF


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


def test_modes_and_a_profiler_see_the_operation(double):
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for observer in (DispatchMode(), FunctionMode(), profiler):
        with observer:
            double(X, X, 3)
        if observer is profiler:
            assert double.overload.name() in {event.key for event in profiler.key_averages()}
        else:
            assert observer.seen[0] is double.overload


@pytest.mark.parametrize("position", (0, 1))
def test_a_subclass_sees_the_operation(position, double):
    args = [X, X]
    args[position] = X.as_subclass(Subclass)
    Subclass.seen.clear()
    double(*args, 3)
    assert double.overload in Subclass.seen


def test_meta_and_fake_tensors_take_the_fake(double):
    assert double(X.to("meta"), None, 3).shape == X.shape
    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    assert type(double(fake, None, 3)) is type(fake)
    with mode:
        assert type(double(torch.empty(2, 3), None, 3)) is type(fake)


def test_compilers_see_the_operation(double, fresh_dynamo):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: double(x, None, 3) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), X * 3 + 1)
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert double.overload in targets


@pytest.mark.parametrize("of_groups", (None, Groups(ENDS), Groups(ENDS, ENDS + 1)), ids=("none", "ends", "tables"))
def test_whole_values_are_compiled(of_groups, define, fresh_dynamo):
    """Taken apart and put together in one graph, without a break; inputs of it are tensors alone."""

    def fake(x, groups, options):
        return Copies(x._replace(qdata=x.qdata.new_empty(x.qdata.shape), scale=x.scale.new_empty(x.scale.shape)), None)

    def run(x, groups, options):
        factor = options.padded + (0 if groups is None else sum(t.sum() for t in groups if t is not None))
        return Copies(x._replace(qdata=x.qdata.clone(), scale=(x.scale.float() * factor).to(x.scale.dtype)), None)

    arguments = f"{operand('x')}, {groups('Tensor?')}, {OPTIONS}, str backend"
    op = define(arguments, "Tensor[]", run, takes=(Operand, Groups, CastOptions), fake=fake)

    def both(x, of_groups):
        return op(x, of_groups, CastOptions(FORMATS[x.format_name], padded=True), Backend.AUTO)

    for x in (OPERAND, WITH_GLOBAL):
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        assert_same(compiled(x, of_groups), both(x, of_groups))


def test_a_trace_holds_the_operation(double):
    with warnings.catch_warnings():
        # That tracing is deprecated.
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda x: double(x, None, 3), (X,)).graph
    assert double.overload.name() in str(graph)


@pytest.mark.parametrize("argument", ("Tensor(a!) x", "Tensor(a!)[] x"), ids=("a tensor", "a list"))
def test_operations_change_their_arguments(argument, define):
    op = define(f"Tensor y, {argument}", run=lambda y, x: [t.add_(1) for t in x] and None)
    x = torch.zeros(3, 3)
    assert op(X, [x] if "[]" in argument else x) is None
    assert x.tolist() == [[1, 1, 1]] * 3
