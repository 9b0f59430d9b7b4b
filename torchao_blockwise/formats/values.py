"""The values that layers, operations and kernels exchange. Only operations unpack them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchao_blockwise.formats.block_format import FORMATS, BlockFormat


class Operand(NamedTuple):
    """A tensor quantized block by block: x ≈ qdata · scale [· global_scale].

    qdata: payload [.., M, packed(K)], blocks along K. scale: the stored grid of block scales.
    global_scale: f32 scalar; f32 [..] with one for each matrix [M, K]; f32 [E] with one for each group of tokens, which
        can be decoded only with the groups; None if the format has none.
    format_name: the name of a registered format; a string, because compilers do not support arbitrary objects.
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
        """(qdata, scale, global_scale), the tensors that autograd can save."""
        return self.qdata, self.scale, self.global_scale


class Copies(NamedTuple):
    """The requested quantized copies of a tensor [.., M, K], or None for the others.

    rowwise: blocks along K. columnwise: the transpose, contiguous, [.., K, M], blocks along M.
    """

    # `Any`, so that callers need not check a requested copy for None.
    rowwise: Operand | Any
    columnwise: Operand | Any


class CastOptions(NamedTuple):
    """Options of operations that quantize: the copies to compute, their format and options.

    rowwise, columnwise: the copies to compute.
    power_of_2_scales: FP8 only; round the encode factor down to a power of two.
    padded: append zero rows to the tensor, up to a multiple of 32, before the columnwise copy is quantized. GEMMs of
        two such copies have the same result, and need no copy if the number of rows is not a multiple of 32.
    hadamard: NVFP4 only; the `formats.hadamard_number` of the transform that is applied before the columnwise copy is
        quantized, or 0. Its width is padded with zeros to chunks of 16 tokens, so `padded` does not apply.
    scale_per_group: NVFP4 only; compute a tensor scale for each group of tokens or, without groups, for each matrix
        [M, K] of a tensor [.., M, K]. Otherwise the whole tensor has one.
    columnwise_format_name: the format of the columnwise copy, if it is not `fmt`: "fp8_128x128" with FP8_1X128.
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
    """Groups of consecutive rows, one for the tokens of each expert, given by their ends.

    ends: int32 [E], cumulative, on the tokens' device: group g is rows [ends[g-1], ends[g]).
    tables: the positions of groups in the forms that kernels need; `ops.make_groups` computes them once for all
        operations on these tokens. Without them, each operation computes its own.
    """

    ends: torch.Tensor
    tables: torch.Tensor | None = None
