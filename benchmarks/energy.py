"""Energy: joules that a GPU takes, by the counter of NVIDIA's management library, which comes with the driver.

The counter is of the whole board, in millijoules, and is renewed every 20 to 100 ms. So what is measured is repeated
until clocks and power have settled, then for half a second more. Power is the energy between the first renewal and the
last one, over the time between them; joules are that power times the time of a call.

Without the library, or a GPU that counts, there is no figure: None.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch

_LIBRARY, _SUCCESS = "libnvidia-ml.so.1", 0
# Until clocks and power have settled; what is measured; between two looks at the counter; between two waits.
_SETTLE, _SECONDS, _LOOK, _WAIT = 0.2, 0.5, 0.001, 0.02


class Board:
    """A GPU as the management library knows it."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p):
        self._library, self._handle = library, handle

    def millijoules(self) -> int | None:
        """Taken since the driver was loaded."""
        return self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def power_limit(self) -> float | None:
        """Watts that it is held to."""
        milliwatts = self._ask("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())
        return None if milliwatts is None else milliwatts / 1e3

    def _ask(self, name: str, value: ctypes.c_uint | ctypes.c_ulonglong) -> int | None:
        return value.value if getattr(self._library, name)(self._handle, ctypes.byref(value)) == _SUCCESS else None


@functools.cache
def board_of(device: torch.device) -> Board | None:
    """The GPU of a CUDA device; None where there is none or no library that knows it.

    By its UUID: the library counts all GPUs of a machine, PyTorch those that it may see.
    """
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL(_LIBRARY)
        found = library.nvmlInit_v2() == _SUCCESS and (
            library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == _SUCCESS
        )
    except (OSError, AttributeError):
        return None
    return Board(library, handle) if found else None


def power_limit(device: torch.device) -> float | None:
    """Watts that a GPU is held to, or None."""
    board = board_of(device)
    return None if board is None else board.power_limit()


def joules(call: Callable[[], object], device: torch.device, *, seconds: float = _SECONDS) -> float | None:
    """Joules of a call of `call()`, repeated for so long after it has settled; None where nothing counts them."""
    board = board_of(device)
    if board is None or board.millijoules() is None:
        return None
    *_, batch = _repeat(call, device, _SETTLE, 1)
    looks: list[tuple[float, int]] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK):
            energy = board.millijoules()
            if energy is not None:
                looks.append((time.perf_counter(), energy))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        calls, elapsed, _ = _repeat(call, device, seconds, batch)
    finally:
        done.set()
        looking.join()
    power = watts(looks)
    return None if power is None else power * elapsed / calls


def watts(looks: Sequence[tuple[float, int]]) -> float | None:
    """Mean power by looks at the counter, (seconds, millijoules); None where it was renewed less than twice."""
    renewed = [look for before, look in itertools.pairwise(looks) if look[1] != before[1]]
    if len(renewed) < 2:
        return None
    (first, begin), (last, end) = renewed[0], renewed[-1]
    return (end - begin) / 1e3 / (last - first)


def _repeat(call: Callable[[], object], device: torch.device, seconds: float, batch: int) -> tuple[int, float, int]:
    """Calls for so long, as (calls, seconds, calls between two waits): the device is never far behind the host."""
    calls, start = 0, time.perf_counter()
    now = start
    while now - start < seconds:
        before = now
        for _ in range(batch):
            call()
        torch.cuda.synchronize(device)
        now = time.perf_counter()
        calls += batch
        if now - before < _WAIT:
            batch *= 2
    return calls, now - start, batch
