"""The weights in a folder of files, plain or quantized, under the names that models use."""

from __future__ import annotations

import os
import re

import torch

from torchao_blockwise.checkpoint.files import Files, config_and_settings
from torchao_blockwise.checkpoint.layouts import (
    COMPRESSED_TENSORS,
    FP8,
    FP8_UE8M0,
    MODELOPT,
    TAKE_PLAIN,
    TENSOR_MAX,
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
# Dtypes as files spell them: of codes, block scales and tensor scale, and all that are read.
_DTYPES = {
    FP8.format: (("F8_E4M3",), ("F32", "BF16", "F16", "F8_E8M0")),
    NVFP4_16X16: (("U8",), ("F8_E4M3",), ("F32",)),
}
_READABLE = re.compile(r"F64|F32|F16|BF16|F8_E4M3|F8_E8M0|[IU](8|16|32|64)|BOOL")
_COPY = "copy the file again"


class StoredWeights:
    """The weights in a folder, by the names that models use. A quantized weight is one entry for all of its tensors.

    config: config.json without quantization settings.
    names: the names of all weights. Call `check` for a weight before `read`.
    has_power_of_2_scales: {name: whether all scales are powers of two, or zero} for FP8 weights that were checked.
    Raises FileNotFoundError for a folder without files, ValueError for files that cannot be read or have an unsupported
    format.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.files = Files(directory)
        self.config, settings = config_and_settings(self.files.path)
        if settings and (reason := why_not_read(settings)) is not None:
            raise ValueError(f"load: {self.files.path}: {reason}")
        self.has_power_of_2_scales: dict[str, bool] = {}
        # (layout, names of its tensors) of each quantized weight.
        self._quantized: dict[str, tuple[Layout, list[str]]] = {}
        tensors = self.files.tensors
        for tensor, stored in tensors.items():
            for layout in _READ:
                weight = tensor.removesuffix(layout.suffixes[0])
                names = layout.names(weight)
                is_payload = layout in _UNMISTAKABLE or stored.dtype in _DTYPES[layout.format][0]
                if is_payload and names[0] == tensor and not tensors.keys().isdisjoint(names[1:]):
                    self._quantized[weight] = layout, names
                    break
        parts = {name for _, names in self._quantized.values() for name in names}
        self.names = tensors.keys() - parts | self._quantized.keys()

    def format(self, name: str) -> BlockFormat | None:
        """Return the format of a quantized weight, None for a plain tensor."""
        return self._quantized[name][0].format if name in self._quantized else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight's values."""
        if name not in self._quantized:
            return tuple(self.files.tensors[name].shape)
        layout, (payload, *_) = self._quantized[name]
        *rows, columns = self.files.tensors[payload].shape or [0]
        return (*rows, columns * layout.format.element.per_byte)

    def is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the weight is stored with the last two dims of `shape` exchanged, in a format that permits it."""
        *outer, rows, columns = shape
        fmt = self.format(name)
        return self.shape(name) == (*outer, columns, rows) and not (fmt and fmt.has_global_scale)

    def check(self, name: str, shape: tuple[int, ...], wanted: torch.dtype | None = None) -> None:
        """Raise ValueError unless the weight is complete, has this shape and valid scales.

        wanted: the dtype of the model's tensor. Floating-point tensors do not take integers (codes of an unknown
            format), nor the reverse.
        """
        files, (layout, names) = self.files, self._quantized.get(name, (None, [name]))
        dtype, where = files.tensors[names[0]].dtype, files.where(names[0])
        if not _READABLE.fullmatch(dtype):
            raise ValueError(f"load: {where} is in {dtype}, which is not supported; {TAKE_PLAIN}")
        if layout is None and dtype in _DTYPES[FP8.format][0]:
            # The scales are missing, which raises.
            layout, names = FP8, FP8.names(name)
        if layout is not None and len(shape) < 2:
            raise ValueError(f"load: {where} has shape {list(shape)}, not a matrix; {_COPY}")
        is_integer = dtype.startswith(("I", "U", "BOOL"))
        if layout is None and wanted is not None and is_integer == wanted.is_floating_point:
            raise ValueError(
                f"load: {where} is in {dtype}, but the model needs {wanted}; use plain files of this model"
            )
        shapes = [shape] if layout is None else [x for _, x in layout.described(name, shape).values()]
        for i, (part, needed) in enumerate(zip(names, shapes)):
            if (stored := files.tensors.get(part)) is None:
                raise ValueError(f"load: {where} is in {dtype} and has no {part}; copy the files again")
            if layout is not None and stored.dtype not in (read := _DTYPES[layout.format][i]):
                raise ValueError(
                    f"load: {files.where(part)} is in {stored.dtype}, expected {' or '.join(read)}; {_COPY}"
                )
            # A tensor scale may have shape [] or [1].
            if stored.shape != list(needed) and (i < 2 or stored.shape not in ([], [1])):
                raise ValueError(
                    f"load: {files.where(part)} has shape {stored.shape}, but the model needs {list(needed)}; use "
                    f"files of this model, or {_COPY}"
                )
        if layout is not None:
            self._check_scales(name, layout, *names)

    def _check_scales(self, name: str, layout: Layout, payload: str, scale_name: str, *factors: str) -> None:
        """Raise ValueError for scales that are not positive numbers, unless an FP8 block is all zeros."""
        files = self.files
        scale = files.read(scale_name).float()
        is_sound = bool((scale >= 0).logical_and(scale.isfinite()).all())
        if layout.format is FP8.format:
            mantissas = scale.frexp().mantissa
            self.has_power_of_2_scales[name] = bool(((mantissas == 0.5) | (mantissas == 0)).all())
            if is_sound and bool((is_zero := scale == 0).any()):
                # A code is zero if no bit except the sign is set.
                codes = files.read(payload).view(torch.uint8) & 0x7F
                is_sound = not bool(codes[expand_blocks(is_zero, layout.format, *codes.shape[-2:])].any())
        if not is_sound:
            raise ValueError(f"load: {files.where(scale_name)} has scales that are not positive numbers; {_COPY}")
        for factor in factors:
            value = files.read(factor)
            if not bool((value > 0).logical_and(value.isfinite()).all()):
                raise ValueError(f"load: {files.where(factor)} is {value.item()}, not a positive number; {_COPY}")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a plain tensor unchanged, a quantized weight as a `QuantizedTensor` with values in `dtype`."""
        if name not in self._quantized:
            return self.files.read(name)
        layout, names = self._quantized[name]
        qdata, scale, *factors = map(self.files.read, names)
        if not factors:
            powers_of_2, scale = self.has_power_of_2_scales[name], scale.float()
            # Some tools store a scale of zero for a block of zeros.
            of_zeros = BlockwiseFP8Tensor.from_hp(scale.new_zeros(1, 1), power_of_2_scales=powers_of_2)
            return BlockwiseFP8Tensor(qdata, torch.where(scale == 0, of_zeros.scale, scale), dtype, powers_of_2)
        factor = (decode_factor(factors[0]) if layout.has_reciprocal else factors[0]).reshape(())
        fmt, codes, rows = NVFP4_1X16, scale.view(torch.uint8), NVFP4_16X16.block[0]
        first = codes[..., ::rows, :]
        if torch.equal(first.repeat_interleave(rows, -2)[..., : codes.shape[-2], :], codes):
            fmt, scale = NVFP4_16X16, first.contiguous().view(scale.dtype)
        return NVFP4Tensor(qdata, scale, factor, fmt.element.per_byte * qdata.shape[-1], fmt.block, dtype)

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Check a weight, and return it: a plain tensor unchanged, a quantized one decoded to `dtype`."""
        self.check(name, self.shape(name))
        x = self.read(name, dtype)
        return x.dequantize() if isinstance(x, QuantizedTensor) else x


def decode_factor(stored: torch.Tensor) -> torch.Tensor:
    """Return the tensor scale amax / 2688 for a stored 2688 / amax.

    If possible it is a number whose reciprocal is exactly `stored`, so that it is written as it was read, and that
    follows from an amax. Such a number is at most one step from the rounded reciprocal, since it was rounded twice.
    """
    near = stored.reshape(1).reciprocal()
    candidates = torch.cat((near, near.nextafter(torch.zeros_like(near)), near.nextafter(near.new_tensor([torch.inf]))))
    fits = candidates.reciprocal() == stored
    comes_back = candidates * TENSOR_MAX / TENSOR_MAX == candidates
    return torch.cat((candidates[fits & comes_back], candidates[fits], near))[0]
