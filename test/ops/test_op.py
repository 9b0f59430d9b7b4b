"""What `define_op` makes of a function: a schema, a fake, values that travel whole, results, a table of backends."""

import sys
import types
from typing import Annotated

import pytest
import torch
from defined_ops import ENDS, NAMESPACE, OPERAND, WITH_GLOBAL, X, assert_same, schema_of

from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    BlockFormat,
    CastOptions,
    Copies,
    Groups,
    Operand,
    Place,
)
from torchao_blockwise.ops import op as op_module
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.fused.norm.values import Norm
from torchao_blockwise.ops.op import Changed, ChangedList, with_global_scale
from torchao_blockwise.ops.shards.flat import Shards

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
    "optional operand": (Operand | None, "Tensor? x, Tensor? x_scale, Tensor? x_global, str x_format"),
    "groups": (Groups, "Tensor x_ends, Tensor? x_tables"),
    "optional groups": (Groups | None, "Tensor? x_ends, Tensor? x_tables"),
    "options": (
        CastOptions,
        "str fmt, bool rowwise, bool columnwise, bool power_of_2_scales, bool padded, SymInt hadamard, "
        "bool scale_per_group",
    ),
    "place": (Place, "SymInt operand, SymInt row, SymInt column, SymInt grid"),
    "norm": (Norm, "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, ScalarType dtype"),
    "shards": (
        Shards,
        "Tensor[] tensors, SymInt[] starts, SymInt[] shapes, SymInt[] first_blocks, ScalarType dtype, str fmt",
    ),
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
    "other options": (CastOptions, CastOptions(NVFP4_1X16, True, False, False, True, 5, True)),
    "place": (Place, Place(1, 2, 3, -1)),
    "shards": (Shards, Shards([X[0], X[1]], [0, 3], [1, 2, 3] * 2, [0, 1], torch.float16, FP8_128X128)),
    "norm": (Norm, Norm(X, None, X[0], None, X[:, 0], torch.bfloat16)),
    "groups": (Groups, Groups(ENDS)),
    "groups with tables": (Groups, Groups(ENDS, ENDS + 1)),
    "no groups": (Groups | None, None),
    "groups, maybe": (Groups | None, Groups(ENDS, ENDS + 1)),
}


@pytest.mark.parametrize(("annotation", "value"), VALUES.values(), ids=VALUES)
def test_values_arrive_whole(annotation, value, define):
    """Between two tensors, so that none takes a part of its neighbor; at the row, the choices, the check."""
    seen = {}

    def note(who):
        return lambda *args: seen.update({who: args})

    op = define(
        {"before": torch.Tensor, "x": annotation, "after": torch.Tensor, "backend": Backend},
        table=(
            Implementation(Backend.TRITON, note("run"), lambda *args: "the next row is asked too"),
            Implementation(Backend.REFERENCE, note("run"), note("why not")),
        ),
        first=note("first"), expected=note("expected"), check=note("check"),
    )  # fmt: skip
    op(X, value, X - 1, Backend.AUTO)
    assert set(seen) == {"check", "first", "expected", "why not", "run"}
    for args in seen.values():
        assert_same(list(args), [X, value, X - 1])


def test_only_the_argument_named_backend_chooses(define):
    seen = []
    op = define({"x": torch.Tensor, "products_by": Backend}, run=lambda x, products_by: seen.append(products_by))
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


@pytest.mark.parametrize(("annotation", "schema", "result", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_tensors(annotation, schema, result, expected, define):
    op = define({"x": torch.Tensor, "return": annotation}, lambda x: own(result))
    assert schema_of(op) == f"(Tensor x) -> {schema}"
    for x in (X, X.to("meta")):
        got = op(x)
        assert_same(list(got) if isinstance(expected, list) else got, expected)


@pytest.mark.parametrize("annotation", (Operand, Copies), ids=lambda a: a.__name__)
@pytest.mark.parametrize(("rowwise", "columnwise"), ((True, False), (False, True)))
def test_an_operation_with_options_returns_copies(rowwise, columnwise, annotation, define):
    copies = Copies(OPERAND if rowwise else None, OPERAND if columnwise else None)
    op = define({"x": torch.Tensor, "options": CastOptions, "return": annotation}, lambda x, options: own(copies))
    assert_same(op(X, CastOptions(FP8_1X128, rowwise, columnwise)), copies)


@pytest.mark.parametrize("annotation", (tuple[Operand, Operand], Copies), ids=("two operands", "copies"))
def test_both_copies_are_put_together(annotation, define):
    copies = Copies(OPERAND, OPERAND._replace(scale=OPERAND.scale + 1))
    op = define({"x": torch.Tensor, "options": CastOptions, "return": annotation}, lambda x, options: own(copies))
    assert_same(op(X, CastOptions(FP8_1X128, True, True)), copies)


def test_copies_share_a_global_scale():
    scale = torch.tensor(2.0)
    copies = with_global_scale(Copies(OPERAND, None), scale)
    assert type(copies) is Copies and copies.columnwise is None
    assert copies.rowwise.global_scale is scale and copies.rowwise.qdata is OPERAND.qdata


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


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_checks_are_of_values_and_of_fakes(device, define):
    ran = []

    def check(x, n):
        if n > x.shape[0]:
            raise ValueError(f"n is {n}")

    op = define({"x": torch.Tensor, "n": int, "backend": Backend}, lambda *_: ran.append(1), check=check)
    op(X.to(device), 2, Backend.AUTO)
    with pytest.raises(ValueError, match=r"^n is 3$"):
        op(X.to(device), 3, Backend.AUTO)
    assert ran == [1]
