"""Launch Triton kernels: the first launch of a build goes through Triton, all others directly to the build.

In each call, Triton's own launcher binds and specializes arguments and formats a key in Python, and encodes
descriptors. Small layers are limited by this host overhead. Here, a build is looked up by the properties that Triton
specializes it on:

    tensor      dtype; whether its address is a multiple of 16 bytes
    integer     whether it is 1 or a multiple of 16, and how many bits it needs
    descriptor  of a matrix that TMA copies in tiles: dtype; shape and layout of the tiles
    option      value: constexprs, num_warps, ..

Where it is cheaper, this key is finer than Triton's: two keys may share a build, but one key never has two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchao_blockwise._compat import triton_launcher

if TYPE_CHECKING:
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

# Builds differ by whether addresses and sizes are multiples of 16.
_ALIGNMENT_MASK = 15
# Of an integer: those that tell whether it is a multiple of 16, and whether it needs more than 32 bits.
_SPECIALIZED_BITS = ~0x7FFFFFF0

# (options, kernel, device, arguments) -> the launcher of the build
_builds: dict[tuple[Any, ...], triton_launcher.Launcher | None] = {}


class Tile:
    """A tile of `shape` with Gluon's `layout` in shared memory. Tiles are compared by identity."""

    __slots__ = ("layout", "shape")

    def __init__(self, shape: tuple[int, int], layout: Any):
        self.shape, self.layout = shape, layout


# A tensor; or (x, dtype) for `x.view(dtype)`, which would take 0.5 µs; or, for a Gluon kernel, (matrix, Tile) for the
# descriptor of a matrix that TMA copies in tiles; see `Descriptor`.
TensorArgument: TypeAlias = torch.Tensor | tuple[torch.Tensor, Tile | torch.dtype] | None


def launch(kernel: JITFunction[Any], grid: int, *args: TensorArgument | int, **options: Any) -> None:
    """`kernel[(grid,)](*args, **options)` on the device of its tensors, on the current stream.

    args: the kernel's run-time arguments, in order; all constexprs come after them.
    options: constexprs and build options (num_warps, num_stages, ..).
    """
    triton = triton_launcher.launching()
    if triton is None or triton.is_watched(kernel):
        _launch_by_triton(kernel, grid, args, options)
        return
    device = triton.current_device()
    # The key of the build, and the arguments of its launcher, with addresses instead of tensors.
    parts: list[Any] = [*options, *options.values(), kernel.fn, device]
    values: list[Any] = []
    arg: Any
    part: Any
    for arg in args:
        kind = type(arg)
        if kind is int:
            part = arg & _SPECIALIZED_BITS if arg != 1 else "1"
        elif arg is None:
            part = None
        else:
            x, form = arg if kind is tuple else (arg, arg.dtype)
            if x.get_device() != device:
                _launch_by_triton(kernel, grid, args, options)
                return
            if type(form) is Tile:
                part, arg = (x.dtype, form), triton_launcher.Descriptor(x)
            else:
                arg = x.data_ptr()
                part = (form,) if arg & _ALIGNMENT_MASK else form
        parts.append(part)
        values.append(arg)
    key = tuple(parts)
    build = _builds.get(key)
    if build is not None:
        build(grid, triton.current_stream(device), values)
        return
    compiled = _launch_by_triton(kernel, grid, args, options)
    if compiled is not None and key not in _builds:
        _builds[key] = triton.launcher_of(compiled, kernel, len(args))


def ceil_div(x: int, length: int) -> int:
    """⌈x / length⌉. On the host, `triton.cdiv` takes 1.5 µs, because it first checks for constexprs."""
    return -(-x // length)


def _in_form(x: torch.Tensor, form: Tile | torch.dtype) -> Any:
    """Return the argument (x, form) in the form that Triton's own launcher takes."""
    if not isinstance(form, Tile):
        return x.view(form)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    matrix = triton_launcher.Descriptor(x)
    return TensorDescriptor(x, list(matrix.shape), list(matrix.strides), list(form.shape), form.layout)


def _launch_by_triton(
    kernel: JITFunction[Any], grid: int, args: Iterable[Any], options: dict[str, Any]
) -> CompiledKernel | None:
    tensors = (arg[0] if type(arg) is tuple else arg for arg in args)
    tensor = next(x for x in tensors if isinstance(x, torch.Tensor))
    args = [_in_form(*arg) if type(arg) is tuple else arg for arg in args]
    with torch.cuda.device_of(tensor):
        return kernel[(grid,)](*args, **options)
