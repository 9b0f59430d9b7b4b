"""What an `Operation` makes of its description: schema, fake, whole values, results, a table of backends.

Calls of it go through PyTorch's dispatcher where modes, subclasses, profilers or compilers observe them.
"""

import contextlib
import sys
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import ops
from torchao_blockwise._compat import pytree
from torchao_blockwise.formats import (
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    CastOptions,
    Copies,
    Groups,
    Operand,
    Place,
)
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.fused import NORM, Norm
from torchao_blockwise.ops.registry import OPTIONS, PLACE, groups, operand
from torchao_blockwise.ops.shards import SHARDS
from torchao_blockwise.ops.shards.flat import Shards
from torchao_blockwise.testing import assert_bitwise_equal

X = torch.arange(6.0).reshape(2, 3)
OPERAND, WITH_GLOBAL = (
    ops.quantize(torch.ones(2, 128), fmt, backend="reference").rowwise for fmt in (FP8_1X128, NVFP4_1X16)
)
ENDS = torch.tensor([1, 2], dtype=torch.int32)


def assert_same(got, given) -> None:
    assert type(got) is type(given)
    if isinstance(given, (list, tuple)):
        assert len(got) == len(given)
        for a, b in zip(got, given):
            assert_same(a, b)
    elif isinstance(given, torch.Tensor):
        assert_bitwise_equal(got, given)
    else:
        assert got == given


# --- schemas and values -----------------------------------------------------------------------------------------------

FIELDS = {"options": (OPTIONS, CastOptions), "place": (PLACE, Place), "norm": (NORM, Norm), "shards": (SHARDS, Shards)}


@pytest.mark.parametrize(("schema", "value"), FIELDS.values(), ids=FIELDS)
def test_a_schema_has_the_fields_of_its_value(schema, value):
    assert [argument.split()[-1] for argument in schema.split(", ")] == list(value._fields)


@pytest.mark.parametrize("takes", ((None,), (None, Operand), (Groups, None)), ids=str)
def test_values_and_schema_must_agree(takes, define):
    with pytest.raises(AssertionError, match=r"^op[0-9]+ takes values of [0-9] arguments, its schema has [0-9]$"):
        define("Tensor x, Tensor y, str backend", takes=takes)


def test_formats_and_backends_that_do_not_exist(define):
    op = define("str fmt, str products_by, str backend")
    for values, message in (
        (("fp7", "triton", "auto"), "unknown block format 'fp7'"),
        ((NVFP4_1X16.name, "tritn", "auto"), "unknown backend 'tritn'"),
        ((NVFP4_1X16.name, "triton", "aut"), "unknown backend 'aut'"),
    ):
        with pytest.raises(ValueError, match=message):
            op.overload(*values)
    with pytest.raises(ValueError, match="unknown backend 'aut'"):
        op(NVFP4_1X16, Backend.TRITON, "aut")


# A schema's arguments, what they are, a value.
VALUES = {
    "tensor": ("Tensor x", None, X),
    "no tensor": ("Tensor? x", None, None),
    "tensors": ("Tensor[] x", None, [X, X + 1]),
    "changed list": ("Tensor(a!)[] x", None, [X.clone(), X.clone()]),
    "ints": ("SymInt[] x", None, [3, -4]),
    "float": ("float x", None, 0.1),
    "str": ("str x", None, "some words"),
    "dtype": ("ScalarType x", None, torch.bfloat16),
    "format": ("str fmt", None, NVFP4_1X16),
    "another backend": ("str products_by", None, Backend.CUBLAS),
    "operand": (operand("x"), Operand, OPERAND),
    "operand with a global scale": (operand("x"), Operand, WITH_GLOBAL),
    "no operand": (operand("x", "Tensor?"), Operand, None),
    "options": (OPTIONS, CastOptions, CastOptions(FP8_128X128, False, True, True, False)),
    "other options": (OPTIONS, CastOptions, CastOptions(NVFP4_1X16, True, False, False, True, 5, True)),
    "place": (PLACE, Place, Place(1, 2, 3, -1)),
    "shards": (SHARDS, Shards, Shards([X[0], X[1]], [0, 3], [1, 2, 3] * 2, [0, 1], torch.float16, FP8_128X128)),
    "norm": (NORM.replace("Tensor x", "Tensor y"), Norm, Norm(X, None, X[0], None, X[:, 0], torch.bfloat16)),
    "groups": (groups(), Groups, Groups(ENDS)),
    "no groups": (groups("Tensor?"), Groups, None),
    "groups with tables": (groups("Tensor?"), Groups, Groups(ENDS, ENDS + 1)),
}


@pytest.mark.parametrize(("arguments", "kind", "value"), VALUES.values(), ids=VALUES)
def test_values_arrive_whole(arguments, kind, value, define, monkeypatch):
    """Between two tensors, so that none takes a part of its neighbor; at the row, the choices, the check, the fake."""
    seen = {}

    def note(who):
        return lambda *args: seen.update({who: args})

    op = define(
        f"Tensor before, {arguments}, Tensor after, str backend",
        takes=(None, kind, None),
        table=[
            Implementation(Backend.TRITON, note("run"), lambda *args: "the next row is asked too"),
            Implementation(Backend.REFERENCE, note("run"), note("why not")),
        ],
        **{who: note(who) for who in ("preferred_backend", "check", "fake")},
        flops=lambda *args: note("flops")(*args) or 0,
    )
    # Elsewhere nothing is preferred on a CPU.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    op(X, value, X - 1, Backend.AUTO)
    assert set(seen) == {"check", "preferred_backend", "why not", "run"}
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        op(X, value, X - 1, Backend.AUTO)
    for args in seen.values():
        assert_same(list(args), [X, value, X - 1])
    assert "flops" in seen
    on_meta = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), [X, value, X - 1])
    op(*on_meta, Backend.AUTO)
    assert len(seen["fake"]) == 3 and type(seen["fake"][1]) is type(value)


# --- results ----------------------------------------------------------------------------------------------------------

PARTS = [OPERAND.qdata, OPERAND.scale]
# (schema, what a row and a fake return, what the operation returns).
RESULTS = {
    "nothing": ("()", None, None),
    "tensor": ("Tensor", X, X),
    "three tensors": ("(Tensor, Tensor, Tensor)", (X, X, X + 1), [X, X, X + 1]),
    "list": ("Tensor[]", [X, None, X + 1], [X, X + 1]),
    "tuple": ("Tensor[]", (None, X), [X]),
    "operand": ("(Tensor, Tensor)", OPERAND, PARTS),
    "copies": ("Tensor[]", Copies(OPERAND, OPERAND), [*PARTS, *PARTS]),
    "a copy": ("Tensor[]", Copies(None, OPERAND), PARTS),
}


@pytest.mark.parametrize(("schema", "result", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_tensors(schema, result, expected, define):
    def make(x):
        # In separate memory, as results must have it.
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)

    op = define("Tensor x", schema, make, fake=make)
    for x in (X, X.to("meta")):
        got = op(x)
        assert_same(list(got) if isinstance(expected, list) else got, expected)


@pytest.mark.parametrize("argument", ("Tensor(a!) x", "Tensor(a!)[] x"), ids=("a tensor", "a list"))
def test_operations_change_their_arguments(argument, define):
    op = define(f"Tensor y, {argument}", run=lambda y, x: [t.add_(1) for t in x] and None)
    assert op.overload.name().endswith(f"::{op.name}_")
    x = torch.zeros(3, 3)
    assert op(X, [x] if "[]" in argument else x) is None
    assert x.tolist() == [[1, 1, 1]] * 3


# --- tables and checks ------------------------------------------------------------------------------------------------


def test_a_row_by_name_is_imported_when_it_runs(define, monkeypatch):
    module = f"{__name__}_of_kernels"
    op = define("Tensor(a!) x", table=[Implementation(Backend.REFERENCE, f"{module}:twice")])
    with pytest.raises(ModuleNotFoundError, match=module):
        op(X)
    kernels = types.ModuleType(module)
    kernels.twice = lambda x: None if x.mul_(2) is x else x
    monkeypatch.setitem(sys.modules, module, kernels)
    x = X.clone()
    op(x)
    assert torch.equal(x, 2 * X)


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_checks_are_of_values_and_of_fakes(device, define):
    ran = []

    def note(x, n):
        ran.append(1)

    def check(x, n):
        if n > x.shape[0]:
            raise ValueError(f"n is {n}")

    op = define("Tensor x, int n, str backend", "()", note, fake=note, check=check)
    op(X.to(device), 2, Backend.AUTO)
    with pytest.raises(ValueError, match=r"^n is 3$"):
        op(X.to(device), 3, Backend.AUTO)
    assert ran == [1]


# --- who observes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def double(define):
    """double(x, y, times): x · times + y."""

    def run(x, y, times):
        return x * times + (0 if y is None else y)

    return define("Tensor x, Tensor? y, int times", "Tensor", run, fake=lambda x, y, times: torch.empty_like(x))


@pytest.mark.parametrize("mode", (contextlib.nullcontext, lambda: DispatchMode()), ids=("direct", "intercepted"))
def test_operations_are_not_differentiable(double, mode):
    leaf = torch.ones(2, 3, requires_grad=True)
    with mode():
        assert not double(leaf, None, 2).requires_grad


SEEN: list = []


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        SEEN.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_subclasses_a_profiler_and_traces_see_the_operation(double):
    other = X.as_subclass(Subclass)
    for mode, x, y in ((DispatchMode(), X, X), (FunctionMode(), X, X), (None, other, X), (None, X, other)):
        SEEN.clear()
        if mode is None:
            double(x, y, 3)
        else:
            with mode:
                double(x, y, 3)
        assert double.overload in SEEN
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        double(X, X, 3)
    assert double.overload.name() in {event.key for event in profiler.key_averages()}
    with warnings.catch_warnings():
        # That tracing is deprecated.
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda x: double(x, None, 3), (X,)).graph
    assert double.overload.name() in str(graph)


def test_meta_and_fake_tensors_take_the_fake(double):
    assert double(X.to("meta"), None, 3).shape == X.shape
    mode = FakeTensorMode()
    fake = mode.from_tensor(X)
    assert type(double(fake, None, 3)) is type(fake)
    with mode:
        assert type(double(torch.empty(2, 3), None, 3)) is type(fake)


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
    targets = []

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def both(x, of_groups):
        return op(x, of_groups, CastOptions(FORMATS[x.format_name], padded=True), Backend.AUTO)

    for x in (OPERAND, WITH_GLOBAL):
        compiled = torch.compile(both, backend=backend, fullgraph=True)
        assert_same(compiled(x, of_groups), both(x, of_groups))
    assert targets.count(op.overload) == 2
