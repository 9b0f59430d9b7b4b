"""Recording what a function of tensors does: allocations, views and other PyTorch operations, launches.

Each tensor is known by its place: arguments come first, then what is made, in order. A launch takes addresses: that of
the place whose storage it reads, and how far behind its begin. Tensors and storages are known by weak references, so
that nothing is held because it is recorded.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchao_blockwise import _compat
from torchao_blockwise._compat import recordings

if TYPE_CHECKING:
    from torchao_blockwise._compat.triton_launcher import Launching

Tensors: TypeAlias = "list[Any]"
Step: TypeAlias = "Callable[[Tensors], None]"

# Why there is no recording yet: a kernel that is built now can be launched by the build next time.
NOT_BUILT = "builds a kernel"
# Addresses are told apart by whether they are multiples of 16 bytes, as Triton's builds are.
ALIGNMENT_MASK = 15
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
        # (step, places read, places written, whether it is needed for more than what it writes)
        self.steps: list[tuple[Step, set[int], set[int], bool]] = []
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

    def _allocate(self, x: torch.Tensor) -> None:
        place, size, stride, dtype = self._add(x), tuple(x.shape), x.stride(), x.dtype
        empty_strided = recordings.empty_strided_on(x.device)

        def step(tensors: Tensors) -> None:
            tensors[place] = empty_strided(size, stride, dtype)

        self.steps.append((step, set(), {place}, False))

    def _call(self, func: Any, args: Any, kwargs: Any, out: Any, reads: set[int]) -> None:
        def at(value: Any) -> Any:
            """The value, or how to find the tensor that stands here."""
            if isinstance(value, torch.Tensor):
                return _Place(self._places[id(value)])
            if isinstance(value, (list, tuple)):
                return type(value)(at(x) for x in value)
            return value

        args, kwargs = at(args), {name: at(value) for name, value in kwargs.items()}
        # What changes an argument gives that one.
        is_one = isinstance(out, torch.Tensor)
        made = [(i, x) for i, x in enumerate((out,) if is_one else out) if x is not None]
        places = [(i, self._places[id(x)] if id(x) in self._places else self._add(x)) for i, x in made]

        def step(tensors: Tensors) -> None:
            results = func(*_filled(args, tensors), **{n: _filled(v, tensors) for n, v in kwargs.items()})
            for i, place in places:
                tensors[place] = results if is_one else results[i]

        self.steps.append((step, reads, {place for _, place in places}, not func.is_view))
        self.calls = self.calls or not func.is_view

    def launched(self, launcher: Launching, run: Callable[..., None], grid: int, arguments: Sequence[Any]) -> None:
        """Add a launch. arguments: tensors, for their addresses, `Matrix`, numbers and None."""
        self.launcher = launcher
        values: list[Any] = []
        addresses: list[tuple[int, int, int]] = []
        matrices: list[tuple[int, int, int, Callable[..., Any], dict[int, Any]]] = []
        reads: set[int] = set()
        for argument in arguments:
            x = argument.x if type(argument) is Matrix else argument
            if not isinstance(x, torch.Tensor):
                values.append(x)
                continue
            owner, begins = self._owners.get(recordings.storage_of(x), (None, 0))
            if owner is None:
                self.refuse("launches a kernel on a tensor from elsewhere")
                return
            reads.add(owner)
            behind = int(x.storage_offset() * x.itemsize) - begins
            if type(argument) is Matrix:
                matrices.append((len(values), owner, behind, argument.encode, {}))
            else:
                addresses.append((len(values), owner, behind))
            values.append(None)
        matrices.reverse()
        current_stream, device = launcher.current_stream, launcher.current_device()

        def step(tensors: Tensors) -> None:
            given = values[:]
            for i, owner, behind in addresses:
                given[i] = tensors[owner].data_ptr() + behind
            for i, owner, behind, encode, maps in matrices:
                address = tensors[owner].data_ptr() + behind
                encoded = maps.get(address)
                if encoded is None:
                    encoded = _encoded(maps, address, encode)
                given[i : i + 1] = encoded
            run(grid, current_stream(device), given)

        self.steps.append((step, reads, set(), True))

    def called(self, run: Callable[..., None], arguments: Sequence[torch.Tensor]) -> None:
        """Add a call of another library, `run(*arguments)`: it reads and writes these alone, on the current stream."""
        places = [self._places.get(id(x), -1) for x in arguments]
        if -1 in places:
            self.refuse("calls a library on a tensor from elsewhere")
            return

        def step(tensors: Tensors) -> None:
            run(*[tensors[place] for place in places])

        self.steps.append((step, set(places), set(), True))


# Of one matrix of one launch. Memory is given out again at the same addresses step by step.
_MAX_MAPS = 1024


class _Address(int):
    """Stands for a tensor whose address is all that is asked for."""

    def data_ptr(self) -> int:
        return int(self)


def _encoded(maps: dict[int, Any], address: int, encode: Callable[[Any], tuple[Any, ...]]) -> Any:
    if len(maps) >= _MAX_MAPS:
        maps.clear()
    maps[address] = encode(_Address(address))
    return maps[address]


class _Place(int):
    """Which tensor stands here."""


def _filled(value: Any, tensors: Tensors) -> Any:
    if type(value) is _Place:
        return tensors[value]
    if type(value) in (list, tuple):
        return type(value)(_filled(x, tensors) for x in value)
    return value


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
    """What an operation did, to be done again."""

    __slots__ = ("_behind", "_calls", "_device", "_kind", "_launcher", "_result", "_steps", "_unread")

    def __init__(self, seen: Recorder, inputs: int, result: Any):
        self._launcher, self._calls, self._kind = seen.launcher, seen.calls, seen.device.type
        self._device = None if seen.launcher is None else seen.launcher.current_device()
        constants: list[Any] = []
        self._result = _maker(result, seen, constants)
        wanted = {seen._places[id(x)] for x in _tensors((result,))}
        # From the end: a view that nothing needs as a tensor is left out; a tensor goes after what reads it last.
        steps: list[tuple[Step, tuple[int, ...]]] = []
        read = set(wanted)
        for step, reads, writes, is_needed in reversed(seen.steps):
            if not (is_needed or writes & read):
                continue
            steps.append((step, tuple((reads | writes) - read)))
            read |= reads | writes
        self._steps = steps[::-1]
        # A launch names one tensor of a storage; another argument that lies there too would hold it to the end.
        self._unread = tuple(set(range(inputs)) - read)
        self._behind = [*[None] * (seen.count - inputs), *constants]

    def fits(self) -> bool:
        """Whether nothing around forbids it now: another current device, hooks on launches."""
        launcher = self._launcher
        return launcher is None or (launcher.current_device() == self._device and not launcher.has_hooks())

    def replay(self, tensors: Tensors) -> Any:
        """The result; `tensors` are those of the arguments, and become all that there are on the way."""
        if self._calls and torch.is_autocast_enabled(self._kind):
            with recordings.no_autocast():
                return self.replay(tensors)
        tensors += self._behind
        for place in self._unread:
            tensors[place] = None
        for step, done in self._steps:
            step(tensors)
            for place in done:
                tensors[place] = None
        return self._result(tensors)


def _maker(result: Any, seen: Recorder, constants: list[Any]) -> Callable[[Tensors], Any]:
    """(tensors and behind them constants) -> a result like this one; adds to the constants."""

    def place_of(x: Any) -> int:
        if isinstance(x, torch.Tensor):
            return seen._places[id(x)]
        constants.append(x)
        return seen.count + len(constants) - 1

    if isinstance(result, torch.Tensor):
        return operator.itemgetter(place_of(result))
    if not isinstance(result, (tuple, list)):
        return lambda tensors: result
    # Of a NamedTuple too, whose own constructors go through Python.
    make = functools.partial(tuple.__new__, type(result)) if isinstance(result, tuple) else list
    if len(result) > 1 and not any(isinstance(x, (tuple, list)) for x in result):
        take = operator.itemgetter(*map(place_of, result))
        return lambda tensors: make(take(tensors))
    parts = [_maker(x, seen, constants) for x in result]
    return lambda tensors: make([part(tensors) for part in parts])
