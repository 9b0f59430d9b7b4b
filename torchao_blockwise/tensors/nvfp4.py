"""NVFP4Tensor: packed e2m1 payload, e4m3 block scales, one fp32 scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import Self

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, BlockFormat
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.quantized import QuantizedTensor

_FORMATS: dict[tuple[int, ...], BlockFormat] = {fmt.block: fmt for fmt in (NVFP4_16X16, NVFP4_1X16)}


class NVFP4Tensor(QuantizedTensor):
    """A tensor [.., N, K] stored in blocks of e2m1: x ≈ qdata · scale · global_scale, 4.03 bits per element at 16×16.

    qdata: [.., N, ⌈K/2⌉] uint8, the even element in the low nibble.
    global_scale: f32 scalar, or f32 [..] if each matrix [N, K] (expert) has a separate one.
    scale: e4m3 [.., ⌈N/16⌉, ⌈K/16⌉] for block_size (16, 16), [.., N, ⌈K/16⌉] for (1, 16).
    columns: K. It may be odd, so the payload does not determine it.
    config: how a layer with this weight trains; None for the defaults of `NVFP4TrainingConfig`, but without Hadamard
        transform and stochastic rounding.
    rounding_key: the key of stochastic rounding; see `tensors.rounding`.

    Create one with `from_hp`. With block_size (16, 16), it can be the weight of any `nn.Linear`.
    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
    """

    tensor_data_names = ["qdata", "scale", "global_scale"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["columns", "block_size", "dtype", "config"]  # noqa: RUF012
    optional_tensor_data_names = ["rounding_key"]  # noqa: RUF012

    global_scale: torch.Tensor
    columns: int
    block_size: tuple[int, int]

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        global_scale: torch.Tensor,
        columns: int,
        block_size: tuple[int, int],
        dtype: torch.dtype,
        config: TrainingConfig | None = None,
        rounding_key: torch.Tensor | None = None,
    ) -> Self:
        fmt = _format_of(cls.__name__, block_size)
        shape = (*qdata.shape[:-1], columns)
        # If rows are not adjacent, the strides must show it, because `contiguous()` checks nothing else.
        apart = None if qdata.is_contiguous() else (*(fmt.element.per_byte * s for s in qdata.stride()[:-1]), 1)
        x = _compat.make_wrapper(cls, qdata, shape, apart, dtype=dtype)
        x.columns, x.block_size = columns, fmt.block
        if rounding_key is not None:
            x.rounding_key = rounding_key
        x._set_parts(qdata, scale, global_scale, config)
        return x

    @classmethod
    def from_hp(
        cls,
        w: torch.Tensor,
        *,
        block_size: tuple[int, int] = (16, 16),
        scale_per_expert: bool | None = None,
        config: TrainingConfig | None = None,
    ) -> NVFP4Tensor:
        """Quantize `w` [.., N, K] bf16 | f16 | f32 in blocks of (16, 16) or (1, 16).

        scale_per_expert: compute a tensor scale for each matrix [N, K], global_scale [..]. None (default) uses the
            option of `config`, or False without a config.
        Raises TypeError for another dtype, ValueError for a block size that does not exist or fewer than 2 dims.
        """
        fmt = _format_of(f"{cls.__name__}.from_hp", block_size)
        if scale_per_expert is None:
            scale_per_expert = config is not None and config.scale_per_expert
        q = ops.quantize(w.detach(), fmt, scale_per_group=scale_per_expert).rowwise
        assert q.global_scale is not None
        return cls(q.qdata, q.scale, q.global_scale, w.shape[-1], fmt.block, w.dtype, config)

    @property
    def fmt(self) -> BlockFormat:
        return _FORMATS[self.block_size]

    @property
    def scaled_shape(self) -> Sequence[int]:
        return (*self.qdata.shape[:-1], self.columns)

    def _requantize(self, hp: torch.Tensor) -> NVFP4Tensor:
        per_expert = self.global_scale.dim() > 0
        return self.from_hp(hp, block_size=self.block_size, scale_per_expert=per_expert, config=self.config)


def _format_of(name: str, block_size: Sequence[int]) -> BlockFormat:
    fmt = _FORMATS.get(tuple(block_size)) if isinstance(block_size, (tuple, list)) else None
    if fmt is None:
        sizes = " or ".join(map(str, _FORMATS))
        raise ValueError(f"{name}: block_size must be {sizes}, got {block_size!r}")
    return fmt
