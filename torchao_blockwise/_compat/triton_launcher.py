"""Launch compiled kernels without Triton's Python launcher, with private names of Triton."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# Versions of Triton whose launchers' arguments are known.
_KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))


class Descriptor:
    """A matrix for Triton's encoder of tensor maps. Triton's own class checks its arguments, which takes time."""

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: torch.Tensor, shape: Sequence[int], strides: Sequence[int]):
        self.base, self.shape, self.strides = base, shape, strides


# Launches a compiled kernel: (grid, stream, a value for each run-time argument). Triton's function replaces each
# `Descriptor` among the values by a tensor map, shape and strides.
Launcher: TypeAlias = Callable[[int, int, Sequence[Any]], None]


class Launching:
    """The names of Triton that are needed to launch compiled kernels."""

    def __init__(self, version: tuple[int, ...]):
        from triton import knobs
        from triton.runtime import driver

        self._version, self._knobs = version, knobs.runtime
        self.current_device: Callable[[], int] = driver.active.get_current_device
        self.current_stream: Callable[[int], int] = driver.active.get_current_stream

    def is_watched(self, kernel: JITFunction) -> bool:
        """Whether hooks observe launches or builds of `kernel`, or Triton's debug mode is on."""
        knobs = self._knobs
        # A chain of hooks, or a hook, or None.
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        hooks = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks
        return bool(hooks or knobs.debug or knobs.add_stages_inspection_hook)

    def launcher_of(self, compiled: CompiledKernel, kernel: JITFunction, runtime_args: int) -> Launcher | None:
        """Return the launcher of a compiled kernel that takes `runtime_args` arguments before its constexprs.

        None if the kernel needs scratch memory or instrumentation, which Triton's own launcher sets up. Hooks do not
        run.
        """
        behind, launcher = kernel.params[runtime_args:], compiled.run
        needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
        if needs_memory or getattr(launcher, "gsan_enabled", False) or not all(p.is_constexpr for p in behind):
            _log_once(f"{kernel.__name__} needs scratch memory or instrumentation")
            return None
        options: tuple[Any, ...] = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
        no_hooks, scratch, launch = (None, None, None), (None, None), launcher.launch
        # The values of constexprs are ignored.
        constexprs = (None,) * len(behind)
        if self._version == (3, 6):
            before = *options, *scratch, compiled.packed_metadata, *no_hooks
            return lambda grid, stream, values: launch(grid, 1, 1, stream, *before, *values, *constexprs)
        about = launcher.arg_annotations, launcher.kernel_signature
        before = *options, compiled.packed_metadata, *no_hooks, *scratch, *about
        return lambda grid, stream, values: launch(grid, 1, 1, stream, *before, (*values, *constexprs))


# Kept until the process ends, when the folders are removed.
_temporary_caches: list[tempfile.TemporaryDirectory[str]] = []


def with_cache(build: Callable[[], _T]) -> _T:
    """Return `build()`, which may write compiled kernels; use a temporary folder if Triton's cache is read-only."""
    try:
        return build()
    except OSError as error:
        from triton import knobs

        folder, path = os.path.abspath(knobs.cache.dir), os.path.abspath(error.filename or os.devnull)
        if os.path.commonpath((path, folder)) not in (path, folder):
            # Another error, such as a missing compiler.
            raise
        _temporary_caches.append(tempfile.TemporaryDirectory(prefix="torchao_blockwise_", ignore_cleanup_errors=True))
        knobs.cache.dir = _temporary_caches[-1].name
        warnings.warn(
            f"Triton cannot cache kernels in {folder} ({error}), so this process caches them in {knobs.cache.dir}; set "
            "TRITON_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )
    return build()


@functools.cache
def why_by_triton() -> str | None:
    """Return why kernels are launched by Triton's own launcher, which has more host overhead, or None if not."""
    import triton

    if triton.knobs.runtime.interpret:
        return "Triton's interpreter runs kernels on the CPU"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in _KNOWN:
        known = ", ".join(".".join(map(str, numbers)) for numbers in _KNOWN)
        return f"Triton {triton.__version__} is not one of the versions whose launchers are known: {known}"
    target = with_cache(lambda: triton.runtime.driver.active.get_current_target())
    return None if target.backend == "cuda" else f"kernels are built for {target.backend}, not CUDA"


@functools.cache
def launching() -> Launching | None:
    """Return the names for launching compiled kernels, or None to use Triton's own launcher; logs the reason once."""
    import triton

    why = why_by_triton()
    if why is None:
        return Launching(tuple(int(part) for part in triton.__version__.split(".")[:2]))
    if not triton.knobs.runtime.interpret:
        _log_once(why)
    return None


@functools.cache
def _log_once(why: str) -> None:
    _log.warning("kernels are launched by Triton's own launcher, which has more host overhead: %s", why)
