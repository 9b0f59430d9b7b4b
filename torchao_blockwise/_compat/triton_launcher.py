"""Launch compiled kernels without Triton's Python launcher, with private names of Triton."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

_SLOWER = "kernels are launched by Triton's own launcher, which has more host overhead: %s"
_log = logging.getLogger(__name__)

# Versions of Triton whose launchers' arguments are known.
_KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))


class Descriptor:
    """A matrix for Triton's encoder of tensor maps. Triton's own class checks its arguments, which takes time.

    base: contiguous, not empty; address and rows are multiples of 16 bytes. (The stride of a single row may not be.)
    """

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: torch.Tensor):
        shape = rows, columns = base.shape
        assert rows and columns and base.is_contiguous() and (base.data_ptr() | columns * base.itemsize) % 16 == 0
        self.base, self.shape, self.strides = base, shape, (columns, 1)


# Launches a compiled kernel: (grid, stream, a value for each run-time argument). Triton's function replaces each
# `Descriptor` among the values by a tensor map, shape and strides.
Launcher: TypeAlias = Callable[[int, int, Sequence[Any]], None]


class Launching:
    """The names of Triton that are needed to launch compiled kernels."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._knobs = knobs.runtime
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
            _log.warning(_SLOWER, f"{kernel.__name__} needs scratch memory or instrumentation")
            return None
        options: tuple[Any, ...] = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
        no_hooks, scratch, launch = (None, None, None), (None, None), launcher.launch
        # The values of constexprs are ignored.
        constexprs = (None,) * len(behind)
        if _version() == (3, 6):
            before = *options, *scratch, compiled.packed_metadata, *no_hooks
            return lambda grid, stream, values: launch(grid, 1, 1, stream, *before, *values, *constexprs)
        about = launcher.arg_annotations, launcher.kernel_signature
        before = *options, compiled.packed_metadata, *no_hooks, *scratch, *about
        return lambda grid, stream, values: launch(grid, 1, 1, stream, *before, (*values, *constexprs))


@functools.cache
def use_writable_cache() -> None:
    """Let Triton cache kernels in a temporary folder, with a warning, if it cannot write to its own folder."""
    from triton import knobs

    folder = knobs.cache.dir
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK):
            return
    knobs.cache.dir = tempfile.mkdtemp(prefix="torchao_blockwise_")
    atexit.register(shutil.rmtree, knobs.cache.dir, ignore_errors=True)
    warnings.warn(
        f"Triton cannot cache kernels in {folder}, so this process caches them in {knobs.cache.dir}; set "
        "TRITON_CACHE_DIR to a folder that can be written",
        stacklevel=2,
    )


@functools.cache
def why_by_triton() -> str | None:
    """Return why kernels are launched by Triton's own launcher, which has more host overhead, or None if not."""
    import triton

    if triton.knobs.runtime.interpret:
        return "Triton's interpreter runs kernels on the CPU"
    use_writable_cache()
    if _version() not in _KNOWN:
        known = ", ".join(".".join(map(str, numbers)) for numbers in _KNOWN)
        return f"Triton {triton.__version__} is not one of the versions whose launchers are known: {known}"
    target = triton.runtime.driver.active.get_current_target()
    return None if target.backend == "cuda" else f"kernels are built for {target.backend}, not CUDA"


@functools.cache
def launching() -> Launching | None:
    """Return the names for launching compiled kernels, or None to use Triton's own launcher; logs the reason once."""
    import triton

    why = why_by_triton()
    if why is not None and not triton.knobs.runtime.interpret:
        _log.warning(_SLOWER, why)
    return Launching() if why is None else None


def _version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
