"""Elements: the low-precision numbers that a block is made of, and how they lie in memory.

An element rounds to nearest even, saturates at ±max and keeps -0. `encode` takes values that were already multiplied
by the block's encode factor; `decode` gives back fp32 values before any scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

# What high-precision tensors can be: quantized from, multiplied to, or reported.
HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Element:
    """A low-precision number: its largest magnitude, its bits, and how payload stores it.

    name: how kernels and messages call it.
    max: largest finite magnitude.
    bits: bits an element takes; 4-bit elements lie two in a byte along the last dim, the even one in the low nibble.
    storage_dtype: dtype of the payload tensor.
    """

    name: str
    max: float
    bits: int
    storage_dtype: torch.dtype

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    def packed(self, columns: int) -> int:
        """Payload entries that hold `columns` elements: ⌈columns / per_byte⌉."""
        return (columns + self.per_byte - 1) // self.per_byte

    def unpack(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        """One code an entry [.., columns] of a payload [.., packed(columns)]."""
        if self.per_byte == 1:
            return qdata
        return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)[..., :columns]

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Contiguous payload [.., packed(K)] of codes [.., K] in new memory; an odd K leaves a zero nibble."""
        if self.per_byte == 1:
            return codes.clone(memory_format=torch.contiguous_format)
        codes = F.pad(codes.contiguous(), (0, codes.shape[-1] % 2))
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def has_nan(self, qdata: torch.Tensor) -> torch.Tensor:
        """Whether a code of the payload is NaN, bool []; the device is not waited for."""
        return torch.zeros((), dtype=torch.bool, device=qdata.device)

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        """Payload [.., packed(K)] of fp32 values `y` [.., K], rounded to nearest even, saturating."""
        raise NotImplementedError

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        """fp32 values [.., columns] of a payload [.., packed(columns)]."""
        raise NotImplementedError


class _E4M3(Element):
    """1 sign, 4 exponent, 3 mantissa bits, no infinity; NaN is 0x7f, or 0xff. Source: OCP 8-bit floating point spec."""

    def has_nan(self, qdata: torch.Tensor) -> torch.Tensor:
        return ((qdata.view(torch.uint8) & 0x7F) == 0x7F).any()

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        clamped = y.clamp(-self.max, self.max)
        # Hardware conversions give 0x7f for every NaN, whatever its sign.
        return clamped.masked_fill(y.isnan(), float("nan")).to(self.storage_dtype)

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        if qdata.is_cuda:
            return qdata.float()
        # On a CPU PyTorch converts one element at a time; looking them up is several times as fast.
        values = torch.arange(256, dtype=torch.uint8, device=qdata.device).view(self.storage_dtype).float()
        return _look_up(values, qdata.view(torch.uint8))


# Magnitudes by code 0..7; bit 3 of a code is the sign. Source: OCP Microscaling spec.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BIT = 8


def _e2m1_borders() -> list[float]:
    """The smallest fp32 magnitude of codes 1..7: midpoints, and ties go to the even code."""
    borders = []
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        # On the CPU, whatever the default device of the program that imports this.
        middle, above = torch.tensor([(low + high) / 2, high], device="cpu")
        tie_goes_down = code % 2 == 0
        borders.append((torch.nextafter(middle, above) if tie_goes_down else middle).item())
    return borders


_E2M1_BORDERS = _e2m1_borders()


class _E2M1(Element):
    """1 sign, 2 exponent, 1 mantissa bit; no NaN, no infinity. A NaN encodes as 0. Source: OCP Microscaling spec."""

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        return self._pack_largest_below(y.abs(), _E2M1_BORDERS, y)

    def encode_stochastically(self, y: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        """`encode`, but rounded up with the probability of the distance to the lower neighbor; NaN encodes as 0.

        random: uint8 in y's shape, u an element. With v = min(|y|, 6) and step(v) the distance of its neighbors,
        v + u/256 · step(v) is rounded down to a value of the grid: on the grid already, v stays.
        """
        v = y.abs().clamp(max=self.max)
        step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
        t = (v + random.float() / 256 * step).clamp(max=self.max)
        return self._pack_largest_below(t, E2M1_VALUES[1:], y)

    def _pack_largest_below(self, magnitude: torch.Tensor, borders: Sequence[float], y: torch.Tensor) -> torch.Tensor:
        """Codes that count the borders up to each magnitude, with the signs of `y`, packed; of a NaN 0."""
        code = (y.signbit() & ~y.isnan()).to(torch.uint8) * _SIGN_BIT
        # One comparison after the other: on a CPU `bucketize` takes ten times as long.
        for border in borders:
            code += magnitude >= border
        return self.pack(code)

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=qdata.device)
        return _look_up(values, self.unpack(qdata, columns))


def _look_up(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """values[codes]; `index_select` is far faster on a CPU than an index."""
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


E4M3 = _E4M3("e4m3", max=448.0, bits=8, storage_dtype=torch.float8_e4m3fn)
E2M1 = _E2M1("e2m1", max=6.0, bits=4, storage_dtype=torch.uint8)
