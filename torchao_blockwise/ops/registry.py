"""Operations of the package: `torch.library` definitions over flat tensors, each with a table of backends.

    matmul_op = Operation(
        f"matmul({operand('a')}, {operand('b')}, ScalarType out_dtype, Tensor? bias, str backend) -> Tensor",
        takes=(Operand, Operand, None, None),
        table=[Implementation(Backend.REFERENCE, reference.matmul)],
        fake=lambda a, b, out_dtype, bias: a.qdata.new_empty((len(a.qdata), len(b.qdata)), dtype=out_dtype),
    )
    out = matmul_op(a, b, torch.bfloat16, None, Backend.AUTO)

PyTorch's dispatcher knows tensors, numbers and strings. `takes` says which of the schema's arguments belong to one
value: they are the fields of that NamedTuple, in order. Formats and backends travel by name, as arguments `fmt`,
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
from torchao_blockwise.formats import Copies, Groups, Operand, get_format
from torchao_blockwise.ops.backend import Backend, Choice, Implementation, choose, get_backend, ranked

NAMESPACE = "torchao_blockwise"
_library = torch.library.Library(NAMESPACE, "DEF")

# --- pieces of schemas ------------------------------------------------------------------------------------------------

OPTIONS = (
    "str fmt, bool rowwise, bool columnwise, bool power_of_2_scales, bool padded, SymInt hadamard, "
    "bool scale_per_group, str columnwise_format_name"
)
PLACE = "SymInt operand, SymInt row, SymInt column, SymInt grid"


def operand(name: str, tensor: str = "Tensor") -> str:
    """The arguments of an `Operand`; tensor: "Tensor?" where it may be None."""
    return f"{tensor} {name}, {tensor} {name}_scale, Tensor? {name}_global, str {name}_format"


def groups(tensor: str = "Tensor") -> str:
    """The arguments of `Groups`; tensor: "Tensor?" where they may be None."""
    return f"{tensor} groups_ends, Tensor? groups_tables"


# Arguments that travel by name: (name of the value, value of the name).
_FORMAT = (lambda fmt: fmt.name, get_format)
_BACKEND = (lambda backend: get_backend(backend).value, get_backend)
_NAMED: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "fmt": _FORMAT,
    "backend": _BACKEND,
    "products_by": _BACKEND,
}
# The arguments of a value that is None.
_NOTHING: dict[Any, tuple[Any, ...]] = {Operand: (None, None, None, ""), Groups: (None, None)}


# --- operations -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Operation:
    """An operation, called by position, with whole values.

    Where something observes operations (a compiler, a mode, a profiler, a tensor subclass), it goes through PyTorch's
    dispatcher.

    schema: as `torch.library` takes it; `str backend` last where the caller may name a backend. All functions below
        take the same values without it.
    table: its backends, best first for AUTO; below autograd, so that no operation is differentiable. Rows can be
        added to it.
    fake: allocates what the operation returns, for compilers and meta tensors; None where it writes in place.
    takes: for each value in order a NamedTuple, or None for an argument as it is; by default all are as they are. An
        `Operand` or `Groups` may be None.
    preferred_backend: (values) -> a backend, or None; see `choose`.
    check: (values) -> raises; for what can be checked only where there are values. Fakes are checked too.
    flops: (values) -> floating point operations of its GEMMs, from shapes, for `FlopCounterMode`, which does not see
        what other operations do inside.
    called: the name in messages, where it is not the operation's.

    Rows and fakes may return an `Operand` (as qdata, scale), `Copies` (as a list of these), or a list with None, which
    is left out. Rows of what writes in place return None.
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
        # (NamedTuple that arguments start to stop are the fields of, or None for an argument as it is, start, stop).
        self._slots = list(zip(takes, [0, *ends], ends))
        self._returns_list = self.schema.endswith("Tensor[]")
        _library.impl(defined, self.dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{defined}", self._faked, lib=_library)
        if self.flops is not None:
            register_flop_formula(packet, get_raw=True)(self._count)

    def __call__(self, *args: Any, dispatched: bool = False) -> Any:
        """The operation on whole values; of several tensors a list or tuple.

        Where nothing observes operations, PyTorch's dispatcher is left out, which takes longer than the rest of a call.
        dispatched: whether it has been there.
        """
        if torch.is_grad_enabled() and not dispatched:
            # Operations are not differentiable.
            with torch.no_grad():
                return self(*args)
        if not dispatched and modes.is_intercepted(args):
            return self.overload(*self._parts_of(args))
        *values, backend = args if self._takes_backend else (*args, Backend.AUTO)
        if type(backend) is not Backend:
            backend = get_backend(backend)
        if self.check is not None:
            self.check(*values)
        row = choose(self.called, self.table, backend, values, self.preferred_backend)
        result = (row.run if callable(row.run) else row.function)(*values)
        return result if isinstance(result, torch.Tensor) else self._flat(result)

    def _parts_of(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of the schema that stand for these values."""
        parts: list[Any] = []
        for value, (kind, _, _) in zip(values, self._slots, strict=True):
            if kind is None:
                parts.append(value)
            elif value is None:
                parts.extend(_NOTHING[kind])
            else:
                parts.extend(value)
        for i, name_of, _ in self._named:
            parts[i] = name_of(parts[i])
        return parts

    def _values_of(self, parts: Sequence[Any]) -> list[Any]:
        """The values that have these parts."""
        flat = list(parts)
        for i, _, value_of in self._named:
            flat[i] = value_of(flat[i])
        values: list[Any] = []
        for value, start, stop in self._slots:
            part = flat[start]
            # Straight to `tuple`: the class itself would go through Python.
            values.append(part if value is None or part is None else tuple.__new__(value, flat[start:stop]))
        return values

    def _inputs_of(self, parts: Sequence[Any]) -> list[Any]:
        """`_values_of`, without the backend: what rows and fakes take."""
        values = self._values_of(parts)
        return values[:-1] if self._takes_backend else values

    def _flat(self, result: Any) -> Any:
        """Return the result of a row or a fake as the schema has it."""
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
        """The operation as PyTorch's dispatcher calls it, by the arguments of the schema."""
        return self(*self._values_of(parts), dispatched=True)

    def _faked(self, *parts: Any) -> Any:
        values = self._inputs_of(parts)
        if self.check is not None:
            self.check(*values)
        return None if self.fake is None else self._flat(self.fake(*values))

    def _count(self, *parts: Any, out_val: Any) -> int:
        assert self.flops is not None
        return self.flops(*self._inputs_of(parts))

    def ranked(self, *values: Any) -> Sequence[Implementation]:
        """The rows of the table in the order in which AUTO asks them for these values."""
        return ranked(self.table, None if self.preferred_backend is None else self.preferred_backend(*values))
