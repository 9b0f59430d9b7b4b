"""DeepGEMM from the package sgl-deep-gemm, version 0.1.4 or newer and below 0.2.

It is a C++ library for one version of CUDA and builds each new kernel with nvcc. That takes about ten seconds, once for
each machine, since kernels are cached in DG_JIT_CACHE_DIR or ~/.deep_gemm. With some builds of PyTorch, importing it
ends the process; without nvcc its first GEMM raises. So one GEMM is tried in another process first.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import metadata

from torch.torch_version import TorchVersion

Product = Callable[..., None]

_PACKAGE, _MODULE = "sgl-deep-gemm", "deep_gemm"
_FROM, _BELOW = TorchVersion("0.1.4"), TorchVersion("0.2.0")
_SECONDS = 120
_TRIAL = """
import torch, deep_gemm
torch.cuda.set_device({device})
a = torch.ones(128, 128, device="cuda").to(torch.float8_e4m3fn)
out = torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
deep_gemm.fp8_gemm_nt((a, torch.ones(1, 128, device="cuda").t()), (a, torch.ones(1, 1, device="cuda")), out)
assert bool((out == 128).all()), "its GEMM of ones is wrong"
"""


@functools.cache
def why_absent() -> str | None:
    """Return why DeepGEMM is not available, as far as is known without importing it, or None."""
    if importlib.util.find_spec(_MODULE) is None:
        return f"{_MODULE} is not installed (pip install -e '.[{_MODULE}]' in a clone of this package)"
    try:
        version = metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        version = "another package"
    if _FROM <= version < _BELOW:
        return None
    return f"{_MODULE} must be {_PACKAGE} {_FROM} or newer and below {_BELOW}, got {version}"


@functools.cache
def product_on(device: int) -> Product | str:
    """Return DeepGEMM's function ((a, a_scale), (b, b_scale), out) -> None for this CUDA device, or why there is none.

    The device must be the current one in calls. Kernels are loaded on the first device that is used. Warns once if
    DeepGEMM is installed but fails.
    """
    if (reason := why_absent()) is not None:
        return reason
    if _devices and device not in _devices:
        return f"its kernels are on the device that the process used first, cuda:{_devices[0]}, got cuda:{device}"
    _devices.append(device)
    if (reason := _failure_of_trial(device)) is not None:
        warnings.warn(f"DeepGEMM is installed but cannot be used: {reason}", stacklevel=2)
        return reason
    import deep_gemm

    # Allocates its workspace for cuBLASLt, 32 MiB, now and not later in the memory pool of a CUDA graph.
    deep_gemm.get_num_sms()
    product: Product = deep_gemm.fp8_gemm_nt
    return product


_devices: list[int] = []


def _failure_of_trial(device: int) -> str | None:
    """Return the error of a GEMM in another process, or None."""
    command = [sys.executable, "-c", _TRIAL.format(device=device)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        return f"its trial in another process failed: {error}"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"its trial in another process, which needs CUDA_HOME to build a kernel with nvcc, failed: {last}"
