"""The values that travel between layers, operations and kernels: operations take them apart, and nobody else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchao_blockwise.formats.block_format import FORMATS, BlockFormat


class Operand(NamedTuple):
    """A tensor quantized block by block: x ≈ qdata · scale [· global_scale].

    qdata: payload [.., M, packed(K)], blocks along K. scale: the stored grid of block scales.
    global_scale: f32 scalar; with a scale for each matrix [M, K] f32 [..], for each group of tokens f32 [E], which only
        who has the groups can decode; None where the format has none.
    format_name: which registered format it is; a string, because compilers know strings and no other objects.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    format_name: str

    @property
    def format(self) -> BlockFormat:
        return FORMATS[self.format_name]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(qdata, scale, global_scale): what autograd can save."""
        return self.qdata, self.scale, self.global_scale


class Copies(NamedTuple):
    """The quantized copies of a tensor [.., M, K] that one read makes, those that were asked for.

    rowwise: blocks along K. columnwise: the transpose, contiguous, [.., K, M], blocks along M.
    """

    # Whoever asked for a copy has it, and need not look for None, which `Any` stands for.
    rowwise: Operand | Any
    columnwise: Operand | Any


class CastOptions(NamedTuple):
    """Options of an operation that quantizes: which copies, in which format, and how.

    rowwise, columnwise: which of `Copies`.
    power_of_2_scales: FP8 only; rounds the encode factor down to a power of two.
    padded: the columnwise copy is that of the tensor with zero rows behind, up to a multiple of 32: for GEMMs of two
        such copies, to which they add nothing. Without it, rows that are no such multiple cost a copy.
    hadamard: NVFP4 only; the columnwise copy is that of the transform which `formats.hadamard_number` gives the number
        of; 0 for none. It is whole chunks of 16 tokens wide, the last one filled with zeros, and so is not `padded`.
    scale_per_group: NVFP4 only; each group of tokens has its tensor scale, and so has, without groups, each
        matrix [M, K] of a tensor [.., M, K]. Else the whole tensor has one.
    columnwise_format_name: the format of the columnwise copy, if it is not `fmt`: "fp8_128x128" next to FP8_1X128.
    """

    fmt: BlockFormat
    rowwise: bool = True
    columnwise: bool = False
    power_of_2_scales: bool = False
    padded: bool = False
    hadamard: int = 0
    scale_per_group: bool = False
    columnwise_format_name: str = ""

    @property
    def columnwise_format(self) -> BlockFormat:
        return FORMATS[self.columnwise_format_name] if self.columnwise_format_name else self.fmt


class Groups(NamedTuple):
    """Tokens of experts: consecutive rows that belong to one expert each, known by where they end.

    ends: int32 [E], cumulative, on the tokens' device: group g is rows [ends[g-1], ends[g]).
    tables: where groups lie, in the forms that kernels ask for, as `ops.make_groups` makes them once for all operations
        on these tokens; without them each operation makes its own.
    """

    ends: torch.Tensor
    tables: torch.Tensor | None = None
