"""The weights in a folder of files, plain or quantized, under the names that models use."""

from __future__ import annotations

import os
import re

import torch

from torchao_blockwise import ops
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.fused_layers import TENSOR_MAX
from torchao_blockwise.checkpoint.layouts import (
    COMPRESSED_TENSORS,
    FP8,
    FP8_UE8M0,
    MODELOPT,
    TAKE_PLAIN,
    Layout,
    why_not_read,
)
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, BlockFormat
from torchao_blockwise.ops.quantization.reference import expand_blocks
from torchao_blockwise.tensors import BlockwiseFP8Tensor, NVFP4Tensor, QuantizedTensor

# Formats that are read, told apart by names of tensors. compressed-tensors calls the scales of FP8 `weight_scale`.
_READ = (FP8, FP8_UE8M0, FP8._replace(suffixes=("", "_scale")), COMPRESSED_TENSORS, MODELOPT)
# Formats whose names nothing else uses, so that the dtype need not be checked.
_UNMISTAKABLE = (FP8, COMPRESSED_TENSORS)
# Dtypes as files spell them: of codes, of block scales, and all that are read.
_CODES = {FP8.format: "F8_E4M3", NVFP4_16X16: "U8"}
_SCALES = {FP8.format: ("F32", "BF16", "F16", "F8_E8M0"), NVFP4_16X16: ("F8_E4M3",)}
_DTYPES = re.compile(r"F64|F32|F16|BF16|F8_E4M3|F8_E8M0|[IU](8|16|32|64)|BOOL")
_COPY = "copy the file again"


class StoredWeights:
    """The weights in a folder, by the names that models use. A quantized weight is one entry for all of its tensors.

    names: the names of all weights. Call `check` for a weight before `read`.
    Raises FileNotFoundError for a folder without files, ValueError for files that cannot be read or have an unsupported
    format.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.files = Files(directory)
        config = self.files.config()
        if config and (reason := why_not_read(config)) is not None:
            raise ValueError(f"load: {self.files.path}: {reason}")
        # (layout, names of its tensors) of each quantized weight.
        self._quantized: dict[str, tuple[Layout, list[str]]] = {}
        for tensor in self.files.names():
            for layout in _READ:
                weight = tensor.removesuffix(layout.suffixes[0])
                names = layout.names(weight)
                has_scales = any(name in self.files for name in names[1:])
                has_codes = self.files.dtype(tensor) == _CODES[layout.format]
                if names[0] == tensor and has_scales and (has_codes or layout in _UNMISTAKABLE):
                    self._quantized[weight] = layout, names
                    break
        parts = {name for _, names in self._quantized.values() for name in names}
        self.names = self.files.names() - parts | self._quantized.keys()
        for name in self.names - self._quantized.keys():
            if self.files.dtype(name) == _CODES[FP8.format]:
                # `check` raises, since the scales are missing.
                self._quantized[name] = FP8, FP8.names(name)

    def format(self, name: str) -> BlockFormat | None:
        """Return the format of a quantized weight, None for a plain tensor."""
        return self._quantized[name][0].format if name in self._quantized else None

    def blocks(self, name: str) -> tuple[BlockFormat, float | None, bool] | None:
        """Return (format of the blocks, tensor scale, whether FP8 scales are powers of two), None for a plain tensor.

        The payload is not read.
        """
        if name not in self._quantized:
            return None
        layout, (_, scale_name, *factors) = self._quantized[name]
        scale = self.files.read(scale_name)
        if not factors:
            return layout.format, None, _are_powers_of_2(scale.float())
        fmt = layout.format if _in_squares(scale) is not None else NVFP4_1X16
        return fmt, self._decode_factor(name).item(), False

    def _decode_factor(self, name: str) -> torch.Tensor:
        """Return the tensor scale of an NVFP4 weight, which multiplies; f32 []."""
        layout, (*_, factor) = self._quantized[name]
        stored = self.files.read(factor)
        return (decode_factor(stored) if layout.has_reciprocal else stored).reshape(())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight's values."""
        if name not in self._quantized:
            return tuple(self.files.shape(name))
        layout, (payload, *_) = self._quantized[name]
        *rows, columns = self.files.shape(payload) or [0]
        return (*rows, columns * layout.format.element.per_byte)

    def check(self, name: str, shape: tuple[int, ...]) -> bool | None:
        """Raise ValueError unless the weight is complete, has this shape and valid scales.

        Returns whether the scales of an FP8 weight are powers of two (or zero); None for other weights.
        """
        files = self.files
        layout, names = self._quantized.get(name, (None, [name]))
        if not _DTYPES.fullmatch(dtype := files.dtype(names[0])):
            raise ValueError(f"load: {files.where(names[0])} is in {dtype}, which is not supported; {TAKE_PLAIN}")
        if layout is None:
            files.check_shape(name, shape)
            return None
        payload, scale_name, *factors = names
        dtypes = (_CODES[layout.format],), _SCALES[layout.format], ("F32",)
        if len(shape) < 2:
            raise ValueError(f"load: {files.where(payload)} has shape {list(shape)}, not a matrix; {_COPY}")
        for part, (_, wanted), read in zip(names, layout.described(name, shape).values(), dtypes):
            if part not in files:
                raise ValueError(f"load: {files.where(payload)} is in {dtype} and has no {part}; copy the files again")
            if files.dtype(part) not in read:
                raise ValueError(
                    f"load: {files.where(part)} is in {files.dtype(part)}, expected {' or '.join(read)}; {_COPY}"
                )
            # A tensor scale may have shape [] or [1].
            if part not in factors or files.shape(part) not in ([], [1]):
                files.check_shape(part, wanted)
        scale = files.read(scale_name).float()
        is_sound = bool((scale >= 0).logical_and(scale.isfinite()).all())
        if is_sound and layout.format is FP8.format and bool((is_zero := scale == 0).any()):
            codes = files.read(payload)
            # A code is zero if no bit except the sign is set.
            is_sound = not bool(
                (codes.view(torch.uint8) & 0x7F)[expand_blocks(is_zero, layout.format, *codes.shape[-2:])].any()
            )
        if not is_sound:
            raise ValueError(f"load: {files.where(scale_name)} has scales that are not positive numbers; {_COPY}")
        for factor in factors:
            value = files.read(factor)
            if not bool((value > 0).logical_and(value.isfinite()).all()):
                raise ValueError(f"load: {files.where(factor)} is {value.item()}, not a positive number; {_COPY}")
        return _are_powers_of_2(scale) if layout.format is FP8.format else None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a plain tensor unchanged, a quantized weight as a `QuantizedTensor` with values in `dtype`."""
        if name not in self._quantized:
            return self.files.read(name)
        _, names = self._quantized[name]
        qdata, scale = (self.files.read(part) for part in names[:2])
        if len(names) == 2:
            return _fp8_tensor(qdata, scale.float(), dtype)
        squares = _in_squares(scale)
        fmt, scale = (NVFP4_1X16, scale) if squares is None else (NVFP4_16X16, squares)
        columns = fmt.element.per_byte * qdata.shape[-1]
        return NVFP4Tensor(qdata, scale, self._decode_factor(name), columns, fmt.block, dtype)

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a plain tensor unchanged, a quantized weight decoded to `dtype`."""
        x = self.read(name, dtype)
        return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _are_powers_of_2(scale: torch.Tensor) -> bool:
    mantissas = scale.frexp().mantissa
    return bool(((mantissas == 0.5) | (mantissas == 0)).all())


def _fp8_tensor(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> BlockwiseFP8Tensor:
    powers_of_2 = _are_powers_of_2(scale)
    # Some tools store a scale of zero for a block of zeros.
    of_zeros = ops.quantize(scale.new_zeros(1, 1), FP8.format, power_of_2_scales=powers_of_2).rowwise
    assert of_zeros is not None
    return BlockwiseFP8Tensor(qdata, torch.where(scale == 0, of_zeros.scale, scale), dtype, powers_of_2)


def _in_squares(rows: torch.Tensor) -> torch.Tensor | None:
    """Return the scales of blocks of 16×16 if each 16 rows have equal scales e4m3 [.., N, K/16], else None."""
    codes, block = rows.view(torch.uint8), NVFP4_16X16.block[0]
    first = codes[..., ::block, :]
    if not torch.equal(first.repeat_interleave(block, -2)[..., : codes.shape[-2], :], codes):
        return None
    return first.contiguous().view(rows.dtype)


def decode_factor(stored: torch.Tensor) -> torch.Tensor:
    """Return the tensor scale amax / 2688 for a stored 2688 / amax.

    If possible it is a number whose reciprocal is exactly `stored`, so that it is written as it was read, and that
    follows from an amax. Such a number is at most one step from the rounded reciprocal, since it was rounded twice.
    """
    near = stored.reshape(()).reciprocal()
    around = [torch.nextafter(near, torch.full_like(near, bound)) for bound in (0.0, float("inf"))]
    candidates = torch.stack((near, *around))
    fits = candidates.reciprocal() == stored
    comes_back = candidates * TENSOR_MAX / TENSOR_MAX == candidates
    return torch.cat((candidates[fits & comes_back], candidates[fits], near[None]))[0]
