"""Backends: the implementations of an operation, and how one is selected."""

from __future__ import annotations

import functools
import importlib
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

from torchao_blockwise import _compat
from torchao_blockwise._names import did_you_mean


class Backend(str, Enum):
    """Implementations of an operation. AUTO selects the fastest that can run. A named one runs or raises an error.

    REFERENCE: eager PyTorch on any device, which defines the correct bits. TRITON: GPUs, and CPUs with
    TRITON_INTERPRET=1. CUBLAS: cuBLASLt block scaling through `torch.nn.functional.scaled_mm`. GLUON: GEMMs for Hopper,
    and quantizers for Hopper and newer GPUs. DEEP_GEMM: the DeepGEMM library, if installed, for FP8 GEMMs on Hopper
    whose b has square blocks. CUTLASS: kernels in PyTorch through `torch.nn.functional.scaled_grouped_mm`, for GEMMs of
    experts in NVFP4 on Blackwell.
    """

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"
    CUBLAS = "cublas"
    GLUON = "gluon"
    DEEP_GEMM = "deep_gemm"
    CUTLASS = "cutlass"

    @classmethod
    def _missing_(cls, value: object) -> Backend | None:
        """Return a backend of `register_backend`, because pickles and copies look members up by value."""
        return BACKENDS.get(value)

    # Show the value in messages on every Python version.
    __str__ = str.__str__
    # The enum's own property runs Python code, 0.4 µs in every operation.
    value = property(operator.attrgetter("_value_"))


# Looking up an enum member by value takes 0.5 µs, and every operation does it several times.
BACKENDS = {backend.value: backend for backend in Backend}


def register_backend(name: str) -> Backend:
    """Register a new backend, for rows that a program adds to tables; raise ValueError if the name is taken."""
    if name in BACKENDS:
        raise ValueError(f"register_backend: {name} is already registered; choose another name")
    backend = str.__new__(Backend, name)
    backend._name_, backend._value_ = name.upper(), name
    BACKENDS[name] = backend
    return backend


def get_backend(backend: Backend | str | None) -> Backend:
    """Return the backend with this name, AUTO for None; raise ValueError for an unknown name."""
    if type(backend) is Backend:
        return backend
    if backend is None:
        return Backend.AUTO
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"unknown backend {backend!r}; the backends are {known}{did_you_mean(backend, BACKENDS)}")
    return BACKENDS[backend]


def casting_backend(backend: Backend | str | None) -> Backend:
    """Return the backend that quantizes and transposes for GEMMs on `backend`: most libraries have only GEMMs."""
    if type(backend) is not Backend:
        backend = get_backend(backend)
    return backend if backend is Backend.TRITON or backend is Backend.REFERENCE else Backend.AUTO


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1, read when kernels are imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return (major, minor) of a CUDA device, (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def architecture(device: torch.device) -> str:
    """Return the architecture of a CUDA device, such as sm_90, or the type of another device, for messages."""
    return "sm_{}{}".format(*compute_capability(device)) if device.type == "cuda" else device.type


def why_no_compiler() -> str | None:
    """Return why the installed Triton cannot build kernels, or None if it can."""
    return None if _compat.has_triton() else "triton is not installed (pip install triton)"


def why_no_triton(device: torch.device, min_capability: tuple[int, int] = (8, 0)) -> str | None:
    """Return why Triton kernels cannot run on `device`, or None if they can."""
    if not _compat.has_triton():
        return why_no_compiler()
    capability = compute_capability(device)
    # Read the environment last, and never on a capable GPU, because that takes 0.6 µs.
    if capability >= min_capability or interpreting():
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, got {device.type} (TRITON_INTERPRET=1 interprets them on a CPU)"
    return "the kernel needs sm_{}{} or newer, got {}".format(*min_capability, architecture(device))


def may_have_kernels(device: torch.device) -> bool:
    """Return False if `why_no_triton` has a reason that is known without querying a GPU; code may be traced."""
    return device.type != "cpu" or interpreting()


def why_no_gluon(device: torch.device) -> str | None:
    """Return why the Gluon kernels of GEMMs cannot run on `device`, or None if they can for supported GEMMs."""
    if compute_capability(device) != (9, 0):
        return f"the kernels are for Hopper GPUs (sm_90), got {architecture(device)}"
    return "Triton's interpreter does not support Gluon" if interpreting() else why_no_compiler()


class Implementation(NamedTuple):
    """A row of an operation's table of backends.

    run: a function of the operation's arguments except `backend`, or "module:function", which is imported when it is
        first selected, because kernels need Triton, which may not be installed.
    why_not: a function of the same arguments that returns why `run` cannot compute them, or None if it can. If it is
        None, `run` always can.
    on_cpu: whether AUTO considers it on a CPU without Triton's interpreter.
    """

    backend: Backend
    run: Callable[..., Any] | str
    why_not: Callable[..., str | None] | None = None
    on_cpu: bool = True

    def reason(self, args: Sequence[Any]) -> str | None:
        """Return why it cannot compute these arguments, or None if it can."""
        return None if self.why_not is None else self.why_not(*args)

    @property
    def function(self) -> Callable[..., Any]:
        if type(self.run) is not str:
            return self.run  # type: ignore[return-value]
        module, name = _place(self.run)
        return getattr(module, name)


def kernels(
    backend: Backend, run: Callable[..., Any] | str, why_not: Callable[..., str | None] | None = None
) -> Implementation:
    """Return a row of kernels for GPUs, by default of Triton kernels for all arguments."""
    return Implementation(backend, run, why_not or why_no_kernels, on_cpu=False)


def triton_and_reference(
    module: str, reference: Callable[..., Any], why_not: Callable[..., str | None] | None = None
) -> list[Implementation]:
    """Return a table with a reference, and a launcher of Triton kernels that has its name in `module`."""
    launcher = kernels(Backend.TRITON, f"{module}:{reference.__name__}", why_not)
    return [launcher, Implementation(Backend.REFERENCE, reference)]


@functools.cache
def _place(run: str) -> tuple[ModuleType, str]:
    module, name = run.split(":")
    return importlib.import_module(module), name


Choice = Callable[..., Backend | None]


def choose(
    op: str,
    table: Sequence[Implementation],
    backend: Backend,
    args: Sequence[Any],
    preferred_backend: Choice | None = None,
) -> Implementation:
    """Return the row of an operation's table that computes these arguments. A backend may have several rows.

    AUTO selects the first row that can run, starting with those of `preferred_backend(*args)` unless that is None. If
    the preferred backend (or Triton on a GPU) cannot run, it warns with the reason, once for each operation, so that a
    token count that changes in each step does not cause repeated warnings. On a CPU without Triton's interpreter,
    `preferred_backend` and kernels are not considered.
    Raises ValueError if a named backend cannot run.
    """
    if backend is not Backend.AUTO:
        named = [row for row in table if row.backend is backend]
        if not named:
            have = ", ".join(dict.fromkeys(row.backend.value for row in table))
            raise ValueError(f"{op}: backend {backend} has no implementation; choose one of {have}, or auto")
        for row in named:
            if (reason := row.reason(args)) is None:
                return row
        raise ValueError(f"{op}: backend {backend} cannot run: {reason}; choose another, or auto")
    x = first_tensor(args)
    on_cpu = isinstance(x, torch.Tensor) and not may_have_kernels(x.device)
    preferred = None if on_cpu or preferred_backend is None else preferred_backend(*args)
    passed: dict[Backend, str] = {}
    for row in table if preferred is None else ranked(table, preferred):
        if on_cpu and not row.on_cpu:
            continue
        reason = None if row.why_not is None else row.why_not(*args)
        if reason is not None:
            passed.setdefault(row.backend, reason)
            continue
        if passed:
            wanted = preferred or (Backend.TRITON if getattr(x, "is_cuda", False) else None)
            if wanted in passed and wanted is not row.backend and (op, row.backend, wanted) not in _warned:
                _warned.add((op, row.backend, wanted))
                warnings.warn(f"{op}: auto uses {row.backend} instead of {wanted}: {passed[wanted]}", stacklevel=2)
        return row
    # On a CPU, rows of kernels were skipped.
    reasons = passed or {row.backend: str(row.reason(args)) for row in table}
    raise ValueError(f"{op}: no backend can run: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


# (operation, backend used, backend wanted) of the warnings given.
_warned: set[tuple[str, Backend, Backend | None]] = set()


def ranked(table: Sequence[Implementation], preferred: Backend | None) -> Sequence[Implementation]:
    """Return the rows in the order in which AUTO considers them: those of `preferred` first."""
    if preferred is None or table[0].backend is preferred:
        return table
    return sorted(table, key=lambda row: row.backend is not preferred)


def why_no_kernels(*args: Any, min_capability: tuple[int, int] = (8, 0)) -> str | None:
    """Return why Triton kernels cannot compute these arguments of an operation, or None if they can."""
    x = first_tensor(args)
    return "there is nothing to compute" if x is None else why_no_triton(x.device, min_capability)


# For kernels that round to e4m3: GPUs below sm_89 have no hardware conversion.
why_no_encoders = functools.partial(why_no_kernels, min_capability=(8, 9))


def first_tensor(x: Any) -> torch.Tensor | None:
    """Return the first tensor of an operation's arguments, which begin with a tensor, an operand or a list of these."""
    while isinstance(x, (tuple, list)):
        if not x:
            return None
        x = x[0]
    return x
