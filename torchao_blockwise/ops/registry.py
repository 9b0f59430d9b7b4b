"""Definitions of operations: a `torch.library` operation on flat tensors with a table of backends.

    matmul_op = Operation(
        f"matmul({operand('a')}, {operand('b')}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
        takes=(Operand, Operand, None, None),
        table=[Implementation(Backend.REFERENCE, reference.matmul)],
        fake=lambda a, b, out_dtype, bias: a.qdata.new_empty((len(a.qdata), len(b.qdata)), dtype=out_dtype),
    )
    out = matmul_op(a, b, torch.bfloat16, None, Backend.AUTO)

PyTorch's dispatcher supports tensors, numbers and strings. `takes` lists which arguments of the schema belong to one
value: they are the fields of that NamedTuple, in order. Formats and backends are passed by name, as arguments `fmt`,
`backend` and `products_by`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from torchao_blockwise import _compat
from torchao_blockwise._compat import modes
from torchao_blockwise.formats import CastOptions, Copies, Operand, get_format
from torchao_blockwise.ops.backend import Backend, Choice, Implementation, choose, get_backend

NAMESPACE = "torchao_blockwise"
_library = torch.library.Library(NAMESPACE, "DEF")

# --- pieces of schemas ------------------------------------------------------------------------------------------------

OPTIONS = (
    "str fmt, bool rowwise, bool columnwise, bool power_of_2_scales, bool padded, SymInt hadamard, "
    "bool scale_per_group, str columnwise_format_name"
)
PLACE = "SymInt operand, SymInt row, SymInt column, SymInt grid"


def operand(name: str) -> str:
    """The arguments of an `Operand`."""
    return f"Tensor {name}, Tensor {name}_scale, Tensor? {name}_global, str {name}_format"


def groups(tensor: str = "Tensor") -> str:
    """The arguments of `Groups`; tensor: "Tensor?" if they may be None."""
    return f"{tensor} groups_ends, Tensor? groups_tables"


# Arguments that are passed by name: (value -> name, name -> value).
_FORMAT = (lambda fmt: fmt.name, get_format)
_BACKEND = (lambda backend: get_backend(backend).value, get_backend)
_NAMED: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "fmt": _FORMAT,
    "backend": _BACKEND,
    "products_by": _BACKEND,
}


# --- operations -------------------------------------------------------------------------------------------------------


def copies_of(tensors: Sequence[torch.Tensor], options: CastOptions) -> Copies:
    """Return the copies that an operation with these options returned as tensors."""
    return Copies(
        Operand(tensors[0], tensors[1], None, options.fmt.name) if options.rowwise else None,
        Operand(tensors[-2], tensors[-1], None, options.columnwise_format.name) if options.columnwise else None,
    )


@dataclass(eq=False)
class Operation:
    """An operation; its arguments are values such as `Operand`, and positional.

    If something intercepts operations (a compiler, a mode, a profiler, a tensor subclass), calls go through PyTorch's
    dispatcher. Operations are not differentiable.

    schema: the schema for `torch.library`, with `str backend` last if the caller may name a backend. All functions
        below take the same values without it.
    table: the backends, in the order in which AUTO considers them. Rows can be added.
    fake: returns uninitialized results, for compilers and meta tensors; None for an in-place operation.
    takes: for each value, in order, its NamedTuple, or None for a plain argument; by default all are plain. The
        argument `Groups` may be None.
    preferred_backend: (values) -> a backend, or None; see `choose`.
    check: (values) -> raises. It runs in the operation and for fakes, so it can also check values of tensors.
    flops: (values) -> the floating point operations of GEMMs, from shapes, for `FlopCounterMode`, which does not see
        what happens inside operations.
    called: the name in messages, if it differs from the operation's.

    Rows and fakes may return an `Operand` (returned as qdata, scale), `Copies` (if the operation takes `CastOptions`),
    or a list, from which None is removed. Rows of in-place operations return None.
    """

    schema: str
    table: list[Implementation]
    fake: Callable[..., Any] | None = None
    takes: tuple[Any, ...] | None = None
    preferred_backend: Choice | None = None
    check: Callable[..., None] | None = None
    flops: Callable[..., int] | None = None
    called: str = ""

    def __post_init__(self) -> None:
        defined = self.schema.partition("(")[0]
        self.name = defined.removesuffix("_")
        self.called = self.called or defined
        _library.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        packet = getattr(getattr(torch.ops, NAMESPACE), defined)
        self.overload = packet.default
        names = [argument.name for argument in _compat.schema_of(self.overload).arguments]
        self._takes_backend = names[-1] == "backend"
        self._named = [(i, *_NAMED[name]) for i, name in enumerate(names) if name in _NAMED]
        takes = (None,) * len(names) if self.takes is None else (*self.takes, *[None] * self._takes_backend)
        ends = list(itertools.accumulate(1 if value is None else len(value._fields) for value in takes))
        assert ends[-1] == len(names), f"{self.name} takes values of {ends[-1]} arguments, its schema has {len(names)}"
        # (NamedTuple with the fields start .. stop of the arguments, or None for a plain argument, start, stop).
        self._slots = list(zip(takes, [0, *ends], ends))
        self._returns_list = self.schema.endswith("Tensor[]")
        returns_copies = CastOptions in takes and not self.schema.endswith("-> Tensor")
        self._options_at = takes.index(CastOptions) if returns_copies else None
        _library.impl(defined, self.dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{defined}", self._faked, lib=_library)
        if self.flops is not None:
            register_flop_formula(packet, get_raw=True)(self._count)

    def __call__(self, *args: Any, dispatched: bool = False) -> Any:
        """Run the operation on these values; return a tensor, `Copies`, or a list or tuple of several tensors.

        If nothing intercepts operations, skip PyTorch's dispatcher, which takes longer than the rest of a call.
        dispatched: whether the dispatcher makes this call.
        """
        if torch.is_grad_enabled() and not dispatched:
            # Operations are not differentiable.
            with torch.no_grad():
                return self(*args)
        if not dispatched and modes.is_intercepted(args):
            tensors = self.overload(*self._parts_of(args))
            return tensors if self._options_at is None else copies_of(tensors, args[self._options_at])
        *values, backend = args if self._takes_backend else (*args, Backend.AUTO)
        if type(backend) is not Backend:
            backend = get_backend(backend)
        if self.check is not None:
            self.check(*values)
        row = choose(self.called, self.table, backend, values, self.preferred_backend)
        result = row.function(*values)
        kind = type(result)
        if kind is torch.Tensor or (kind is Copies and not dispatched):
            return result
        return self._flat(result)

    def _parts_of(self, values: Sequence[Any]) -> list[Any]:
        """Return these values as arguments of the schema."""
        parts: list[Any] = []
        for value, (kind, _, _) in zip(values, self._slots, strict=True):
            if kind is None:
                parts.append(value)
            elif value is None:
                parts.extend((None,) * len(kind._fields))
            else:
                parts.extend(value)
        for i, name_of, _ in self._named:
            parts[i] = name_of(parts[i])
        return parts

    def _values_of(self, parts: Sequence[Any]) -> list[Any]:
        """Return the values that consist of these arguments of the schema."""
        flat = list(parts)
        for i, _, value_of in self._named:
            flat[i] = value_of(flat[i])
        # `tuple.__new__`, because the constructor of a NamedTuple runs Python code.
        return [
            flat[start] if value is None or flat[start] is None else tuple.__new__(value, flat[start:stop])
            for value, start, stop in self._slots
        ]

    def _inputs_of(self, parts: Sequence[Any]) -> list[Any]:
        """`_values_of` without the backend, the arguments of rows and fakes."""
        return self._values_of(parts)[: -1 if self._takes_backend else None]

    def _flat(self, result: Any) -> Any:
        """Return the result of a row or a fake in the form that the schema declares."""
        if type(result) is Copies:
            tensors: list[Any] = []
            for copy in result:
                if copy is not None:
                    tensors += copy[:2]
            return tensors
        if type(result) is Operand:
            return result[:2]
        return [x for x in result if x is not None] if self._returns_list else result

    def dispatched(self, *parts: Any) -> Any:
        """Run the operation with the arguments of the schema; PyTorch's dispatcher calls it."""
        return self(*self._values_of(parts), dispatched=True)

    def _faked(self, *parts: Any) -> Any:
        values = self._inputs_of(parts)
        if self.check is not None:
            self.check(*values)
        return None if self.fake is None else self._flat(self.fake(*values))

    def _count(self, *parts: Any, out_val: Any) -> int:
        assert self.flops is not None
        return self.flops(*self._inputs_of(parts))
