"""Gluon kernels of one partition in Triton's interpreter, for machines without a GPU.

The Python source of a kernel runs with another `gl`, which calls Triton's language: layouts mean nothing, shared memory
is an array, copies into it are done at once. Beyond it are barriers and what the compiler makes of the source.
"""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import interpreter


def _tensor(values: np.ndarray) -> tl.tensor:
    dtype = {np.dtype("i4"): tl.int32, np.dtype("f4"): tl.float32}[values.dtype]
    return tl.tensor(interpreter.TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))


def _array(x: tl.tensor) -> np.ndarray:
    return np.ascontiguousarray(x.handle.data)


class _Memory(NamedTuple):
    """A view of shared memory."""

    words: np.ndarray

    def load(self, layout) -> tl.tensor:
        return _tensor(self.words.copy())

    def store(self, values: tl.tensor) -> None:
        self.words[:] = _array(values)

    def slice(self, start: int, length: int, dim: int) -> _Memory:
        assert dim == 1
        return _Memory(self.words[:, start : start + length])


def _rounded(dtype: torch.dtype, *halves: np.ndarray) -> np.ndarray:
    return torch.stack([torch.from_numpy(x) for x in halves], -1).to(dtype).view(torch.int32)[..., 0].numpy()


_ASSEMBLY = {
    "max.u16x2 $0, $1, $2;": lambda a, b: np.maximum(a.view("u2"), b.view("u2")).view("i4"),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": functools.partial(_rounded, torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": functools.partial(_rounded, torch.float16),
}


def _reduce(x: tl.tensor, axis: int, combine) -> tl.tensor:
    return functools.reduce(combine, map(_tensor, np.moveaxis(_array(x), axis, 0)))


def _load_async(tile: _Memory, addresses, mask) -> None:
    tile.store(tl.load(addresses, mask=mask, other=0))


_LANGUAGE = types.SimpleNamespace(
    **{name: getattr(tl, name) for name in ("float32", "int16", "int32", "int64", "constexpr")},
    # Looked up at each call: the interpreter replaces them.
    **{
        name: lambda *args, name=name, **options: getattr(tl, name)(*args, **options)
        for name in ("cdiv", "join", "load", "max", "maximum", "program_id", "split", "store", "where")
    },
    allocate_shared_memory=lambda dtype, shape, layout: _Memory(np.full(shape, -1, "i4")),
    arange=lambda start, end, layout: tl.arange(start, end),
    convert_layout=lambda x, layout: x,
    inline_asm_elementwise=lambda asm, constraints, args, **_: _tensor(_ASSEMBLY[asm](*map(_array, args))),
    reduce=_reduce,
    static_range=range,
    SliceLayout=lambda dim, parent: None,
)
_NAMES = {
    "tl": tl,
    "gl": _LANGUAGE,
    "_load_async": _load_async,
    "async_copy": types.SimpleNamespace(commit_group=lambda: None, wait_group=lambda pending: None),
    "barrier": lambda: None,
}


@functools.cache
def _interpreted(plain) -> interpreter.InterpretedFunction:
    used = {name: plain.__globals__[name] for name in plain.__code__.co_names if name in plain.__globals__}
    space = {name: interpreted(x) if isinstance(x, GluonJITFunction) else x for name, x in used.items()} | _NAMES
    function = types.FunctionType(plain.__code__, space, plain.__name__, plain.__defaults__)
    function.__annotations__ = {
        name: "constexpr" for name, of in plain.__annotations__.items() if "constexpr" in str(of)
    }
    return triton.jit(function)


def interpreted(kernel: GluonJITFunction) -> interpreter.InterpretedFunction:
    """The kernel with all Gluon functions that it calls; launched as before."""
    return _interpreted(kernel.fn)
