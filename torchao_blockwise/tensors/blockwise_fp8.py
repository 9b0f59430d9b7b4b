"""BlockwiseFP8Tensor: e4m3 payload and fp32 scales of 128×128 blocks."""

from __future__ import annotations

import torch
from typing_extensions import Self

from torchao_blockwise import _compat, ops
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.quantized import QuantizedTensor


class BlockwiseFP8Tensor(QuantizedTensor):
    """A tensor [.., N, K] stored in 128×128 blocks of e4m3: x ≈ qdata · scale, 1 + 4/16384 bytes per element.

    qdata: [.., N, K] e4m3. scale: [.., ⌈N/128⌉, ⌈K/128⌉] f32.
    power_of_2_scales: whether values that are copied into the tensor are quantized with power-of-two scales.
    config: how a layer with this weight trains; None for the defaults of `BlockwiseFP8TrainingConfig`.

    Create one with `from_hp`. It can be the weight of any `nn.Linear`. Slices and views are exact, or raise an error.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["dtype", "power_of_2_scales", "config"]  # noqa: RUF012

    fmt = FP8_128X128
    power_of_2_scales: bool

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        power_of_2_scales: bool = False,
        config: TrainingConfig | None = None,
    ) -> Self:
        x = _compat.make_wrapper(cls, qdata, qdata.shape, qdata.stride(), dtype=dtype)
        x.power_of_2_scales = power_of_2_scales
        x._set_parts(qdata, scale, None, config)
        return x

    @classmethod
    def from_hp(
        cls, w: torch.Tensor, *, power_of_2_scales: bool = False, config: TrainingConfig | None = None
    ) -> BlockwiseFP8Tensor:
        """Quantize `w` [.., N, K] bf16 | f16 | f32 in 128×128 blocks.

        Raises TypeError for another dtype, ValueError for fewer than 2 dims.
        """
        q = ops.quantize(w.detach(), FP8_128X128, power_of_2_scales=power_of_2_scales).rowwise
        return cls(q.qdata, q.scale, w.dtype, power_of_2_scales, config)

    def _requantize(self, hp: torch.Tensor) -> BlockwiseFP8Tensor:
        return self.from_hp(hp, power_of_2_scales=self.power_of_2_scales, config=self.config)
