"""What an operation is: a schema, a fake, a DTensor rule, and a table of backends that can compute it.

    @define_op((Implementation(Backend.TRITON, "..kernels_triton:matmul", why_no_kernels), ..))
    def matmul_op(a: Operand, b: Operand, out_dtype: torch.dtype, backend: Backend) -> torch.Tensor:
        return a.qdata.new_empty((a.qdata.shape[0], b.qdata.shape[0]), dtype=out_dtype)

The function is the operation's fake: shapes and dtypes of what it gives, for compilers and meta tensors. Its
annotations give the schema. A row of the table is called with its arguments but for the last, `backend`, by which the
row is chosen. Values travel whole: an `Operand`, `Groups` or a format is taken apart for PyTorch's dispatcher and put
together again here, and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from torchao_blockwise import _compat
from torchao_blockwise.formats import BlockFormat, CastOptions, Copies, Groups, Operand, Place, get_format
from torchao_blockwise.ops.backend import Backend, Choice, Implementation, choose, get_backend, ranked

NAMESPACE = "torchao_blockwise"
_library = torch.library.Library(NAMESPACE, "DEF")
_T = TypeVar("_T")

# Annotations of what an operation writes to.
Changed = Annotated[torch.Tensor, "changed"]
ChangedList = Annotated[list[torch.Tensor], "changed"]


class _Kind(NamedTuple):
    """How a value of one annotation travels through a schema: the parts there, {} for its name, and both ways.

    apart: the parts as an expression each, {} for the value. A function of a value instead would be one more call for
    compilers to trace, for each value of each operation.
    """

    schema: tuple[str, ...]
    apart: tuple[str, ...]
    together: Callable[[Iterator[Any]], Any]


def _groups(parts: Iterator[Any]) -> Groups | None:
    ends, tables = next(parts), next(parts)
    return None if ends is None else Groups(ends, tables)


def _kind(*schema: str, apart: tuple[str, ...] = ("{}",), together: Callable[[Iterator[Any]], Any] = next) -> _Kind:
    return _Kind(schema, apart, together)


_KINDS: dict[Any, _Kind] = {
    torch.Tensor: _kind("Tensor {}"),
    torch.Tensor | None: _kind("Tensor? {}"),
    list[torch.Tensor]: _kind("Tensor[] {}"),
    Changed: _kind("Tensor(!) {}"),
    ChangedList: _kind("Tensor(!)[] {}"),
    int: _kind("SymInt {}"),
    list[int]: _kind("SymInt[] {}"),
    bool: _kind("bool {}"),
    float: _kind("float {}"),
    str: _kind("str {}"),
    torch.dtype: _kind("ScalarType {}"),
    torch.dtype | None: _kind("ScalarType? {}"),
    BlockFormat: _kind("str {}", apart=("{}.name",), together=lambda parts: get_format(next(parts))),
    Backend: _kind("str {}", apart=("{}.value",), together=lambda parts: get_backend(next(parts))),
    Operand: _kind(
        "Tensor {}",
        "Tensor {}_scale",
        "Tensor? {}_global",
        "str {}_format",
        apart=("*{}",),
        together=lambda parts: Operand(*itertools.islice(parts, 4)),
    ),
    Operand | None: _kind(
        "Tensor? {}",
        "Tensor? {}_scale",
        "Tensor? {}_global",
        "str {}_format",
        apart=("*((None, None, None, '') if {0} is None else {0})",),
        together=lambda parts: x if (x := Operand(*itertools.islice(parts, 4))).qdata is not None else None,
    ),
    Groups: _kind("Tensor {}_ends", "Tensor? {}_tables", apart=("*{}",), together=_groups),
    Groups | None: _kind("Tensor? {}_ends", "Tensor? {}_tables", apart=("*({} or (None, None))",), together=_groups),
}


def travels(value: _T) -> _T:
    """Class decorator: a NamedTuple of values that travel travels too, as its fields."""
    hints = typing.get_type_hints(value, include_extras=True)
    kinds = [_KINDS[hint] for hint in hints.values()]
    _KINDS[value] = _kind(
        *(part.format(name) for name, kind in zip(hints, kinds) for part in kind.schema),
        apart=tuple(part.format(f"{{0}}.{name}") for name, kind in zip(hints, kinds) for part in kind.apart),
        together=lambda parts: value(*(kind.together(parts) for kind in kinds)),  # type: ignore[operator]
    )
    return value


travels(CastOptions)
travels(Place)
_RESULTS: dict[Any, str] = {
    type(None): "()",
    torch.Tensor: "Tensor",
    tuple[torch.Tensor, torch.Tensor]: "(Tensor, Tensor)",
    tuple[torch.Tensor, torch.Tensor, torch.Tensor]: "(Tensor, Tensor, Tensor)",
    list[torch.Tensor]: "Tensor[]",
    Operand: "(Tensor, Tensor)",
    tuple[Operand, Operand]: "(Tensor, Tensor, Tensor, Tensor)",
    Copies: "Tensor[]",
}


def define_op(
    table: Sequence[Implementation],
    *,
    first: Choice | None = None,
    expected: Choice | None = None,
    check: Callable[..., None] | None = None,
    sharding: Callable[..., Any] | None = None,
    said: str | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the operation that a function `<name>_op` describes; what is returned calls it, by position.

    It is `torchao_blockwise::<name>`, and `<name>_` where it changes arguments, as PyTorch names these. Every call goes
    through PyTorch's dispatcher.

    table: who computes it, best first for AUTO; below autograd, so that no operation is differentiable. It stays
        `<name>_op.table`, a list that rows can be added to; operations that are given one list share it.
        `<name>_op.ranked(*arguments but for backend)` are its rows as AUTO asks them for these.
    first, expected: (the arguments but for `backend`) -> a backend, or None; see `choose`.
    check: (the same) raises for what can be seen only where there are values; fakes have none, and are checked too.
    sharding: DTensor rule, as `torch.distributed.tensor.experimental.register_sharding` takes it, of whole values:
        specs in the places of tensors, and placements in those that it answers for inputs.
    said: the name in messages, where it is another than the operation's.
    flops: (all arguments) -> the floating point operations of its products, from shapes alone, for PyTorch's
        `FlopCounterMode`. What other operations do inside is not seen there, so it counts too.
    What makes operands by `CastOptions` returns `Copies`, without global scales; other operands are returned as their
    tensors (qdata, scale, ..). Raises TypeError for an annotation that no schema has.
    """

    def define(fake: Callable[..., Any]) -> Callable[..., Any]:
        name, kinds, result, schema = _read(fake)
        rows = table if isinstance(table, list) else list(table)
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        takes_backend = "backend" in inspect.signature(fake).parameters

        def whole(parts: Iterable[Any]) -> list[Any]:
            flat = iter(parts)
            return [kind.together(flat) for kind in kinds]

        def run(*parts: Any) -> Any:
            given = whole(parts)
            *args, backend = given if takes_backend else (*given, Backend.AUTO)
            if check is not None:
                check(*args)
            return result(choose(said or name, rows, backend, args, first, expected).function(*args))

        def shapes(*parts: Any) -> Any:
            args = whole(parts)
            if check is not None:
                check(*(args[:-1] if takes_backend else args))
            return result(fake(*args))

        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library)
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if sharding is not None and torch.distributed.is_available():
            _compat.register_sharding(overload, _flat_rule(sharding, kinds, whole))
        if flops is not None:

            def count(*parts: Any, out_val: Any) -> int:
                return flops(*whole(parts))

            register_flop_formula(getattr(getattr(torch.ops, NAMESPACE), name), get_raw=True)(count)

        gives_operands = typing.get_type_hints(fake)["return"] in (Operand, tuple[Operand, Operand], Copies)
        options = [i for i, kind in enumerate(kinds) if gives_operands and kind is _KINDS[CastOptions]]

        apart = _apart(kinds)

        @functools.wraps(fake)
        def call(*args: Any) -> Any:
            given = overload(*apart(*args))
            return copies_of(given, args[options[0]]) if options else given

        call.overload = overload  # type: ignore[attr-defined]  # for what must have the operation itself
        call.table = rows  # type: ignore[attr-defined]
        call.whole = whole  # type: ignore[attr-defined]  # the arguments from their parts in the schema
        call.ranked = lambda *args: ranked(rows, args, first)[0]  # type: ignore[attr-defined]
        return call

    return define


def _read(fake: Callable[..., Any]) -> tuple[str, list[_Kind], Callable[[Any], Any], str]:
    """An operation's name, the kinds of its arguments, what makes its result PyTorch's, and its schema."""
    hints = typing.get_type_hints(fake, include_extras=True)
    returned = hints.pop("return")
    unknown = [str(hint) for hint in hints.values() if hint not in _KINDS]
    unknown += [] if returned in _RESULTS else [str(returned)]
    if unknown:
        raise TypeError(f"define_op: {fake.__name__} has annotations that no schema has: {', '.join(unknown)}")
    aliases = iter("abcdefgh")
    arguments = [part.format(argument) for argument, hint in hints.items() for part in _KINDS[hint].schema]
    arguments = [part.replace("!", f"{next(aliases)}!") if "!" in part else part for part in arguments]
    results: dict[Any, Callable[[Any], Any]] = {
        type(None): lambda _: None,
        Operand: lambda x: _tensors(x if isinstance(x, Copies) else (x,)),
        tuple[Operand, Operand]: _tensors,
        Copies: _tensors,
        list[torch.Tensor]: lambda tensors: [t for t in tensors if t is not None],
    }
    result = results.get(returned, lambda result: result)
    name = fake.__name__.removesuffix("_op") + "_" * (Changed in hints.values() or ChangedList in hints.values())
    schema = f"{name}({', '.join(arguments)}) -> {_RESULTS[returned]}"
    return name, [_KINDS[hint] for hint in hints.values()], result, schema


def _apart(kinds: Sequence[_Kind]) -> Callable[..., tuple[Any, ...]]:
    """What takes values of these kinds apart: (values) -> their parts in the schema."""
    names = [f"value{i}" for i in range(len(kinds))]
    parts = [part.format(name) for name, kind in zip(names, kinds) for part in kind.apart]
    apart: Callable[..., tuple[Any, ...]] = eval(f"lambda {', '.join(names)}: ({', '.join(parts)},)")
    return apart


def _tensors(operands: Iterable[Operand | None]) -> list[torch.Tensor]:
    """(qdata, scale) of each operand that there is."""
    return [t for x in operands if x is not None for t in (x.qdata, x.scale)]


def copies_of(tensors: Sequence[torch.Tensor], options: CastOptions) -> Copies:
    """The copies that an operation of these options gave as their tensors."""
    operands = [Operand(q, s, None, options.fmt.name) for q, s in zip(tensors[::2], tensors[1::2])]
    return Copies(operands[0] if options.rowwise else None, operands[-1] if options.columnwise else None)


def with_global_scale(copies: Copies, global_scale: torch.Tensor) -> Copies:
    """The copies with the global scale that they share."""
    # Not by `_replace`: compilers of PyTorch 2.11 cannot return what it makes.
    rowwise, columnwise = (
        None if x is None else Operand(x.qdata, x.scale, global_scale, x.format_name) for x in copies
    )
    return Copies(rowwise, columnwise)


def without_grad(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors as values that no gradient is asked of: operations here lie below autograd."""
    if not torch.is_grad_enabled():
        return list(tensors)
    return [t.detach() if t is not None and t.requires_grad else t for t in tensors]


def _flat_rule(
    sharding: Callable[..., Any], kinds: list[_Kind], whole: Callable[[Iterable[Any]], list[Any]]
) -> Callable[..., Any]:
    """The rule of whole values as PyTorch takes it, of their parts; None stands for all parts of a value."""

    def flat(kind: _Kind, placed: Any) -> tuple[Any, ...]:
        if placed is None:
            return (None,) * len(kind.schema)
        return placed if isinstance(placed, tuple) else (placed,)

    def rule(*specs: Any) -> list[tuple[Any, list[Any]]]:
        return [
            (outputs, [part for kind, placed in zip(kinds, inputs, strict=True) for part in flat(kind, placed)])
            for outputs, inputs in sharding(*whole(specs))
        ]

    return rule
