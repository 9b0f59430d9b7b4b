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
    clusters     a pair of multiprocessors runs as two, each on its part of every tile; what one sends to the other when
                 that has ended is an error

Layouts, registers, bank conflicts, proxies' fences and speed are beyond it.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import threading
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gluon_memories import Barrier, Barriers, Descriptor, Pointer, Shared, SimulationError, split_dim
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
    """What `gl`, `tma`, `mbarrier` .. do on one multiprocessor of a program. `cluster`: all of the program's."""

    program: int
    programs: int
    rank: int
    cluster: list[Multiprocessor]
    scheduler: Scheduler
    shared_bytes: int = 0
    allocations: list = field(default_factory=list)
    partitions: list = field(default_factory=list)
    running: int = 0
    stores: dict = field(default_factory=dict)
    products: dict[int, list[_Product]] = field(default_factory=dict)  # of each thread, which are not waited for
    free_stages: list[Barrier] = field(default_factory=list)

    def names(self) -> dict[str, object]:
        return {
            "gl": self._gl(),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda bases: bases,
                init=self._init,
                expect=self._expect,
                wait=self._wait,
            ),
            "make_barriers": self._make_barriers,
            "free_stage": self._free_stage,
            "free_stage_after": self._free_stage_after,
            "wait_for_stage": lambda stage, phase, ctas: self._wait(self.free_stages[int(stage)], phase),
            "tma": types.SimpleNamespace(store_wait=self._store_wait),
            "_load_async": self._load_async,
            "_store_async": self._store_async,
            "_rank": lambda ctas: self.rank,
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
            zeros=lambda shape, dtype, layout: torch.zeros(self._part(shape, layout), dtype=dtype),
            arange=self._arange,
            load=lambda ptr, mask=None, other=0.0: ptr.load(mask, other),
            store=lambda ptr, value, mask=None: ptr.store(value, mask),
            allocate_shared_memory=self._allocate,
            warp_specialize=self._warp_specialize,
            NVMMADistributedLayout=self._mma_layout,
            SliceLayout=lambda dim, parent: (dim, parent),
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
        )

    @staticmethod
    def _mma_layout(version, warps_per_cta, instr_shape, cga_layout=None):
        return types.SimpleNamespace(cga_layout=cga_layout)

    @staticmethod
    def _static_assert(condition):
        assert condition

    @staticmethod
    def _part(shape, layout) -> list[int]:
        """The shape of what one multiprocessor has of a tile."""
        shape, dim = list(shape), split_dim(layout)
        if dim is not None:
            shape[dim] //= 2
        return shape

    def _arange(self, start, end, layout):
        dim, parent = layout
        if split_dim(parent) == {0: -1, 1: -2}[dim]:
            end = (end - start) // 2
            start = self.rank * end
            end += start
        return torch.arange(start, end)

    def _allocate(self, dtype, shape, layout):
        i = len(self.allocations)
        if dtype == torch.int64:
            assert shape[1] == len(self.cluster), "a barrier a multiprocessor"
            peers = [lambda rank, j=j: self.cluster[rank].allocations[i].index(j) for j in range(shape[0])]
            result = Barriers([Barrier(of_peer) for of_peer in peers])
        else:
            data = torch.empty(self._part(shape, layout), dtype=dtype)
            result = Shared(data, lambda rank: self.cluster[rank].allocations[i])
            result.poison()
            self.shared_bytes += data.nbytes
        self.allocations.append(result)
        return result

    def _warp_specialize(self, functions_and_args, worker_num_warps, worker_num_regs):
        assert len(worker_num_warps) == len(worker_num_regs) == len(functions_and_args) - 1
        self.running = len(functions_and_args)

        def partition(function, args):
            function(*args)
            self.running -= 1

        self.partitions = [lambda f=f, args=args: partition(f, args) for f, args in functions_and_args]

    def _check_running(self):
        if not self.running:
            raise SimulationError("a multiprocessor was written to after it had ended")

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

    # gluon_barriers.py
    def _make_barriers(self, stages, arrivals):
        self.free_stages = [Barrier() for _ in range(stages)]
        for barrier in self.free_stages:
            self._init(barrier, arrivals)

    def _free_stage(self, stage, ctas):
        for multiprocessor in self.cluster:
            multiprocessor._check_running()
            for _ in range(WARPGROUP):
                self._arrive(multiprocessor.free_stages[int(stage)])

    def _free_stage_after(self, values, per_thread, stage, zero, ctas):
        assert zero == 0
        values.come()
        self._free_stage(stage, ctas)

    # tma
    def _load_async(self, descriptor, coordinates, barrier, result, multicast=False):
        if multicast and self.rank > 0:
            return
        assert not (multicast and split_dim(descriptor.layout)), "a tile that is shared is not dealt out"
        shape, inside, tile = descriptor.window(coordinates, self.rank)
        assert list(result.shape) == shape, "the ring's tiles differ from the descriptor's"
        targets = [(result, barrier, self)]
        if multicast:
            peers = range(1, len(self.cluster))
            targets += [(result.of_peer(r), barrier.of_peer(r), self.cluster[r]) for r in peers]
        for target, _, _ in targets:
            target.poison()

        def copy(target, bar, multiprocessor):
            multiprocessor._check_running()
            target.data.zero_()
            target.data[tile] = descriptor.base[inside]
            bar.bytes -= target.data.nbytes
            # The other's bytes may come before it expects them; they do not complete a phase then.
            if bar.bytes < 0 and not multicast:
                raise SimulationError("a barrier got more bytes than it expects")
            bar.settle()

        self.scheduler.copies += [lambda t=t: copy(*t) for t in targets]
        self.scheduler.pause()

    def _store_async(self, descriptor, coordinates, source):
        before = source.bytes()
        shape, inside, tile = descriptor.window(coordinates, self.rank)
        assert list(source.shape) == shape

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


def run(kernel, grid: int, *args, num_ctas: int = 1, seed: int = 0, **kwargs) -> int:
    """Run each program of a grid of the jit function `kernel`, one after the other, in an order drawn from `seed`.

    Returns the bytes of shared memory that a multiprocessor takes.
    args: tensors, Triton's TensorDescriptors and numbers.
    """
    shared = 0
    for program in random.Random(seed).sample(range(grid), grid):
        scheduler, cluster = Scheduler(seed + program), []
        cluster += [Multiprocessor(program, grid, rank, cluster, scheduler) for rank in range(num_ctas)]
        for multiprocessor in cluster:
            _simulated(kernel, multiprocessor.names(), {})(*map(_argument, args), **kwargs)
        scheduler.run([partition for multiprocessor in cluster for partition in multiprocessor.partitions])
        if any(any(multiprocessor.stores.values()) for multiprocessor in cluster):
            raise SimulationError("a program ended before its stores had left shared memory")
        if any(any(multiprocessor.products.values()) for multiprocessor in cluster):
            raise SimulationError("a program ended before its products were waited for")
        shared = max(multiprocessor.shared_bytes for multiprocessor in cluster)
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
    output: int  # which argument; what is no tensor is left as it is
    programs: int = 3  # pairs count as one
    seed: int = 0
    shared: list[int] = field(default_factory=list)  # bytes of each launch
    # Where there is a GPU: not to be launched past this object.
    pre_run_hooks: tuple = ("simulated",)

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid[0])

    def _launch(self, programs, *args, B, num_warps, num_ctas):
        out = args[self.output]
        if isinstance(out, torch.Tensor) and not B.accumulate:
            out.fill_(float("nan"))
        self.shared.append(run(self.kernel, programs, *args, num_ctas=num_ctas, seed=self.seed, B=B))

    def multiprocessors(self, device) -> int:
        return 2 * self.programs


def with_fault(module, old: str, new: str, folder: Path):
    """A copy of `module` whose source has `new` in the one place of `old`."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, "what the fault replaces is no longer there, or several times"
    return _loaded(source.replace(old, new), folder)


def without_fault(module, folder: Path):
    """A copy of `module` made like one with a fault: the control of what is seen with the fault."""
    return _loaded(Path(module.__file__).read_text(), folder)


def _loaded(source: str, folder: Path):
    path = folder / "copied.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("copied", path)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied
