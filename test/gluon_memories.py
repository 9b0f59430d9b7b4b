"""The memories of the Gluon simulator (`gluon_simulator.py`): tensors as the copy engine and as pointers see them,
shared memory, and the barriers in it."""

from __future__ import annotations

import threading
import types
from dataclasses import dataclass
from typing import ClassVar

import torch

_POISON = 0xFF  # NaN in e4m3, bf16 and f32


class SimulationError(AssertionError):
    """What would be a race, a deadlock or an access out of bounds on the hardware."""


@dataclass
class Descriptor:
    """Tiles of a matrix for the copy engine: zeros are read beside it, nothing is written there."""

    base: torch.Tensor
    block_shape: list[int]
    layout: object

    dtype = property(lambda self: self.base.dtype)

    @classmethod
    def of(cls, descriptor):
        """From Triton's TensorDescriptor, which checks alignment."""
        assert max(descriptor.block_shape) <= 256, "tiles of the copy engine have 256 rows and columns at most"
        base = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        return cls(base, list(descriptor.block_shape), descriptor.layout)

    def window(self, coordinates):
        """(slices of the matrix, slices of the tile) of what lies in the matrix."""
        starts = [int(c) for c in coordinates]
        if starts[-1] * self.base.itemsize % 16:
            raise SimulationError(
                f"the copy engine begins at multiples of 16 bytes, got column {starts[-1]}: an H200 stops"
            )
        inside, tile = [], []
        for start, size, block in zip(starts, self.base.shape, self.block_shape):
            first, last = max(start, 0), min(start + block, size)
            inside.append(slice(first, max(first, last)))
            tile.append(slice(first - start, max(first, last) - start))
        return tuple(inside), tuple(tile)


@dataclass
class Shared:
    """A view of shared memory."""

    data: torch.Tensor

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)

    def index(self, i):
        i = int(i)
        if not 0 <= i < self.data.shape[0]:
            raise SimulationError(f"index {i} of shared memory of shape {list(self.data.shape)}")
        return Shared(self.data[i])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def reshape(self, shape):
        assert len(shape) == 1
        return Shared(self.data.view(-1))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout):
        return Loaded(self.data) if self.data.dim() == 1 else self.data.clone()

    def store(self, value):
        self.data.copy_(value)

    def poison(self):
        self.data.view(torch.uint8).fill_(_POISON)

    def bytes(self):
        return self.data.contiguous().view(torch.uint8).clone()


class Loaded:
    """What a load of a vector from shared memory brings: read when first used, for a copy may overtake it until then.

    Loads of one thread come in order: with one, all before it.
    """

    _issued: ClassVar[dict[int, list[Loaded]]] = {}

    def __init__(self, source: torch.Tensor):
        self._source, self._value = source, None
        self._before = self._issued.setdefault(threading.get_ident(), [])
        self._before.append(self)

    def come(self) -> torch.Tensor:
        while self._value is None:
            oldest = self._before.pop(0)
            oldest._value = oldest._source.clone()
        return self._value

    def __getitem__(self, index):
        return self.come()[index]

    def __mul__(self, other):
        return self.come() * other


@dataclass
class Barrier:
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Barriers:
    barriers: list[Barrier]

    def index(self, i):
        return self.barriers[int(i)]


class Pointer:
    """Elements of a contiguous tensor; an access outside it is an error."""

    def __init__(self, base: torch.Tensor, offsets=0):
        self.base, self.offsets = base, offsets

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, offsets):
        return Pointer(self.base, self.offsets + offsets)

    def _index(self, mask):
        offsets = torch.as_tensor(self.offsets)
        mask = torch.as_tensor(True if mask is None else mask)
        offsets, mask = torch.broadcast_tensors(offsets, mask)
        wanted = offsets[mask]
        if wanted.numel() and (int(wanted.min()) < 0 or int(wanted.max()) >= self.base.numel()):
            raise SimulationError(f"access outside a tensor of {self.base.numel()} elements")
        return torch.where(mask, offsets, 0).long(), mask

    def load(self, mask, other):
        offsets, mask = self._index(mask)
        return torch.where(mask, self.base.flatten()[offsets], torch.as_tensor(other, dtype=self.base.dtype))

    def store(self, value, mask):
        offsets, mask = self._index(mask)
        self.base.view(-1)[offsets[mask]] = value.expand(offsets.shape)[mask]
