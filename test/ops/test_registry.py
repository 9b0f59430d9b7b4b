"""What an `Operation` makes of its description: schema, fake, whole values, results, a table of backends."""

import sys
import types

import pytest
import torch
from defined_ops import ENDS, NAMESPACE, OPERAND, WITH_GLOBAL, X, assert_same

from torchao_blockwise.formats import FP8_128X128, NVFP4_1X16, BlockFormat, CastOptions, Copies, Groups, Operand, Place
from torchao_blockwise.ops import registry
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.fused import NORM, Norm
from torchao_blockwise.ops.operands import copies_of
from torchao_blockwise.ops.registry import OPTIONS, PLACE, groups, operand
from torchao_blockwise.ops.shards import SHARDS
from torchao_blockwise.ops.shards.flat import Shards

# --- schemas ----------------------------------------------------------------------------------------------------------

FIELDS = {"options": (OPTIONS, CastOptions), "place": (PLACE, Place), "norm": (NORM, Norm), "shards": (SHARDS, Shards)}


@pytest.mark.parametrize(("schema", "value"), FIELDS.values(), ids=FIELDS)
def test_a_schema_has_the_fields_of_its_value(schema, value):
    assert [argument.split()[-1] for argument in schema.split(", ")] == list(value._fields)


def test_pieces_of_schemas():
    assert operand("x") == "Tensor x, Tensor x_scale, Tensor? x_global, str x_format"
    assert operand("x", "Tensor?") == "Tensor? x, Tensor? x_scale, Tensor? x_global, str x_format"
    assert groups() == "Tensor groups_ends, Tensor? groups_tables"
    assert groups("Tensor?") == "Tensor? groups_ends, Tensor? groups_tables"


def test_names_of_operations(define):
    op, in_place = define("Tensor x"), define("Tensor(a!) x")
    assert op.overload.name() == f"{NAMESPACE}::{op.name}"
    assert in_place.overload.name() == f"{NAMESPACE}::{in_place.name}_"


@pytest.mark.parametrize("takes", ((None,), (None, Operand), (Groups, None)), ids=str)
def test_values_and_schema_must_agree(takes, define):
    with pytest.raises(AssertionError, match=r"^op[0-9]+ takes values of [0-9] arguments, its schema has [0-9]$"):
        define("Tensor x, Tensor y, str backend", takes=takes)


def test_formats_and_backends_that_do_not_exist(define):
    op = define("str fmt, str products_by, str backend", takes=(BlockFormat, Backend))
    for values, message in (
        (("fp7", "triton", "auto"), "no block format 'fp7'"),
        ((NVFP4_1X16.name, "tritn", "auto"), "no backend 'tritn'"),
        ((NVFP4_1X16.name, "triton", "aut"), "no backend 'aut'"),
    ):
        with pytest.raises(ValueError, match=message):
            op.overload(*values)
    with pytest.raises(ValueError, match="no backend 'aut'"):
        op(NVFP4_1X16, Backend.TRITON, "aut")


# --- values -----------------------------------------------------------------------------------------------------------

# A schema's arguments, what they are, a value.
VALUES = {
    "tensor": ("Tensor x", None, X),
    "no tensor": ("Tensor? x", None, None),
    "a tensor, maybe": ("Tensor? x", None, X),
    "tensors": ("Tensor[] x", None, [X, X + 1]),
    "changed": ("Tensor(a!) x", None, X.clone()),
    "changed list": ("Tensor(a!)[] x", None, [X.clone(), X.clone()]),
    "int": ("SymInt x", None, 3),
    "ints": ("SymInt[] x", None, [3, -4]),
    "bool": ("bool x", None, True),
    "float": ("float x", None, 0.1),
    "str": ("str x", None, "some words"),
    "dtype": ("ScalarType x", None, torch.bfloat16),
    "no dtype": ("ScalarType? x", None, None),
    "format": ("str x", BlockFormat, NVFP4_1X16),
    "another backend": ("str products_by", Backend, Backend.CUBLAS),
    "operand": (operand("x"), Operand, OPERAND),
    "operand with a global scale": (operand("x"), Operand, WITH_GLOBAL),
    "no operand": (operand("x", "Tensor?"), Operand, None),
    "operand, maybe": (operand("x", "Tensor?"), Operand, WITH_GLOBAL),
    "options": (OPTIONS, CastOptions, CastOptions(FP8_128X128, False, True, True, False)),
    "other options": (OPTIONS, CastOptions, CastOptions(NVFP4_1X16, True, False, False, True, 5, True)),
    "place": (PLACE, Place, Place(1, 2, 3, -1)),
    "shards": (SHARDS, Shards, Shards([X[0], X[1]], [0, 3], [1, 2, 3] * 2, [0, 1], torch.float16, FP8_128X128)),
    "norm": (NORM.replace("Tensor x", "Tensor y"), Norm, Norm(X, None, X[0], None, X[:, 0], torch.bfloat16)),
    "groups": (groups(), Groups, Groups(ENDS)),
    "groups with tables": (groups(), Groups, Groups(ENDS, ENDS + 1)),
    "no groups": (groups("Tensor?"), Groups, None),
    "groups, maybe": (groups("Tensor?"), Groups, Groups(ENDS, ENDS + 1)),
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
    op(*(_on_meta(x) for x in (X, value, X - 1)), Backend.AUTO)
    assert len(seen["fake"]) == 3 and type(seen["fake"][1]) is type(value)


def _on_meta(value):
    """`value` with tensors that make an operation take its fake."""
    return registry._compat.pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), value)


def test_only_the_last_argument_chooses(define):
    seen = []
    op = define("Tensor x, str products_by", run=lambda x, products_by: seen.append(products_by), takes=(None, Backend))
    op(X, Backend.CUBLAS)
    assert seen == [Backend.CUBLAS]


# --- results ----------------------------------------------------------------------------------------------------------

PARTS = [OPERAND.qdata, OPERAND.scale]
# (schema, what a row and a fake return, what the operation returns).
RESULTS = {
    "nothing": ("()", None, None),
    "tensor": ("Tensor", X, X),
    "two tensors": ("(Tensor, Tensor)", (X, X + 1), [X, X + 1]),
    "three tensors": ("(Tensor, Tensor, Tensor)", (X, X, X + 1), [X, X, X + 1]),
    "list": ("Tensor[]", [X, None, X + 1], [X, X + 1]),
    "tuple": ("Tensor[]", (None, X), [X]),
    "operand": ("(Tensor, Tensor)", OPERAND, PARTS),
    "copies": ("Tensor[]", Copies(OPERAND, OPERAND), [*PARTS, *PARTS]),
    "a copy": ("Tensor[]", Copies(None, OPERAND), PARTS),
}


def own(x):
    """`x` in separate memory, as results must have it."""
    return registry._compat.pytree.tree_map_only(torch.Tensor, torch.clone, x)


@pytest.mark.parametrize(("schema", "result", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_tensors(schema, result, expected, define):
    op = define("Tensor x", schema, lambda x: own(result), fake=lambda x: own(result))
    for x in (X, X.to("meta")):
        got = op(x)
        assert_same(list(got) if isinstance(expected, list) else got, expected)


@pytest.mark.parametrize("scale", (None, torch.tensor(2.0)), ids=("no scale", "a scale"))
@pytest.mark.parametrize(("rowwise", "columnwise"), ((True, False), (False, True), (True, True)))
def test_copies_are_put_together(rowwise, columnwise, scale):
    row, column = (OPERAND._replace(scale=OPERAND.scale + i, global_scale=scale) for i in range(2))
    copies = Copies(row if rowwise else None, column if columnwise else None)
    tensors = [t for copy in copies if copy is not None for t in copy[:2]]
    assert_same(copies_of(tensors, CastOptions(row.format, rowwise, columnwise), scale), copies)


# --- tables and checks ------------------------------------------------------------------------------------------------


def test_the_backend_chooses_the_row(define):
    ran, refuse = [], {"triton": "it is told not to"}
    table = [
        Implementation(backend, lambda x, b=backend: ran.append(b), lambda x, b=backend: refuse.get(b.value))
        for backend in (Backend.TRITON, Backend.REFERENCE)
    ]
    op = define("Tensor x, str backend", table=table)
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
