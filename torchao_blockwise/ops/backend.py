"""Backends: who computes an operation, and the choice between them."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from enum import Enum

import torch

from torchao_blockwise import _compat


class Backend(str, Enum):
    """Implementations of an operation. AUTO takes the fastest that can; a named one runs or raises, never falls back.

    REFERENCE: eager torch on any device, the bit oracle. TRITON: GPUs, and CPUs under TRITON_INTERPRET=1.
    CUBLAS: cuBLASLt block scaling through `torch.nn.functional.scaled_mm`. GLUON: kernels for Hopper alone.
    """

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"
    CUBLAS = "cublas"
    GLUON = "gluon"

    # Reads as its value in messages on every Python version.
    __str__ = str.__str__
    # An enum's own goes through Python, 0.4 µs of every operation.
    value = property(operator.attrgetter("_value_"))  # type: ignore[assignment]


# Looking an enum's member up by value takes 0.5 µs, and every operation asks several times.
_BY_NAME = {backend.value: backend for backend in Backend}


def get_backend(backend: Backend | str | None) -> Backend:
    """The backend of that name, AUTO for None; raises ValueError for an unknown name."""
    if type(backend) is Backend:
        return backend
    if backend is None:
        return Backend.AUTO
    if backend not in _BY_NAME:
        raise ValueError(f"no backend {backend!r}; the backends are {', '.join(_BY_NAME)}")
    return _BY_NAME[backend]


def casting_backend(backend: Backend | str | None) -> Backend:
    """The backend that quantises and transposes beside products on `backend`: most libraries only multiply."""
    backend = get_backend(backend)
    return Backend.AUTO if backend in (Backend.CUBLAS, Backend.GLUON) else backend


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1, read when kernels are imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, (0, 0) elsewhere."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def why_no_triton(device: torch.device, min_capability: tuple[int, int] = (8, 0)) -> str | None:
    """Why Triton kernels cannot run on `device`, or None if they can."""
    if not _compat.has_triton():
        return "triton is not installed (pip install triton)"
    capability = compute_capability(device)
    # The environment is asked last, and on a GPU that can never: reading it takes 0.6 µs.
    if capability >= min_capability or interpreting():
        return _compat.why_old_triton()
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, got {device.type} (TRITON_INTERPRET=1 interprets them on a CPU)"
    have, want = (f"sm_{a}{b}" for a, b in (capability, min_capability))
    return f"the kernel needs {want} or newer, got {have}"


def may_have_kernels(device: torch.device) -> bool:
    """False where `why_no_triton` has a reason that no GPU needs to be asked for: for code that may be traced."""
    return device.type != "cpu" or interpreting()


def why_no_gluon(device: torch.device) -> str | None:
    """Why the Gluon kernels of products cannot run on `device`, or None if they can, for products that they take."""
    capability = compute_capability(device)
    if capability != (9, 0):
        got = f"sm_{capability[0]}{capability[1]}" if device.type == "cuda" else device.type
        return f"the kernels are for Hopper GPUs (sm_90), got {got}"
    if not _compat.has_gluon():
        return "they need Gluon, which Triton has from 3.6 on (pip install -U triton)"
    return None


def pick(
    op: str, backend: Backend | str, reasons: dict[Backend, str | None], *, expected: Backend | None = None
) -> Backend:
    """Resolve a backend: `reasons` maps each candidate, best first, to why it cannot run, or None.

    expected: the backend that AUTO ought to reach on this device. Falling short of it warns with the reason, once for
        an operation: later reasons, a token count that changes each step for one, are left unsaid.
    Raises ValueError where a named backend cannot run.
    """
    backend = get_backend(backend)
    if backend is not Backend.AUTO:
        if backend not in reasons:
            have = ", ".join(b.value for b in reasons)
            raise ValueError(f"{op}: backend {backend} has no implementation; choose one of {have}, or auto")
        if reasons[backend] is not None:
            raise ValueError(f"{op}: backend {backend} cannot run: {reasons[backend]}; choose another, or auto")
        return backend
    chosen = next(b for b, reason in reasons.items() if reason is None)
    if expected is not None and chosen is not expected and reasons.get(expected) is not None:
        _warn_once(op, chosen, expected, reasons[expected])
    return chosen


_warned: set[tuple[str, Backend, Backend]] = set()


def _warn_once(op: str, chosen: Backend, expected: Backend, reason: str | None) -> None:
    if (op, chosen, expected) not in _warned:
        _warned.add((op, chosen, expected))
        warnings.warn(f"{op}: auto uses {chosen} instead of {expected}: {reason}", stacklevel=2)
