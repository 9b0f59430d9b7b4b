"""Timing: the one way that benchmarks measure.

    time_runs    device time of functions, side by side: CUDA graph replays over inputs that are not in the cache
    time_eager   time a call in a loop of eager calls, host and device as they overlap in training
    host_time    time that the host needs to launch a call

On a CPU all three read the clock around calls, so that what measures runs anywhere.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from common.errors import reason, tensors

# One round of calls moves the bytes of four L2 caches, because they do not evict exactly by age.
_CACHES = 4
# Few calls would show the pause between two graphs; more calls or bytes would only take longer.
_MIN_SETS, _MAX_SETS, _MAX_BYTES = 4, 1024, 4 * 2**30
# A function is timed for so long, within these numbers of repeats.
_SECONDS, _MIN_REPEATS, _MAX_REPEATS = 0.05, 5, 50
# A byte that outputs are filled with to see whether they are written, and how many are looked at.
_UNTOUCHED, _LOOKED_AT = 0x7F, 1024


class Timing(NamedTuple):
    """Microseconds a call: median, and quartiles over `repeats`."""

    us: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of samples in microseconds."""
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(statistics.median(samples), quartiles[0], quartiles[2], len(samples))

    def columns(self) -> dict:
        """Columns of a row."""
        return {"us": self.us, "spread %": 100 * (self.high - self.low) / self.us, "timing": self._asdict()}


def input_sets(make: Callable[[], tuple], device: torch.device | str, nbytes: int | None = None) -> list[tuple]:
    """Return argument tuples for `time_runs`: on a GPU, as many as move its L2 cache four times in a round of calls.

    make: gives fresh random inputs at each call. Zeros would not do: some kernels are faster on them than on data.
    nbytes: bytes that a call reads and writes; by default those of its inputs.
    From 4 to 1024 sets, fewer where they would move more than 4 GiB; one set on a CPU.
    """
    sets = [make()]
    if torch.device(device).type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        moved = max(1, nbytes or sum(t.nbytes for t in tensors(sets[0])))
        wanted = min(_MAX_SETS, max(_MIN_SETS, -(-_CACHES * cache // moved)))
        sets += [make() for _ in range(min(wanted, _MAX_BYTES // moved) - 1)]
    return sets


def time_runs(
    runs: Mapping[str, tuple[Callable, Sequence[tuple]]],
    device: torch.device | str,
    *,
    seconds: float = _SECONDS,
) -> dict[str, Timing | str]:
    """Device time of each run side by side: {name: Timing}, or {name: why it failed}.

    runs: name -> (function, its argument tuples as of `input_sets`). Tensors that the function returns must be computed
        only from its arguments, and must not be arguments.
    seconds: how long each is timed, after its warm-up.

    On a GPU a graph calls the function on every set in turn: when a set comes round again, the cache has forgotten it.
    The runs take turns, so that heat and clocks are the same for all. A function that cannot be captured fails, and so
    does a graph that leaves an output unwritten.
    """
    device = torch.device(device)
    replays: dict[str, _Replay] = {}
    failed: dict[str, str] = {}
    for name, (run, sets) in runs.items():
        try:
            replay = _prepare(run, sets, device)
            replay.call()
            # The first replay uploads the graph.
            (us,) = _sample([replay], device)
        except Exception as error:
            failed[name] = reason(error)
            continue
        replay.repeats = int(min(_MAX_REPEATS, max(_MIN_REPEATS, seconds * 1e6 // (us * replay.sets + 1))))
        replays[name] = replay
    turns = [r for i in range(_MAX_REPEATS) for r in replays.values() if i < r.repeats]
    for replay, us in zip(turns, _sample(turns, device)):
        replay.samples.append(us)
    done = {name: Timing.of(r.samples) for name, r in replays.items()}
    return {name: failed[name] if name in failed else done[name] for name in runs}


def time_eager(run: Callable[[], object], device: torch.device | str, seconds: float | None = None) -> Timing:
    """Time a call of `run()` in a loop of eager calls: host and device overlap as in training, the slower decides."""
    return _time_calls(run, torch.device(device), repeats=5, seconds=seconds, wait=True)


def host_time(run: Callable[[], object], device: torch.device | str, seconds: float | None = None) -> Timing:
    """Time until a call of `run()` returns, its kernels launched: what the host does, whatever the device does."""
    return _time_calls(run, torch.device(device), repeats=20, seconds=seconds, wait=False)


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_side_stream(run: Callable[[], Any], device: torch.device, calls: int = 1) -> Any:
    """Run as a capture does, on another stream; returns the last result."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(calls):
            result = run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result


def mark(device: torch.device) -> Any:
    """A point in time on the device's current stream, the clock's on a CPU; see `us_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def us_between(start: Any, end: Any) -> float:
    """Microseconds between two marks that the device has passed."""
    return (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3


def _time_calls(run, device: torch.device, *, repeats: int, seconds: float | None, wait: bool) -> Timing:
    """Ten calls in a row, few enough that the queue of launches never fills, `repeats` times; fewer where `seconds`
    are over, but at least one call three times."""
    calls = 10
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        run()
    synchronize(device)
    if seconds is not None:
        fit = max(3, int(seconds / (time.perf_counter() - start)))
        calls = max(1, min(calls, fit // 3))
        repeats = max(3, min(repeats, fit // calls))
    samples = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if wait:
                synchronize(device)
            samples.append((time.perf_counter() - start) * 1e6 / calls)
    finally:
        if collecting:
            gc.enable()
    synchronize(device)
    return Timing.of(samples)


@dataclass
class _Replay:
    """Calls of one function, once on each of `sets` argument tuples, to be repeated.

    graph_outputs: where the graph writes as long as it lives.
    """

    call: Callable[[], object]
    sets: int
    graph_outputs: object = None
    repeats: int = _MIN_REPEATS
    samples: list[float] = field(default_factory=list)


def _prepare(run: Callable, sets: Sequence[tuple], device: torch.device) -> _Replay:
    def call():
        return [run(*arguments) for arguments in sets]

    if device.type != "cuda":
        return _Replay(call, len(sets))
    # Compilers, autotuners and libraries take what they need before the capture, on a stream as the capture has.
    on_side_stream(lambda: run(*sets[0]), device, 3)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = call()
    finally:
        # An error of the capture must not appear in the next function.
        torch.cuda.synchronize(device)
    _check_written(graph, outputs)
    return _Replay(graph.replay, len(sets), outputs)


def _check_written(graph: torch.cuda.CUDAGraph, outputs) -> None:
    """Raise RuntimeError where a replay leaves an output as it was: the launch was not captured, and costs nothing."""
    outs = [t.detach() for t in tensors(outputs)]
    bytes_of = [t.view(torch.uint8).flatten()[:_LOOKED_AT] for t in outs if t.dim() and t.is_contiguous()]
    for x in bytes_of:
        x.fill_(_UNTOUCHED)
    graph.replay()
    if any(x.numel() and bool((x == _UNTOUCHED).all()) for x in bytes_of):
        raise RuntimeError("a replayed graph left an output unwritten; is it launched on a separate stream?")


def _sample(turns: Sequence[_Replay], device: torch.device) -> list[float]:
    """Microseconds a call of each turn, one after the other without a pause."""
    marks = [mark(device)]
    for replay in turns:
        replay.call()
        marks.append(mark(device))
    synchronize(device)
    return [us_between(*span) / replay.sets for replay, span in zip(turns, itertools.pairwise(marks))]
