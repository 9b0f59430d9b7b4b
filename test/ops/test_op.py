"""What `define_op` makes of a function: a schema, a fake, and two ways for whole values.

Plain tensors go straight to the table, all others through PyTorch's dispatcher: where anything watches, it sees them.
"""

import contextlib
import sys
import types
import warnings
from typing import Annotated

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import (
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
)
from torchao_blockwise.ops import op as op_module
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.op import Changed, ChangedList, copies_of, without_grad
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

NAMESPACE = "torchao_blockwise_test"
DIRECT, DISPATCHED = "direct", "dispatched"
X = torch.arange(6.0).reshape(2, 3)
LEAF = torch.ones(2, 3, requires_grad=True)


@pytest.fixture(scope="module")
def namespace():
    """Operations are defined in a namespace of its own, which is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "NAMESPACE", NAMESPACE)
        patch.setattr(op_module, "_library", torch.library.Library(NAMESPACE, "DEF"))
        yield


@pytest.fixture(scope="module")
def define(namespace):
    """define(annotations, fake, run, ..): an operation `op<n>` of arguments with these annotations, and "return"."""
    names = (f"op{n}" for n in range(1000))

    def define(annotations: dict, fake=lambda *args: None, run=None, **options):
        arguments = ", ".join(name for name in annotations if name != "return")
        scope: dict = {"fake": fake}
        exec(f"def fake_op({arguments}): return fake({arguments})", scope)
        described = scope["fake_op"]
        described.__name__ = f"{next(names)}_op"
        described.__annotations__ = {"return": None, **annotations}
        table = options.pop("table", (Implementation(Backend.REFERENCE, run or fake),))
        return op_module.define_op(table, **options)(described)

    return define


def way() -> str:
    """How the implementation that asks was reached."""
    compute = sys._getframe(2)
    callers = compute.f_code.co_name, compute.f_back.f_code.co_name
    assert callers in (("compute", "call"), ("compute", "run"))
    return DIRECT if callers[1] == "call" else DISPATCHED


class DispatchMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# A mode that changes nothing makes every call a dispatched one.
both_ways = pytest.mark.parametrize("watching", (contextlib.nullcontext, DispatchMode), ids=(DIRECT, DISPATCHED))


def schema_of(op) -> str:
    """Without the name."""
    schema = str(op.overload._schema)
    return schema[schema.index("(") :]


# --- schemas ----------------------------------------------------------------------------------------------------------

SCHEMAS = {
    "tensor": (torch.Tensor, "Tensor x"),
    "optional tensor": (torch.Tensor | None, "Tensor? x"),
    "tensors": (list[torch.Tensor], "Tensor[] x"),
    "changed": (Changed, "Tensor(a!) x"),
    "changed list": (ChangedList, "Tensor(a!)[] x"),
    "int": (int, "SymInt x"),
    "ints": (list[int], "SymInt[] x"),
    "bool": (bool, "bool x"),
    "float": (float, "float x"),
    "str": (str, "str x"),
    "dtype": (torch.dtype, "ScalarType x"),
    "optional dtype": (torch.dtype | None, "ScalarType? x"),
    "format": (BlockFormat, "str x"),
    "backend": (Backend, "str x"),
    "operand": (Operand, "Tensor x, Tensor x_scale, Tensor? x_global, str x_format"),
    "options": (CastOptions, "str fmt, bool rowwise, bool columnwise, bool power_of_2_scales, bool padded"),
    "groups": (Groups, "Tensor x_ends, Tensor? x_tables"),
    "optional groups": (Groups | None, "Tensor? x_ends, Tensor? x_tables"),
}


@pytest.mark.parametrize(("annotation", "schema"), SCHEMAS.values(), ids=SCHEMAS)
def test_annotations_give_the_schema(annotation, schema, define):
    assert schema_of(define({"x": annotation})) == f"({schema}) -> ()"


def test_every_annotation_is_tested():
    assert [annotation for annotation, _ in SCHEMAS.values()] == list(op_module._KINDS)
    assert [annotation for annotation, *_ in RESULTS.values()] == list(op_module._RESULTS)


def test_arguments_keep_their_order_and_each_changed_one_has_an_alias_of_its_own(define):
    op = define({"out": Changed, "a": Operand, "rest": ChangedList, "n": int, "backend": Backend})
    assert schema_of(op) == (
        "(Tensor(a!) out, Tensor a, Tensor a_scale, Tensor? a_global, str a_format, Tensor(b!)[] rest, SymInt n, "
        "str backend) -> ()"
    )


@pytest.mark.parametrize(("annotation", "ending"), ((torch.Tensor, ""), (Changed, "_"), (ChangedList, "_")))
def test_what_changes_arguments_is_named_so(annotation, ending, define):
    op = define({"x": annotation})
    assert op.overload.name() == f"{NAMESPACE}::{op.__name__.removesuffix('_op')}{ending}"


@pytest.mark.parametrize(
    ("annotations", "unknown"),
    (
        ({"x": torch.Tensor, "y": complex}, "<class 'complex'>"),
        ({"x": torch.Tensor | int, "y": Annotated[torch.Tensor, "seen"]}, r"torch.Tensor | int, .*Annotated\[.*'seen'"),
        ({"x": torch.Tensor, "return": Groups}, "Groups"),
    ),
    ids=("an argument", "two arguments", "a result"),
)
def test_unknown_annotations_are_refused(annotations, unknown, define):
    with pytest.raises(TypeError, match=f"^define_op: op[0-9]+_op has annotations that no schema has: .*{unknown}"):
        define(annotations)


# --- values -----------------------------------------------------------------------------------------------------------

OPERAND = ops.quantize(torch.ones(2, 128), FP8_1X128, backend="reference").rowwise
WITH_GLOBAL = ops.quantize(torch.ones(2, 128), NVFP4_1X16, backend="reference").rowwise
ENDS = torch.tensor([1, 2], dtype=torch.int32)
VALUES = {
    "tensor": (torch.Tensor, X),
    "no tensor": (torch.Tensor | None, None),
    "a tensor, maybe": (torch.Tensor | None, X),
    "tensors": (list[torch.Tensor], [X, X + 1]),
    "changed": (Changed, X.clone()),
    "changed list": (ChangedList, [X.clone(), X.clone()]),
    "int": (int, 3),
    "ints": (list[int], [3, -4]),
    "bool": (bool, True),
    "float": (float, 0.1),
    "str": (str, "some words"),
    "dtype": (torch.dtype, torch.bfloat16),
    "no dtype": (torch.dtype | None, None),
    "format": (BlockFormat, NVFP4_1X16),
    "operand": (Operand, OPERAND),
    "operand with a global scale": (Operand, WITH_GLOBAL),
    "options": (CastOptions, CastOptions(FP8_128X128, False, True, True, False)),
    "other options": (CastOptions, CastOptions(NVFP4_1X16, True, False, False, True)),
    "groups": (Groups, Groups(ENDS)),
    "groups with tables": (Groups, Groups(ENDS, ENDS + 1)),
    "no groups": (Groups | None, None),
    "groups, maybe": (Groups | None, Groups(ENDS, ENDS + 1)),
}


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


@both_ways
@pytest.mark.parametrize(("annotation", "value"), VALUES.values(), ids=VALUES)
def test_values_arrive_whole(annotation, value, watching, define):
    """Between two tensors, so that none takes a part of its neighbor; at the row, the choices, the check."""
    seen = {}

    def note(who):
        return lambda *args: seen.update({who: args})

    op = define(
        {"before": torch.Tensor, "x": annotation, "after": torch.Tensor, "backend": Backend},
        table=(Implementation(Backend.REFERENCE, note("run"), note("why not")),),
        first=note("first"), expected=note("expected"), check=note("check"),
    )  # fmt: skip
    with watching():
        op(X, value, X - 1, Backend.AUTO)
    assert set(seen) == {"check", "first", "expected", "why not", "run"}
    for args in seen.values():
        assert_same(list(args), [X, value, X - 1])


@both_ways
def test_only_the_argument_named_backend_chooses(watching, define):
    seen = []
    op = define({"x": torch.Tensor, "products_by": Backend}, run=lambda x, products_by: seen.append(products_by))
    with watching():
        op(X, Backend.CUBLAS)
    assert seen == [Backend.CUBLAS]


# --- results ----------------------------------------------------------------------------------------------------------

PARTS = [OPERAND.qdata, OPERAND.scale]
RESULTS = {
    "nothing": (type(None), "()", None, None),
    "tensor": (torch.Tensor, "Tensor", X, X),
    "two tensors": (tuple[torch.Tensor, torch.Tensor], "(Tensor, Tensor)", (X, X + 1), [X, X + 1]),
    "three tensors": (
        tuple[torch.Tensor, torch.Tensor, torch.Tensor], "(Tensor, Tensor, Tensor)", (X, X, X + 1), [X, X, X + 1]
    ),
    "list": (list[torch.Tensor], "Tensor[]", [X, None, X + 1], [X, X + 1]),
    "operand": (Operand, "(Tensor, Tensor)", OPERAND, PARTS),
    "two operands": (
        tuple[Operand, Operand], "(Tensor, Tensor, Tensor, Tensor)", (OPERAND, OPERAND), [*PARTS, *PARTS]
    ),
    "copies": (Copies, "Tensor[]", Copies(OPERAND, OPERAND), [*PARTS, *PARTS]),
}  # fmt: skip


def own(x):
    """`x` in memory of its own, as results must have it."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, (list, tuple)):
        parts = [own(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


@both_ways
@pytest.mark.parametrize(("annotation", "schema", "result", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_tensors(annotation, schema, result, expected, watching, define):
    op = define({"x": torch.Tensor, "return": annotation}, lambda x: own(result))
    assert schema_of(op) == f"(Tensor x) -> {schema}"
    for x in (X, X.to("meta")):
        with watching():
            got = op(x)
        assert_same(list(got) if isinstance(expected, list) else got, expected)


@pytest.mark.parametrize("annotation", (Operand, Copies), ids=lambda a: a.__name__)
@pytest.mark.parametrize("copies", (Copies(OPERAND, None), Copies(None, OPERAND)), ids=("rowwise", "columnwise"))
def test_one_of_two_copies_is_an_operand(copies, annotation, define):
    op = define({"x": torch.Tensor, "return": annotation}, lambda x: own(copies))
    assert_same(list(op(X)), PARTS)


@pytest.mark.parametrize("global_scale", (None, torch.tensor(2.0)), ids=("none", "global"))
@pytest.mark.parametrize(("rowwise", "columnwise"), ((True, False), (False, True), (True, True)))
def test_copies_are_put_together(rowwise, columnwise, global_scale):
    options = CastOptions(NVFP4_1X16, rowwise, columnwise)
    tensors = [X + i for i in range(2 * (rowwise + columnwise))]
    copies = copies_of(tensors, options, global_scale)
    assert type(copies) is Copies
    expected = [Operand(*pair, global_scale, "nvfp4_1x16") for pair in (tensors[:2], tensors[-2:])]
    for got, want, asked in zip(copies, expected, (rowwise, columnwise)):
        assert got is None if not asked else got == want


# --- tables and checks ------------------------------------------------------------------------------------------------


def test_the_backend_chooses_the_row(define):
    ran, refuse = [], {"triton": "it is told not to"}
    table = [
        Implementation(backend, lambda x, b=backend: ran.append(b), lambda x, b=backend: refuse.get(b.value))
        for backend in (Backend.TRITON, Backend.REFERENCE)
    ]
    op = define({"x": torch.Tensor, "backend": Backend}, table=table)
    assert op.table is table
    op(X, Backend.REFERENCE)
    op(X, Backend.AUTO)
    name = op.overload.name().split("::")[1]
    with pytest.raises(ValueError, match=f"^{name}: backend triton cannot run: it is told not to; choose another, or"):
        op(X, Backend.TRITON)
    refuse.clear()
    op(X, Backend.TRITON)
    op(X, Backend.AUTO)
    assert ran == [Backend.REFERENCE, Backend.REFERENCE, Backend.TRITON, Backend.TRITON]
    with pytest.raises(ValueError, match=f"^{name}: backend gluon has no implementation; choose one of triton, refer"):
        op(X, Backend.GLUON)


def test_a_row_by_name_is_imported_when_it_runs(define, monkeypatch):
    module = f"{__name__}_of_kernels"
    op = define({"x": torch.Tensor}, table=(Implementation(Backend.REFERENCE, f"{module}:twice"),))
    with pytest.raises(ModuleNotFoundError, match=module):
        op(X)
    kernels = types.ModuleType(module)
    kernels.twice = lambda x: x.mul_(2)
    monkeypatch.setitem(sys.modules, module, kernels)
    x = X.clone()
    op(x)
    assert torch.equal(x, 2 * X)


@both_ways
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_checks_are_of_values_and_of_fakes(device, watching, define):
    ran = []

    def check(x, n):
        if n > x.shape[0]:
            raise ValueError(f"n is {n}")

    op = define({"x": torch.Tensor, "n": int, "backend": Backend}, lambda *_: ran.append(1), check=check)
    with watching():
        op(X.to(device), 2, Backend.AUTO)
    with watching(), pytest.raises(ValueError, match=r"^n is 3$"):
        op(X.to(device), 3, Backend.AUTO)
    assert ran == [1]


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
        return x._replace(qdata=x.qdata.new_empty(x.qdata.shape), scale=x.scale.new_empty(x.scale.shape))

    def run(x, groups, options):
        factor = options.padded + (0 if groups is None else sum(t.sum() for t in groups if t is not None))
        return x._replace(qdata=x.qdata.clone(), scale=(x.scale.float() * factor).to(x.scale.dtype))

    op = define({"x": Operand, "groups": Groups | None, "options": CastOptions, "return": Operand}, fake, run)

    def both(x, groups):
        options = CastOptions(FORMATS[x.format_name], padded=True)
        return copies_of(op(x, groups, options), options, x.global_scale).rowwise

    for x in (OPERAND, WITH_GLOBAL):
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        assert_operands_equal(compiled(x, groups), both(x, groups))


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
