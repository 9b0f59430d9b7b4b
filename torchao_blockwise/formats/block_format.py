"""Block formats as data: block shape, element, scale dtype and the rule from amax to scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchao_blockwise.formats.elements import Element


class Scales(NamedTuple):
    """The result of scaling each block by its amax; shapes follow the grid of block amaxes.

    encode: fp32 factor by which a value is multiplied before it is rounded to an element.
    scale: stored block scale; x ≈ qdata · scale [· global_scale].
    global_scale: fp32 scalar, or None if the format has none.
    """

    encode: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled format as data. References are generic over it, and kernels read their constants from it.

    name: a unique name, by which operations refer to the format.
    block: (rows, columns) that share one scale; columns run along the contraction.
    compute_scales: (block_amax f32 grid, tensor_amax f32 scalar or None, power_of_2_scales) -> Scales.
    min_amax: smaller amaxes are raised to this value.
    scale_max: the largest block scale that can be stored, if the scale itself is quantized.
    transposed_scales: for one-row blocks, whether scales are stored as [column blocks, rows] instead of
        [rows, column blocks].
    has_global_scale: whether quantization needs the amax of the whole tensor.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale_dtype: torch.dtype
    compute_scales: Callable[[torch.Tensor, torch.Tensor | None, bool], Scales]
    min_amax: float = 0.0
    scale_max: float = float("inf")
    transposed_scales: bool = False
    has_global_scale: bool = False
    has_power_of_2_scales: bool = False

    def __repr__(self) -> str:
        return f"BlockFormat({self.name})"

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_square(self) -> bool:
        """Whether blocks are square, so that a columnwise copy is the exact transpose of the rowwise one."""
        return self.block[0] == self.block[1]

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of blocks along rows and columns: (⌈rows/R⌉, ⌈columns/C⌉)."""
        block_rows, block_columns = self.block
        return (rows + block_rows - 1) // block_rows, (columns + block_columns - 1) // block_columns

    def qdata_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the payload of a tensor [.., rows, columns]."""
        *batch, rows, columns = shape
        return (*batch, rows, self.element.packed(columns))

    def scale_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of the stored scales of a tensor [.., rows, columns]."""
        *batch, rows, columns = shape
        grid = self.grid(rows, columns)
        return (*batch, *(grid[::-1] if self.transposed_scales else grid))

    def new_empty(self, x: torch.Tensor, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uninitialized (payload, scales) for a tensor [.., rows, columns], on the device of `x`."""
        *batch, rows, columns = shape
        grid = self.grid(rows, columns)
        grid = grid[::-1] if self.transposed_scales else grid
        qdata = x.new_empty((*batch, rows, self.element.packed(columns)), dtype=self.element.storage_dtype)
        return qdata, x.new_empty((*batch, *grid), dtype=self.scale_dtype)

    def nbytes(self, *shape: int, scale_per_matrix: bool = False) -> int:
        """Return the bytes of a quantized tensor [.., rows, columns]: payload, scales, and the global scale if any.

        scale_per_matrix: whether each matrix [rows, columns] has a separate global scale.
        """
        payload = math.prod(self.qdata_shape(*shape)) * self.element.storage_dtype.itemsize
        scales = math.prod(self.scale_shape(*shape)) * self.scale_dtype.itemsize
        global_scales = math.prod(shape[:-2]) if scale_per_matrix else 1
        return payload + scales + (global_scales * torch.float32.itemsize if self.has_global_scale else 0)


FORMATS: dict[str, BlockFormat] = {}


def register_format(fmt: BlockFormat) -> BlockFormat:
    """Register `fmt` under its name; raise ValueError if the name is taken."""
    if fmt.name in FORMATS:
        raise ValueError(f"register_format: {fmt.name} is already registered; choose another name")
    FORMATS[fmt.name] = fmt
    return fmt


def get_format(fmt: BlockFormat | str) -> BlockFormat:
    """Return the registered format with this name; a BlockFormat must be registered as well."""
    name = fmt.name if isinstance(fmt, BlockFormat) else fmt
    if name not in FORMATS:
        raise ValueError(f"unknown block format {name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]
