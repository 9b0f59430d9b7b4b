"""Launching what Triton has built without Triton's Python: names that it does not promise to keep, here alone."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch

if TYPE_CHECKING:
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

_T = TypeVar("_T")

# Versions whose launchers are known, by what they take.
_KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))


# (shape of a matrix, its strides, the matrix) -> what stands in the place of its descriptor.
Encoder: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.Tensor], tuple[Any, ...]]


class Launcher(NamedTuple):
    """What launches a build: launch(grid, 1, 1, stream, *before, *values, *last), a value a run-time argument.

    name: of the kernel. launch: Triton's extension in C. packs: whether the values and `last` are one tuple.
    encoders: for each argument that is a descriptor a function (shape, strides, x), which gives the values that stand
        in its place: what the copy engine is told of the matrix `x` (a tensor map), shape and strides.
    """

    name: str
    launch: Callable[..., None]
    before: tuple[Any, ...]
    last: tuple[None, ...]
    packs: bool
    encoders: tuple[Encoder, ...]

    def run(self, grid: int, stream: int, values: Iterable[Any]) -> None:
        """Launch."""
        arguments = (*values, *self.last)
        self.launch(grid, 1, 1, stream, *self.before, *((arguments,) if self.packs else arguments))


class _Descriptor:
    """What is read of a descriptor when it is encoded. Triton's own checks its arguments, which takes longer."""

    __slots__ = ("base", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, base: torch.Tensor, shape: Sequence[int], strides: Sequence[int]):
        self.base, self.shape, self.strides = base, shape, strides


class Launching:
    """What a launch of a compiled kernel needs from Triton."""

    def __init__(self, version: tuple[int, ...]):
        from triton import knobs
        from triton.runtime import driver

        self._version, self._knobs = version, knobs.runtime
        self.current_device: Callable[[], int] = driver.active.get_current_device
        self.current_stream: Callable[[int], int] = driver.active.get_current_stream

    def is_watched(self, kernel: JITFunction) -> bool:
        """Whether hooks want to see launches or builds of `kernel`, or builds are to be debugged."""
        knobs = self._knobs
        return bool(self.has_hooks() or knobs.debug or knobs.add_stages_inspection_hook or kernel.pre_run_hooks)

    def has_hooks(self) -> bool:
        """Whether hooks want to see all launches."""
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        # A chain of hooks, or a hook, or None.
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def launcher_of(self, compiled: CompiledKernel, kernel: JITFunction, runtime_args: int) -> Launcher | None:
        """How to launch a compiled kernel that takes `runtime_args` before its constexprs; None where not by hand.

        No hooks run. Descriptors are encoded by Triton's own function, which looks at no layouts and checks nothing.
        """
        behind, launcher = kernel.params[runtime_args:], compiled.run
        needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
        if needs_memory or getattr(launcher, "gsan_enabled", False) or not all(p.is_constexpr for p in behind):
            return None
        descriptions = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        launch = launcher.launch
        if descriptions:
            # Triton's wrapper encodes each descriptor and calls this.
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
        if launch is None or not all(descriptions):
            return None
        options: tuple[Any, ...] = launcher.launch_cooperative_grid, launcher.launch_pdl
        nobody, scratch = (None, None, None), (None, None)
        packs = self._version != (3, 6)
        if packs:
            about = launcher.arg_annotations, launcher.kernel_signature
            before = *options, compiled.packed_metadata, *nobody, *scratch, *about
        else:
            before = *options, *scratch, compiled.packed_metadata, *nobody
        # Values of constexprs are not read.
        last, encoders = (None,) * len(behind), tuple(self._encoder(description) for description in descriptions)
        return Launcher(kernel.__name__, launch, (compiled.function, *before), last, packs, encoders)

    def _encoder(self, description: dict[str, Any]) -> Encoder:
        from triton.backends.nvidia import driver

        encode, more = driver.make_tensordesc_arg, (None,) if self._version >= (3, 8) else ()
        return lambda shape, strides, x: tuple(encode(_Descriptor(x, shape, strides), description, *more))


# Kept until the process ends, when it is removed.
_temporary_caches: list[tempfile.TemporaryDirectory[str]] = []


def with_cache(build: Callable[[], _T]) -> _T:
    """`build()`, which may write what Triton builds; where its cache folder cannot be written, into a temporary one."""
    try:
        return build()
    except OSError as error:
        from triton import knobs

        folder, path = os.path.abspath(knobs.cache.dir), os.path.abspath(error.filename or os.devnull)
        if os.path.commonpath((path, folder)) not in (path, folder):
            # A compiler that is missing, or the like.
            raise
        _temporary_caches.append(tempfile.TemporaryDirectory(prefix="torchao_blockwise_", ignore_cleanup_errors=True))
        knobs.cache.dir = _temporary_caches[-1].name
        warnings.warn(
            f"Triton cannot keep kernels in {folder} ({error}); this process keeps them in {knobs.cache.dir}; set "
            "TRITON_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )
    return build()


@functools.cache
def launching() -> Launching | None:
    """How compiled kernels are launched without Triton's Python launcher; None where that is not known to work."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in _KNOWN or triton.knobs.runtime.interpret:
        return None
    target = with_cache(lambda: triton.runtime.driver.active.get_current_target())
    return Launching(version) if target.backend == "cuda" else None
