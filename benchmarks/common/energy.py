"""Energy of a step, from the counter of the GPU's board that NVIDIA's management library reads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from common.timing import synchronize


def joules(step: Callable[[], object], device: torch.device, seconds: float = 2.0) -> float | None:
    """Joules of the board in a step, averaged over `seconds`, up to 5 % off; None without such a counter."""
    millijoules = _counter(device)
    if millijoules is None:
        return None
    steps, start, before = 0, time.perf_counter(), millijoules()
    while time.perf_counter() - start < seconds:
        step()
        synchronize(device)
        steps += 1
    return (millijoules() - before) / 1e3 / steps


def _counter(device: torch.device) -> Callable[[], int] | None:
    """Reads the millijoules since the driver was loaded."""
    if device.type != "cuda":
        return None
    # PyTorch may see only some of the GPUs that the library counts.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, value = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)):
        return None

    def read() -> int:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value))
        return value.value

    return read
