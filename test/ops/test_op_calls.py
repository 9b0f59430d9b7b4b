"""Calls of an operation go through PyTorch's dispatcher: modes, subclasses, profilers and compilers see them."""

import warnings

import pytest
import torch
from defined_ops import (
    ENDS,
    LEAF,
    OPERAND,
    WITH_GLOBAL,
    DispatchMode,
    X,
    assert_same,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

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
from torchao_blockwise.testing import assert_bitwise_equal


@pytest.fixture(scope="module")
def double(define):
    """double(x, y, times): x · times + y."""

    def run(x, y, times):
        return x * times + (0 if y is None else y)

    arguments = {"x": torch.Tensor, "y": torch.Tensor | None, "times": int, "return": torch.Tensor}
    return define(arguments, lambda x, y, times: torch.empty_like(x), run)


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


def test_a_dispatch_mode_sees_the_operation(double):
    with DispatchMode() as mode:
        double(X, X, 3)
    assert mode.seen == [double.overload]


def test_a_function_mode_sees_the_operation(double):
    with FunctionMode() as mode:
        double(X, X, 3)
    assert mode.seen[0] is double.overload


@pytest.mark.parametrize("position", (0, 1))
def test_a_subclass_sees_the_operation(position, double):
    args = [X, X]
    args[position] = X.as_subclass(Subclass)
    Subclass.seen.clear()
    double(*args, 3)
    assert double.overload in Subclass.seen


def test_a_profiler_records_the_operation(double):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        double(X, X, 3)
    assert double.overload.name() in {event.key for event in profile.key_averages()}


def test_meta_tensors_take_the_fake(double):
    assert double(X.to("meta"), None, 3).shape == X.shape


def test_fake_tensors_take_the_fake(double):
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


@pytest.mark.parametrize("annotation", (Changed, ChangedList), ids=("a tensor", "a list"))
def test_operations_change_their_arguments(annotation, define):
    op = define({"y": torch.Tensor, "x": annotation}, run=lambda y, x: [t.add_(1) for t in x])
    x = torch.zeros(3, 3)
    assert op(X, x if annotation is Changed else [x]) is None
    assert x.tolist() == [[1, 1, 1]] * 3


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
