"""Elements: the low-precision numbers in a block, and how they are stored.

Elements round to nearest even, saturate at ±max and keep -0. `encode` takes values that were already multiplied by the
block's encode factor, and `decode` returns fp32 values without any scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

# The dtypes of tensors that can be quantized, of results of GEMMs, and those that quantized tensors can report.
HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Element:
    """A low-precision number format: its largest magnitude, its bits, and its storage.

    name: the name in kernels and messages.
    max: largest finite magnitude.
    bits: bits of an element. 4-bit elements are packed two in a byte along the last dim, even ones in the low nibble.
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
        """Return the number of payload entries for `columns` elements: ⌈columns / per_byte⌉."""
        # Not the property, which would be a second Python call.
        per_byte = 8 // self.bits
        return (columns + per_byte - 1) // per_byte

    def unpack(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        """Unpack a payload [.., packed(columns)] to one code an entry [.., columns]."""
        if self.per_byte == 1:
            return qdata
        return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)[..., :columns]

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes [.., K] to a new contiguous payload [.., packed(K)]; for an odd K the last nibble is zero."""
        if self.per_byte == 1:
            return codes.clone(memory_format=torch.contiguous_format)
        codes = F.pad(codes.contiguous(), (0, codes.shape[-1] % 2))
        return codes[..., 0::2] | (codes[..., 1::2] << 4)

    def has_nan(self, qdata: torch.Tensor) -> torch.Tensor:
        """Return whether a code of the payload is NaN, bool []; does not synchronize."""
        return torch.zeros((), dtype=torch.bool, device=qdata.device)

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        """Encode fp32 values `y` [.., K] to a payload [.., packed(K)], rounded to nearest even, saturating."""
        raise NotImplementedError

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        """Decode a payload [.., packed(columns)] to fp32 values [.., columns]."""
        raise NotImplementedError


class _E4M3(Element):
    """1 sign, 4 exponent, 3 mantissa bits, no infinity; NaN is 0x7f, or 0xff. Source: OCP 8-bit floating point spec."""

    def has_nan(self, qdata: torch.Tensor) -> torch.Tensor:
        return ((qdata.view(torch.uint8) & 0x7F) == 0x7F).any()

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        clamped = y.clamp(-self.max, self.max)
        # Hardware conversions return 0x7f for every NaN, whatever its sign.
        return clamped.masked_fill(y.isnan(), float("nan")).to(self.storage_dtype)

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        if qdata.is_cuda:
            return qdata.float()
        # On a CPU, PyTorch converts one element at a time; a lookup is several times faster.
        values = torch.arange(256, dtype=torch.uint8, device=qdata.device).view(self.storage_dtype).float()
        return _look_up(values, qdata.view(torch.uint8))


# Magnitudes by code 0..7; bit 3 of a code is the sign. Source: OCP Microscaling spec.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN_BIT = 8
_E2M1_MIDDLES = [(low + high) / 2 for low, high in pairwise(E2M1_VALUES)]


class _E2M1(Element):
    """1 sign, 2 exponent, 1 mantissa bit; no NaN, no infinity. A NaN encodes as 0. Source: OCP Microscaling spec."""

    def encode(self, y: torch.Tensor) -> torch.Tensor:
        magnitude = y.abs()
        # Ties go to the even code.
        above = (magnitude >= m if code % 2 else magnitude > m for code, m in enumerate(_E2M1_MIDDLES))
        return self._pack_count(above, y)

    def encode_stochastically(self, y: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        """Encode, rounding up with a probability proportional to the distance to the lower neighbor; NaN becomes 0.

        random: uint8 u in y's shape. With v = min(|y|, 6) and step(v) the distance between its neighbors,
        v + u/256 · step(v) is rounded down to a representable value. A representable v does not change.
        """
        v = y.abs().clamp(max=self.max)
        step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0)).float()
        t = (v + random.float() / 256 * step).clamp(max=self.max)
        return self._pack_count((t >= value for value in E2M1_VALUES[1:]), y)

    def _pack_count(self, above: Iterable[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        """Return packed codes, the number of borders that are below each magnitude with the sign of `y`; 0 for NaN."""
        code = (y.signbit() & ~y.isnan()).to(torch.uint8) * _SIGN_BIT
        # A loop of comparisons: on a CPU, `bucketize` takes ten times as long.
        for is_above in above:
            code += is_above
        return self.pack(code)

    def decode(self, qdata: torch.Tensor, columns: int) -> torch.Tensor:
        positive = constant(E2M1_VALUES, torch.float32, qdata.device)
        return _look_up(torch.cat((positive, -positive)), self.unpack(qdata, columns))


def constant(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a vector, filled on the device: a CUDA graph cannot capture the copy that `torch.tensor` makes."""
    return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])


def _look_up(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return values[codes], with `index_select` because it is much faster than indexing on a CPU."""
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


E4M3 = _E4M3("e4m3", max=448.0, bits=8, storage_dtype=torch.float8_e4m3fn)
E2M1 = _E2M1("e2m1", max=6.0, bits=4, storage_dtype=torch.uint8)
