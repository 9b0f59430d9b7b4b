"""Launching Triton kernels: the first launch of a build through Triton, every later one straight to the build.

Triton's own launcher binds, specialises and formats a key in Python on every call: 8 µs where this takes 3, and 30 µs
more for kernels that take descriptors. The host is what small layers wait for. A build is found again by what Triton
specialises it on:

    tensor      dtype; whether it starts on 16 bytes
    integer     whether it is 1, a multiple of 16, and how many bits it needs
    matrix      of tiles for the copy engine: dtype; the tile's shape and layout
    option      its value: constexprs, num_warps, ..

The key here is finer than Triton's where that is cheaper, so that two keys may lead to one build, never one to two.

What the copy engine is told about a matrix (a tensor map) depends on its address, shape and strides, and on the build.
Memory is given out again at the same addresses step by step, so maps are kept by just these; a map that is kept too
long is right all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from torchao_blockwise._compat import triton_launcher
from torchao_blockwise.ops.recording import NOT_BUILT, Matrix, recorder

# Every pointer and stride that Triton calls divisible is a multiple of this.
_ALIGNMENT_MASK = 15
_ONE = "one"
# Some 10 MB. Where shapes never come again, maps that are kept must not grow without end.
_MAX_MAPS = 1 << 14

# (options, kernel, device, arguments) -> what launches the build
_builds: dict[tuple, Any] = {}
# (kinds of numbers, options) -> what stands for them in keys
_parts: dict[tuple, object] = {}
# (encoder of a build's descriptor, address, shape, strides) -> the arguments that stand in the descriptor's place
_maps: dict[tuple, tuple] = {}


class Tile:
    """A tile of `shape` that lies in shared memory as Gluon's `layout` says. Told apart from others by identity."""

    __slots__ = ("layout", "shape")

    def __init__(self, shape: tuple[int, int], layout):
        self.shape, self.layout = shape, layout


# A tensor; or (x, dtype) for `x.view(dtype)`, which would take 0.5 µs; or, for a Gluon kernel, (matrix, Tile) for a
# descriptor of what the copy engine (TMA) moves in tiles. That matrix is not empty, elements of a row lie side by side,
# rows begin on 16 bytes.
TensorArgument: TypeAlias = torch.Tensor | tuple[torch.Tensor, Tile | torch.dtype] | None


def launch(kernel, grid: int, *args: TensorArgument | int, **options) -> None:
    """`kernel[(grid,)](*args, **options)` on the device of its tensors, on the current stream.

    args: what the kernel takes at run time, in order; all constexprs come behind them.
    options: its constexprs, and how it is built (num_warps, num_stages, ..).
    """
    _launch(kernel, grid, args, (), options, [*options, *options.values()])


class Launch:
    """`launch` of which everything but tensors is settled: `Launch(grid, *numbers, **options)(kernel, *tensors)`.

    For launches that recur, to be kept by what settles them: what numbers and options add to a key is one object. The
    kernel takes its tensors first, then numbers, then constexprs.
    """

    __slots__ = ("_part", "grid", "numbers", "options")

    def __init__(self, grid: int, *numbers: int | None, **options):
        self.grid, self.numbers, self.options = grid, numbers, options
        settled = tuple(map(_kind_of, numbers)), tuple(options.items())
        # The same object for numbers that Triton tells apart no further.
        self._part = _parts.setdefault(settled, object())

    def __call__(self, kernel, *tensors: TensorArgument) -> None:
        _launch(kernel, self.grid, tensors, self.numbers, self.options, [self._part])


def ceil_div(x: int, length: int) -> int:
    """⌈x / length⌉. On the host `triton.cdiv` takes 1.5 µs: it looks for constexprs first."""
    return -(-x // length)


def _kind_of(number: int | None) -> int | str | None:
    """What Triton specialises a build on."""
    return _ONE if number == 1 else None if number is None else number >> 31 << 4 | number & _ALIGNMENT_MASK


def _launch(kernel, grid: int, args: tuple, more: tuple, options: dict, parts: list) -> None:
    """Launch with arguments `args` and `more`; the build's key are `parts` and what these, device and kernel add."""
    triton = triton_launcher.launching()
    if triton is None or triton.is_watched(kernel):
        return _launch_by_triton(kernel, grid, (*args, *more), options)
    device = triton.current_device()
    parts += (kernel.fn, device)
    # Addresses, which the launcher takes as they are: it asks the driver about each tensor that it is given.
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is tuple:
            x, form = arg
            if x.get_device() != device:
                return _launch_by_triton(kernel, grid, (*args, *more), options)
            if type(form) is Tile:
                parts += (x.dtype, form)
                values.append(x)
            else:
                address = x.data_ptr()
                parts += (form, address & _ALIGNMENT_MASK == 0)
                values.append(address)
        elif kind is int:
            parts.append(_kind_of(arg))
            values.append(arg)
        elif arg is None:
            parts.append(None)
            values.append(None)
        elif not isinstance(arg, torch.Tensor) or arg.get_device() != device:
            return _launch_by_triton(kernel, grid, (*args, *more), options)
        else:
            address = arg.data_ptr()
            parts += (arg.dtype, address & _ALIGNMENT_MASK == 0)
            values.append(address)
    key = tuple(parts)
    build = _builds.get(key)
    if build is None:
        why = "launches through Triton" if key in _builds else NOT_BUILT
        compiled = _launch_by_triton(kernel, grid, (*args, *more), options, why)
        if compiled is not None:
            _builds[key] = triton.launcher_of(compiled, kernel, len(args) + len(more))
        return None
    seen = recorder()
    if seen is not None:
        seen.launched(triton, build.run, grid, (*_as_recorded(args, build.encoders), *more))
    if build.encoders:
        values = _encoded(values, build.encoders)
    build.run(grid, triton.current_stream(device), (*values, *more))
    return None


def _encoded(values: list, encoders: tuple) -> list:
    """`values` with matrices as the launcher takes them."""
    encoded: list[Any] = []
    following = iter(encoders)
    for x in values:
        if not isinstance(x, torch.Tensor):
            encoded.append(x)
            continue
        encoder = next(following)
        key = (encoder, x.data_ptr(), x.shape, x.stride())
        arguments = _maps.get(key)
        if arguments is None:
            if len(_maps) >= _MAX_MAPS:
                _maps.clear()
            arguments = _maps[key] = encoder(x, x.shape, _strides(x))
        encoded += arguments
    return encoded


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides of the matrix `x` as the copy engine is told of them."""
    rows, columns = x.shape
    stride = x.stride(0)
    if rows == 1:
        # Of a lone row it may be anything, and the copy engine wants whole 16 bytes.
        stride = ((columns * x.itemsize | _ALIGNMENT_MASK) + 1) // x.itemsize
    assert rows > 0 and columns > 0 and (columns == 1 or x.stride(1) == 1)
    assert (x.data_ptr() | stride * x.itemsize) & _ALIGNMENT_MASK == 0
    return stride, 1


def _in_form(x: torch.Tensor, form: Tile | torch.dtype):
    """What Triton itself takes for (x, form)."""
    if not isinstance(form, Tile):
        return x.view(form)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(_strides(x)), list(form.shape), form.layout)


def _as_recorded(args, encoders: tuple) -> Iterator[Any]:
    following = iter(encoders)
    for arg in args:
        x, form = arg if type(arg) is tuple else (arg, None)
        if type(form) is Tile:
            yield Matrix(x, functools.partial(next(following), shape=x.shape, strides=_strides(x)))
        else:
            yield x


def _launch_by_triton(kernel, grid: int, args, options, why: str = "launches through Triton"):
    seen = recorder()
    if seen is not None:
        seen.refuse(why)
    tensors = (arg[0] if type(arg) is tuple else arg for arg in args)
    tensor = next(x for x in tensors if isinstance(x, torch.Tensor))
    args = [_in_form(*arg) if type(arg) is tuple else arg for arg in args]
    with torch.cuda.device_of(tensor):
        return triton_launcher.with_cache(lambda: kernel[(grid,)](*args, **options))
