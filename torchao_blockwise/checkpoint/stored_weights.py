"""The weights in a folder of files: plain tensors, and quantized ones as they are stored."""

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
from torchao_blockwise.tensors import BlockwiseFP8Tensor, NVFP4Tensor, QuantizedTensor
from torchao_blockwise.tensors.state_values import over_blocks

# Formats that are read, by the names that tell them apart. compressed-tensors calls the scales of FP8 `weight_scale`.
_READ = (FP8, FP8_UE8M0, FP8._replace(suffixes=("", "_scale")), COMPRESSED_TENSORS, MODELOPT)
# Names of nothing else, whatever dtype there is.
_UNMISTAKABLE = (FP8, COMPRESSED_TENSORS)
# As files call dtypes: codes; block scales of FP8 and of NVFP4; all that is read.
_CODES = {FP8.format: "F8_E4M3", NVFP4_16X16: "U8"}
_SCALES = {FP8.format: ("F32", "BF16", "F16", "F8_E8M0"), NVFP4_16X16: ("F8_E4M3",)}
_DTYPES = re.compile(r"F64|F32|F16|BF16|F8_E4M3|F8_E8M0|[IU](8|16|32|64)|BOOL")
_COPY = "copy the file again"


class StoredWeights:
    """The weights of a folder, by the names that models have; a quantized one is one, whatever tensors it is made of.

    names: of all of them. `check` a weight before you `read` it.
    Raises FileNotFoundError for a folder without files, ValueError for files that cannot be read or are of a format
    that is not.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.files = Files(directory)
        config = self.files.config()
        if config and (reason := why_not_read(config)) is not None:
            raise ValueError(f"load: {self.files.path}: {reason}")
        # (format, its tensors) of each quantized weight.
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
                # `check` says that the scales are missing.
                self._quantized[name] = FP8, FP8.names(name)

    def format(self, name: str) -> BlockFormat | None:
        """The format of a quantized weight; None of a plain tensor."""
        return self._quantized[name][0].format if name in self._quantized else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight's values."""
        if name not in self._quantized:
            return tuple(self.files.shape(name))
        layout, (payload, *_) = self._quantized[name]
        *rows, columns = self.files.shape(payload) or [0]
        return (*rows, columns * layout.format.element.per_byte)

    def check(self, name: str, shape: tuple[int, ...]) -> bool | None:
        """Raise ValueError unless the weight is there whole, has this shape, and scales that can be meant.

        Returns whether the scales of a weight in FP8 are powers of two, zeros aside; None for other weights.
        """
        files = self.files
        layout, names = self._quantized.get(name, (None, [name]))
        if not _DTYPES.fullmatch(dtype := files.dtype(names[0])):
            raise ValueError(f"load: {files.where(names[0])} is in {dtype}, which is not read; {TAKE_PLAIN}")
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
                    f"load: {files.where(part)} is in {files.dtype(part)}; {', '.join(read)} is read there; {_COPY}"
                )
            # A tensor scale has one element, with or without a dim.
            if part not in factors or files.shape(part) not in ([], [1]):
                files.check_shape(part, wanted)
        scale = files.read(scale_name).float()
        is_sound = bool((scale >= 0).logical_and(scale.isfinite()).all())
        if is_sound and layout.format is FP8.format and bool((is_zero := scale == 0).any()):
            codes = files.read(payload)
            # A code in such a block stands for zero unless it has other bits than the sign.
            is_sound = not bool(
                (codes.view(torch.uint8) & 0x7F)[over_blocks(is_zero, codes.shape, layout.format)].any()
            )
        if not is_sound:
            raise ValueError(f"load: {files.where(scale_name)} has scales that are no positive numbers; {_COPY}")
        for factor in factors:
            value = files.read(factor)
            if not bool((value > 0).logical_and(value.isfinite()).all()):
                raise ValueError(f"load: {files.where(factor)} is {value.item()}, no positive number; {_COPY}")
        return _are_powers_of_2(scale) if layout.format is FP8.format else None

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A plain tensor as it is, a quantized weight as a `QuantizedTensor` of values in `dtype`."""
        if name not in self._quantized:
            return self.files.read(name)
        layout, names = self._quantized[name]
        qdata, scale, *factor = (self.files.read(part) for part in names)
        if not factor:
            return _fp8_tensor(qdata, scale.float(), dtype)
        return _nvfp4_tensor(qdata, scale, decode_factor(*factor) if layout.has_reciprocal else factor[0], dtype)

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A plain tensor as it is, a quantized weight decoded to `dtype`."""
        x = self.read(name, dtype)
        return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _are_powers_of_2(scale: torch.Tensor) -> bool:
    mantissas = scale.frexp().mantissa
    return bool(((mantissas == 0.5) | (mantissas == 0)).all())


def _fp8_tensor(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> BlockwiseFP8Tensor:
    powers_of_2 = _are_powers_of_2(scale)
    # Some tools give a block of zeros no scale.
    of_zeros = ops.quantize(scale.new_zeros(1, 1), FP8.format, power_of_2_scales=powers_of_2).rowwise
    assert of_zeros is not None
    return BlockwiseFP8Tensor(qdata, torch.where(scale == 0, of_zeros.scale, scale), dtype, powers_of_2)


def _nvfp4_tensor(qdata: torch.Tensor, rows: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> NVFP4Tensor:
    """With the blocks of our weights where 16 rows have one scale, else with those of rows.

    rows: e4m3 [.., N, K/16]. factor: what it is multiplied by, f32 of one element.
    """
    codes, block = rows.view(torch.uint8), NVFP4_16X16.block[0]
    first = codes[..., ::block, :]
    square = torch.equal(first.repeat_interleave(block, -2)[..., : codes.shape[-2], :], codes)
    fmt, scale = (NVFP4_16X16, first.contiguous().view(rows.dtype)) if square else (NVFP4_1X16, rows)
    return NVFP4Tensor(qdata, scale, factor.reshape(()), fmt.element.per_byte * qdata.shape[-1], fmt.block, dtype)


def decode_factor(stored: torch.Tensor) -> torch.Tensor:
    """amax / 2688 of a stored 2688 / amax.

    Where one exists it is a number that has this very reciprocal, so that it is written as it was read, and that an
    amax leads to. Such a number lies next to the rounded reciprocal, as rounding twice moves by one step at most.
    """
    near = stored.reshape(()).reciprocal()
    around = [torch.nextafter(near, torch.full_like(near, bound)) for bound in (0.0, float("inf"))]
    candidates = torch.stack((near, *around))
    fits = candidates.reciprocal() == stored
    comes_back = candidates * TENSOR_MAX / TENSOR_MAX == candidates
    return torch.cat((candidates[fits & comes_back], candidates[fits], near[None]))[0]
