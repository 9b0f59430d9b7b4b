"""Recording what a function of tensors does, as a program: allocations, views, other PyTorch operations, launches.

    (t0, t1) = tensors                                           the arguments
    t2 = empty_strided((512, 2048), (2048, 1), torch.uint8)
    launch(132, 1, 1, stream(0), *before, t0.data_ptr(), t2.data_ptr(), 512)
    del t0
    return t2

Each tensor is known by its place: arguments come first, then what is made, in order. A launch takes addresses: that of
the place whose storage it reads, and how far behind its begin. A tensor is deleted after what reads it last. Tensors
and storages are known by weak references while they are recorded, so that nothing is held because of it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchao_blockwise import _compat
from torchao_blockwise._compat import recordings

if TYPE_CHECKING:
    from torchao_blockwise._compat.triton_launcher import Launcher, Launching

# Why there is no recording yet: a kernel that is built now can be launched by the build next time.
NOT_BUILT = "builds a kernel"
# Addresses are told apart by whether they are multiples of 16 bytes, as Triton's builds are.
ALIGNMENT_MASK = 15
# The file of programs, in tracebacks and profiles.
RECORDED = "<recorded by torchao_blockwise>"
_RESULTS = (torch.Tensor, type(None))
_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """What records this thread's operations now."""
    return _local.recorder


class Matrix(NamedTuple):
    """A launch's argument that the copy engine is told of: a matrix, and (x) -> what stands in its place."""

    x: torch.Tensor
    encode: Callable[[Any], tuple[Any, ...]]


class Recorder(recordings.TorchDispatchMode):
    """Sees what an operation does; `reason` says why it cannot be replayed, if it cannot."""

    def __init__(self, inputs: list[torch.Tensor]):
        super().__init__()
        self.reason: str | None = None
        self.launcher: Launching | None = None
        # (line of the program, places read, places written, whether it is needed for more than what it writes)
        self.steps: list[tuple[str, set[int], set[int], bool]] = []
        # What the program calls by a name.
        self.names: dict[str, Any] = {}
        # How many tensors there were, each at its place; those that live are known by identity. None is held here: what
        # an operation frees on its way goes while it is recorded, too.
        self.count = 0
        self._places: dict[int, int] = {}
        self._alive: list[weakref.ref[torch.Tensor]] = []
        # storage -> (the first place that has it, where that begins). While a weak reference is held no other storage
        # gets the identity.
        self._owners: dict[int, tuple[int, int]] = {}
        self._storages: list[StorageWeakRef] = []
        self.device, self.calls = inputs[0].device, False
        for x in inputs:
            self._add(x)

    def _add(self, x: torch.Tensor) -> int:
        place, places, key = self.count, self._places, id(x)
        self.count += 1
        places[key] = place
        self._alive.append(weakref.ref(x, lambda _: places.pop(key, None)))
        storage = recordings.storage_of(x)
        if storage not in self._owners:
            self._owners[storage] = place, int(x.storage_offset() * x.itemsize)
            self._storages.append(StorageWeakRef(x.untyped_storage()))
        return place

    def refuse(self, why: str) -> None:
        """Say why what is seen cannot be replayed, if nothing was said before."""
        self.reason = self.reason or why

    def place_of(self, x: torch.Tensor) -> int | None:
        return self._places.get(id(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.reason is None:
            self.reason = self._see(func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> str | None:
        """Add an operation; why it cannot be replayed, if it cannot."""
        if func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
            return f"calls {func}"
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if torch.Tag.dynamic_output_shape in func.tags or not all(isinstance(x, _RESULTS) for x in outs):
            return f"calls {func}"
        made = [x for x in outs if x is not None]
        reads = [x for x in _compat.pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(id(x) not in self._places for x in reads):
            return f"calls {func} on a tensor from elsewhere"
        if any(x.device != self.device for x in made):
            return f"calls {func} for values that the host reads or writes, on {made[0].device}"
        if _compat.schema_of(func).name in _EMPTY:
            self._allocate(out)
            return None
        self._call(func, args, kwargs, out, {self._places[id(x)] for x in reads})
        return None

    def name(self, value: Any, what: str = "value") -> str:
        """How the program says a value that is no tensor: as a number, or by a name."""
        if value is None or type(value) is int:
            return repr(value)
        name = next((name for name, known in self.names.items() if known is value), f"{what}_{len(self.names)}")
        self.names[name] = value
        return name

    def say(self, value: Any) -> str:
        """How the program says a value in which tensors of some places may be."""
        if isinstance(value, torch.Tensor):
            return f"t{self._places[id(value)]}"
        if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
            return self.name(value)
        parts = "".join(f"{self.say(x)}, " for x in value)
        if type(value) in (list, tuple):
            return f"[{parts}]" if type(value) is list else f"({parts})"
        # A NamedTuple, whose own constructor goes through Python.
        make = self.name(functools.partial(tuple.__new__, type(value)), type(value).__name__)
        return f"{make}(({parts}))"

    def _allocate(self, x: torch.Tensor) -> None:
        place, dtype = self._add(x), self.name(x.dtype, "dtype")
        allocate = self.name(recordings.empty_strided_on(x.device), "empty_strided")
        line = f"t{place} = {allocate}({tuple(x.shape)}, {x.stride()}, {dtype})"
        self.steps.append((line, set(), {place}, False))

    def _call(self, func: Any, args: Any, kwargs: Any, out: Any, reads: set[int]) -> None:
        given = [*map(self.say, args), *(f"{name}={self.say(value)}" for name, value in kwargs.items())]
        operation = self.name(func, _compat.schema_of(func).name.split("::")[-1])
        line = f"{operation}({', '.join(given)})"
        # What changes an argument gives that one.
        is_one = isinstance(out, torch.Tensor)
        made = [None if x is None else self._place_or_add(x) for x in ((out,) if is_one else out)]
        if made:
            targets = ["_" if place is None else f"t{place}" for place in made]
            line = f"{targets[0] if is_one else ', '.join(targets) + ','} = {line}"
        self.steps.append((line, reads, {place for place in made if place is not None}, not func.is_view))
        self.calls = self.calls or not func.is_view

    def _place_or_add(self, x: torch.Tensor) -> int:
        place = self.place_of(x)
        return self._add(x) if place is None else place

    def launched(self, triton: Launching, build: Launcher, grid: int, arguments: Sequence[Any]) -> None:
        """Add a launch. arguments: tensors, for their addresses, `Matrix`, numbers and None."""
        self.launcher = triton
        values: list[str] = []
        reads: set[int] = set()
        for argument in arguments:
            x = argument.x if type(argument) is Matrix else argument
            if not isinstance(x, torch.Tensor):
                values.append(self.name(x))
                continue
            owner, begins = self._owners.get(recordings.storage_of(x), (None, 0))
            if owner is None:
                self.refuse("launches a kernel on a tensor from elsewhere")
                return
            reads.add(owner)
            behind = int(x.storage_offset() * x.itemsize) - begins
            address = f"t{owner}.data_ptr()" + (f" + {behind}" if behind else "")
            if type(argument) is Matrix:
                maps = self.name(_Maps(argument.encode), "matrix")
                address = f"*{maps}[{address}]"
            values.append(address)
        launch, stream = self.name(build.launch, "launch"), self.name(triton.current_stream, "stream")
        before, last = self.name(build.before, build.name), self.name(build.last, "constexprs")
        given = f"{', '.join(values)}, *{last}"
        given = f"({given})" if build.packs else given
        line = f"{launch}({grid}, 1, 1, {stream}({triton.current_device()}), *{before}, {given})"
        self.steps.append((line, reads, set(), True))

    def called(self, run: Callable[..., None], arguments: Sequence[torch.Tensor]) -> None:
        """Add a call of another library, `run(*arguments)`: it reads and writes these alone, on the current stream."""
        places = [self._places.get(id(x), -1) for x in arguments]
        if -1 in places:
            self.refuse("calls a library on a tensor from elsewhere")
            return
        given = ", ".join(f"t{place}" for place in places)
        self.steps.append((f"{self.name(run, run.__name__)}({given})", set(places), set(), True))


# Of one matrix of one launch. Memory is given out again at the same addresses step by step.
_MAX_MAPS = 1024


class _Address(int):
    """Stands for a tensor whose address is all that is asked for."""

    def data_ptr(self) -> int:
        return int(self)


class _Maps(dict[int, tuple[Any, ...]]):
    """What stands for a matrix, by its address."""

    def __init__(self, encode: Callable[[Any], tuple[Any, ...]]):
        super().__init__()
        self._encode = encode

    def __missing__(self, address: int) -> tuple[Any, ...]:
        if len(self) >= _MAX_MAPS:
            self.clear()
        encoded = self[address] = self._encode(_Address(address))
        return encoded


def record(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Recording | str]:
    """(function(*args), its recording or why there is none)."""
    inputs = list(_tensors(args))
    seen = Recorder(inputs)
    _local.recorder = seen
    try:
        with recordings.no_autocast(), seen:
            result = function(*args)
    finally:
        _local.recorder = None
    if seen.reason is not None:
        return result, seen.reason
    if any(seen.place_of(x) is None for x in _tensors((result,))):
        return result, "gives a tensor from elsewhere"
    return result, Recording(seen, len(inputs), result)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class Recording:
    """What an operation did, to be done again.

    program: (tensors) -> the result. The tensors are those of the arguments, in a list that it empties.
    source: of the program.
    """

    __slots__ = ("_calls", "_device", "_kind", "_launcher", "program", "source")

    def __init__(self, seen: Recorder, inputs: int, result: Any):
        self._launcher, self._calls, self._kind = seen.launcher, seen.calls, seen.device.type
        self._device = None if seen.launcher is None else seen.launcher.current_device()
        lines = [f"return {seen.say(result)}"]
        # From the end: a view that nothing needs as a tensor is left out; a tensor goes after what reads it last.
        read = {seen.place_of(x) for x in _tensors((result,))}
        for line, reads, writes, is_needed in reversed(seen.steps):
            if is_needed or writes & read:
                lines += [*_deleted((reads | writes) - read), line]
                read |= reads | writes
        # A launch names one tensor of a storage; another argument that lies there too would hold it to the end.
        lines += [*_deleted(set(range(inputs)) - read), "tensors.clear()"]
        lines.append(f"({''.join(f't{place}, ' for place in range(inputs))}) = tensors")
        self.source = "\n    ".join(["def program(tensors):", *reversed(lines)])
        exec(compile(self.source, RECORDED, "exec"), seen.names)
        self.program: Callable[[list[Any]], Any] = seen.names["program"]

    def replayed(self) -> Callable[[list[Any]], Any] | None:
        """The program, or None where something around forbids it now: another current device, hooks on launches."""
        launcher = self._launcher
        if launcher is not None and (launcher.current_device() != self._device or launcher.has_hooks()):
            return None
        return self._without_autocast if self._calls and torch.is_autocast_enabled(self._kind) else self.program

    def _without_autocast(self, tensors: list[Any]) -> Any:
        with recordings.no_autocast():
            return self.program(tensors)


def _deleted(places: Iterable[int]) -> list[str]:
    names = [f"t{place}" for place in sorted(places)]
    return [f"del {', '.join(names)}"] if names else []
