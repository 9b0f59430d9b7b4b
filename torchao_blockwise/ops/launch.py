"""Launching Triton kernels: the first launch of a build through Triton, every later one straight to the build.

Triton's own launcher binds, specialises and formats a key in Python on every call: 8 µs where this takes 3, and the
host is what small layers wait for. A build is found again by what Triton specialises it on:

    tensor      dtype; whether it starts on 16 bytes
    integer     whether it is 1, a multiple of 16, and how many bits it needs
    option      its value: constexprs, num_warps, ..

The key here is finer than Triton's where that is cheaper, so that two keys may lead to one build, never one to two.
"""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import _compat

# Every pointer and stride that Triton calls divisible is a multiple of this.
_ALIGNMENT_MASK = 15
_ONE = "one"

# (kernel, device, arguments, options) -> what launches the build
_builds: dict[tuple, Any] = {}


def launch(kernel, grid: int, *args: torch.Tensor | int | None, **options) -> None:
    """`kernel[(grid,)](*args, **options)` on the device of its tensors, on the current stream.

    args: what the kernel takes at run time: tensors, integers and None, in order; all constexprs come behind them.
    options: its constexprs, and how it is built (num_warps, num_stages, ..).
    """
    triton = _compat.triton_launching()
    if triton is None or triton.is_watched(kernel):
        return _launch_by_triton(kernel, grid, args, options)
    device = triton.current_device()
    # Addresses, which the launcher takes as they are: it asks the driver about each tensor that it is given.
    parts: list[Any] = [kernel.fn, device, *options, *options.values()]
    values: list[int | None] = []
    for arg in args:
        if type(arg) is int:
            parts.append(_ONE if arg == 1 else arg >> 31 << 4 | arg & _ALIGNMENT_MASK)
            values.append(arg)
        elif arg is None:
            parts.append(None)
            values.append(None)
        elif not isinstance(arg, torch.Tensor) or arg.get_device() != device:
            return _launch_by_triton(kernel, grid, args, options)
        else:
            address = arg.data_ptr()
            parts += (arg.dtype, address & _ALIGNMENT_MASK == 0)
            values.append(address)
    key = tuple(parts)
    build = _builds.get(key)
    if build is None:
        compiled = _launch_by_triton(kernel, grid, args, options)
        if compiled is not None:
            _builds[key] = triton.launcher_of(compiled, kernel, len(args))
        return None
    run, function, metadata, constexprs = build
    run(grid, 1, 1, triton.current_stream(device), function, metadata, None, None, None, *values, *constexprs)
    return None


def ceil_div(x: int, length: int) -> int:
    """⌈x / length⌉. On the host `triton.cdiv` takes 1.5 µs: it looks for constexprs first."""
    return -(-x // length)


def _launch_by_triton(kernel, grid: int, args, options):
    tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
    with torch.cuda.device_of(tensor):
        return kernel[(grid,)](*args, **options)
