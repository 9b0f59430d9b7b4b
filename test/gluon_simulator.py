"""A simulator of Gluon kernels for Hopper, for tests on machines without one.

It runs the Python source of a kernel's jit functions with another `gl`, `tma`, `mbarrier` ..: values are torch tensors,
each partition of a `warp_specialize` is a thread, and one thread runs at a time. At every point where partitions meet
the copy engine, a barrier or the tensor cores, the next to run is drawn at random, from a seed. So an order that the
hardware may take is tried, and what only works in one order fails:

    copies       shared memory is poisoned when a copy into it is issued, and filled at some later time
    wgmma        reads its operands when issued and again when waited for; a change between is an error
    stores       leave shared memory at some time before they are waited for; a change before that is an error
    loads        of vectors from shared memory come when they are first used: a copy may overtake them until then
    barriers     phases and pending counts as in PTX; partitions that wait for each other are an error, not a hang

Layouts, registers, bank conflicts, proxies' fences and speed are beyond it.
"""

from __future__ import annotations

import functools
import random
import threading
import types
from dataclasses import dataclass, field

import torch
from gluon_memories import Barrier, Barriers, Descriptor, Pointer, Shared, SimulationError
from gluon_scheduler import WARPGROUP, Scheduler


@dataclass
class _Product:
    """An asynchronous product: `value` is there when it has been waited for."""

    a: Shared
    b: Shared
    acc: torch.Tensor | _Product
    value: torch.Tensor | None = None

    def __post_init__(self):
        self._bytes = self.a.bytes(), self.b.bytes()

    def __mul__(self, other):
        raise SimulationError("a product was used before it was waited for")

    def finish(self) -> None:
        if not (torch.equal(self._bytes[0], self.a.bytes()) and torch.equal(self._bytes[1], self.b.bytes())):
            raise SimulationError("shared memory changed while a wgmma read it")
        acc = self.acc.value if isinstance(self.acc, _Product) else self.acc
        self.value, self.acc = acc + self.a.data.float() @ self.b.data.float(), None


@dataclass
class Multiprocessor:
    """What `gl`, `tma`, `mbarrier` .. do on the multiprocessor that a program has."""

    program: int
    programs: int
    scheduler: Scheduler
    shared_bytes: int = 0
    partitions: list = field(default_factory=list)
    stores: dict = field(default_factory=dict)
    products: dict[int, list[_Product]] = field(default_factory=dict)  # of each thread, which are not waited for
    free_stages: list[Barrier] = field(default_factory=list)

    def names(self) -> dict[str, object]:
        return {
            "gl": self._gl(),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=self._init,
                expect=self._expect,
                wait=self._wait,
            ),
            "make_barriers": self._make_barriers,
            "free_stage": self._free_stage,
            "free_stage_after": self._free_stage_after,
            "wait_for_stage": lambda stage, phase: self._wait(self.free_stages[int(stage)], phase),
            "tma": types.SimpleNamespace(store_wait=self._store_wait),
            "_load_async": self._load_async,
            "_store_async": self._store_async,
            "_reciprocal": self._reciprocal,
            "warpgroup_mma": self._warpgroup_mma,
            "warpgroup_mma_wait": self._warpgroup_mma_wait,
            "fence_async_shared": lambda: None,
        }

    def _gl(self):
        return types.SimpleNamespace(
            to_tensor=torch.as_tensor,
            where=lambda c, x, y: torch.where(torch.as_tensor(c), torch.as_tensor(x), torch.as_tensor(y)),
            minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
            cdiv=lambda x, y: -(-x // y),
            program_id=lambda axis: torch.tensor(self.program),
            num_programs=lambda axis: self.programs,
            static_range=range,
            static_assert=self._static_assert,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            arange=lambda start, end, layout: torch.arange(start, end),
            load=lambda ptr, mask=None, other=0.0: ptr.load(mask, other),
            store=lambda ptr, value, mask=None: ptr.store(value, mask),
            allocate_shared_memory=self._allocate,
            warp_specialize=self._warp_specialize,
            NVMMADistributedLayout=lambda *args: args,
            SliceLayout=lambda dim, parent: (dim, parent),
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
        )

    @staticmethod
    def _static_assert(condition):
        assert condition

    def _allocate(self, dtype, shape, layout):
        if dtype == torch.int64:
            return Barriers([Barrier() for _ in range(shape[0])])
        result = Shared(torch.empty(shape, dtype=dtype))
        result.poison()
        self.shared_bytes += result.data.nbytes
        return result

    def _warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs):
        assert len(worker_num_warps) == len(worker_num_regs) == len(functions_and_args) - 1
        self.partitions = [functools.partial(function, *args) for function, args in functions_and_args]

    def _reciprocal(self, x):
        # The hardware's is an ulp off, up or down.
        return torch.nextafter(1 / x, torch.tensor(float(self.scheduler.random.choice((0, 9)))))

    # mbarrier
    def _init(self, barrier, count):
        barrier.count = barrier.pending = count

    def _expect(self, barrier, bytes):
        self.scheduler.pause()
        barrier.bytes += bytes
        self._arrive(barrier)

    def _arrive(self, barrier, count=1):
        barrier.pending -= count
        if barrier.pending < 0:
            raise SimulationError("more arrivals at a barrier than it was made for")
        barrier.settle()
        self.scheduler.pause()

    def _wait(self, barrier, phase, pred=True):
        if pred:
            self.scheduler.pause(until=lambda: barrier.phase != int(phase))

    # gluon_ring.py
    def _make_barriers(self, stages, arrivals):
        self.free_stages = [Barrier() for _ in range(stages)]
        for barrier in self.free_stages:
            self._init(barrier, arrivals)

    def _free_stage(self, stage):
        for _ in range(WARPGROUP):
            self._arrive(self.free_stages[int(stage)])

    def _free_stage_after(self, values, per_thread, stage, zero):
        assert zero == 0
        values.come()
        self._free_stage(stage)

    # tma
    def _load_async(self, descriptor, coordinates, barrier, result):
        inside, tile = descriptor.window(coordinates)
        assert list(result.shape) == descriptor.block_shape, "the ring's tiles differ from the descriptor's"
        result.poison()

        def copy():
            result.data.zero_()
            result.data[tile] = descriptor.base[inside]
            barrier.bytes -= result.data.nbytes
            if barrier.bytes < 0:
                raise SimulationError("a barrier got more bytes than it expects")
            barrier.settle()

        self.scheduler.copies.append(copy)
        self.scheduler.pause()

    def _store_async(self, descriptor, coordinates, source):
        before = source.bytes()
        inside, tile = descriptor.window(coordinates)
        assert list(source.shape) == descriptor.block_shape

        def copy():
            if not torch.equal(before, source.bytes()):
                raise SimulationError("shared memory changed before its copy had left")
            descriptor.base[inside] = source.data[tile]

        self.stores.setdefault(threading.get_ident(), []).append(copy)
        self.scheduler.pause()

    def _store_wait(self, pendings):
        mine = self.stores.get(threading.get_ident(), [])
        while len(mine) > pendings:
            mine.pop(0)()

    # tensor cores
    def _warpgroup_mma(self, a, b, acc, *, use_acc=True, is_async):
        assert is_async
        if not isinstance(acc, _Product):
            acc = acc.clone() if bool(use_acc) else torch.zeros_like(acc)
        elif use_acc is not True:
            raise SimulationError("a product that is not done is dropped")
        self.scheduler.pause()
        product = _Product(a, b, acc)
        self.products.setdefault(threading.get_ident(), []).append(product)
        return product

    def _warpgroup_mma_wait(self, outstanding, deps):
        self.scheduler.pause()
        mine = self.products.get(threading.get_ident(), [])
        while len(mine) > outstanding:
            mine.pop(0).finish()
        results = tuple(x.value if isinstance(x, _Product) and x.value is not None else x for x in deps)
        return results[0] if len(results) == 1 else results


def _argument(x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return Descriptor.of(x) if hasattr(x, "block_shape") else x


def run(kernel, grid: int, *args, seed: int = 0, **kwargs) -> int:
    """Run each program of a grid of the jit function `kernel`, one after the other, in an order drawn from `seed`.

    Returns the bytes of shared memory that a multiprocessor takes.
    args: tensors, Triton's TensorDescriptors and numbers.
    """
    shared = 0
    for program in random.Random(seed).sample(range(grid), grid):
        scheduler = Scheduler(seed + program)
        multiprocessor = Multiprocessor(program, grid, scheduler)
        _simulated(kernel, multiprocessor.names(), {})(*map(_argument, args), **kwargs)
        scheduler.run(multiprocessor.partitions)
        if any(multiprocessor.stores.values()):
            raise SimulationError("a program ended before its stores had left shared memory")
        if any(multiprocessor.products.values()):
            raise SimulationError("a program ended before its products were waited for")
        shared = multiprocessor.shared_bytes
    return shared


def _simulated(function, names: dict[str, object], spaces: dict[int, dict]):
    """The Python function of a jit function, in a copy of its module where `names` and other such functions replace."""
    plain = function.fn
    space = spaces.get(id(plain.__globals__))
    if space is None:
        space = spaces[id(plain.__globals__)] = {}
        for name, value in plain.__globals__.items():
            jit = isinstance(getattr(value, "fn", None), types.FunctionType)
            space[name] = _simulated(value, names, spaces) if jit else getattr(value, "value", value)
        space.update(names)
    return types.FunctionType(plain.__code__, space, plain.__name__, plain.__defaults__)


@dataclass
class Launcher:
    """In the place of a kernel: `launcher[grid](..)` runs it in the simulator, its output poisoned before."""

    kernel: object
    outputs: tuple[int, ...]  # which arguments; what is no tensor is left as it is
    programs: int = 3
    seed: int = 0
    shared: list[int] = field(default_factory=list)  # bytes of each launch
    # Where there is a GPU: not to be launched past this object.
    pre_run_hooks: tuple = ("simulated",)

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid[0])

    def _launch(self, programs, *args, B, num_warps):
        for i in self.outputs:
            if isinstance(args[i], torch.Tensor) and not B.accumulate:
                args[i].fill_(float("nan"))
        self.shared.append(run(self.kernel, programs, *args, seed=self.seed, B=B))

    def multiprocessors(self, device) -> int:
        return self.programs
