"""How FSDP2 gathers a master weight: each rank sends its part quantized, with the scales of the whole weight.

    master shard ──(its amaxes, MAX over ranks, scales: `distributed.sync_weight_scales`)──▶ QuantizedShard, kept
    its payload ─ all-gather, 1 byte (FP8) or half a byte (NVFP4) per element ─▶ BlockwiseFP8Tensor | NVFP4Tensor

Each weight sends one tensor, in bytes: FSDP2 keeps only the first tensor in a group of one rank, does not support
several if it shards another dim than the first, and needs the padded size of the shard if rows split unevenly. Scales
are not sent, because every rank has computed all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.quantized import QuantizedTensor

if TYPE_CHECKING:
    from torchao_blockwise.tensors.master_weight import MasterWeightTensor
    from torchao_blockwise.tensors.quantized_shard import QuantizedShard


@dataclass(frozen=True)
class ShardLayout:
    """The part of a weight that a rank holds, and its layout in an all-gather.

    name: of the parameter. shape: of the whole weight [.., N, K]. dtype: the dtype to which values are rounded first.
    dim, rank, ranks: the rank holds [rank · ⌈n / ranks⌉, ...) of dim `dim`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    rank: int
    ranks: int
    config: TrainingConfig

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the largest shard, to which FSDP2 pads all shards."""
        return self._with_size(-(-self.shape[self.dim] // self.ranks))

    @property
    def start(self) -> int:
        """Index in dim `dim` of the first element that the rank holds."""
        return min(self.rank * self.padded_shape[self.dim], self.shape[self.dim])

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._with_size(min(self.padded_shape[self.dim], self.shape[self.dim] - self.start))

    @property
    def travels_as_stored(self) -> bool:
        """Whether the stored payload is sent, and not one 4-bit code per byte.

        FSDP2 supports sizes other than the shard's only for even rows.
        """
        is_even = self.dim == 0 and self.shape[0] % self.ranks == 0
        return is_even or self.config.weight_format.element.per_byte == 1

    def payload_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which a payload of this shape is sent, in bytes."""
        return self.config.weight_format.qdata_shape(*shape) if self.travels_as_stored else shape

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


# What FSDP2 passes from before to after an all-gather: the layout, and the scales of the whole weight, None in high
# precision.
Gather: TypeAlias = tuple[ShardLayout, torch.Tensor | None, torch.Tensor | None]


def gathered_dtype(master: MasterWeightTensor) -> torch.dtype:
    """Return the dtype to which FSDP2 rounds the values of `master`; their own if it does not gather them."""
    layout = getattr(master.shard, "part", master.shard)
    return master.dtype if layout is None else layout.dtype


def attach(shard: QuantizedShard | ShardLayout, master: MasterWeightTensor) -> None:
    """Let FSDP2 send `shard` for `master`, as long as the values of `master` do not change."""
    master.shard = shard
    master.shard_version = None if master.hp.is_inference() else _compat.version_of(master.hp)


def is_current(master: MasterWeightTensor) -> bool:
    """Whether, according to its version counter, `master` has not changed since its shard was attached."""
    return master.shard_version in (None, _compat.version_of(master.hp))


def carry_shard(master: MasterWeightTensor, copy: MasterWeightTensor) -> None:
    """Let FSDP2 gather `copy`, which is `master` on another device, because it copies offloaded shards first."""
    shard = master.shard
    if isinstance(shard, ShardLayout) or (shard is not None and copy.dtype == master.dtype and is_current(master)):
        attach(shard, copy)


def pre_all_gather(
    weight: Any, mesh: object, outer_size: object, outer_stride: object, module: object, mp_policy: object
) -> tuple[tuple[torch.Tensor], Gather]:
    """Return the tensor that this rank sends for `weight`, a parameter of `module`, and the metadata of the gather.

    It is the payload as bytes, padded to the largest shard. If rows split unevenly, each 4-bit code takes one byte.
    """
    if (reason := torch_fsdp.install()) is not None:
        raise RuntimeError(f"FSDP2 gathers a weight of {module}: {reason}")
    is_shard = isinstance(weight, QuantizedTensor)
    shard: Any = weight if is_shard else weight.shard
    if isinstance(shard, ShardLayout):
        # The weight is shared with a module, such as an embedding, that needs its values.
        return (_padded(weight.hp.to(shard.dtype), shard.padded_shape),), (shard, None, None)
    if shard is None or (shard.awaits_cast if is_shard else not is_current(weight)):
        name = f"a weight of {module}" if shard is None else shard.part.name
        why = "were never cast" if shard is None else "changed after their last cast"
        raise RuntimeError(
            f"FSDP2 gathers {name}, but its values {why}; change weights before forward or after "
            "backward, or call torchao_blockwise.distributed.sync_weight_scales(model) on all ranks, also between the "
            "microbatches of a step and before gathering by hand"
        )
    if shard.ready is not None:
        # Gathers run on a separate stream.
        torch.cuda.current_stream(shard.device).wait_event(shard.ready)
    payload, layout = shard.qdata.view(torch.uint8), shard.part
    if not layout.travels_as_stored:
        payload = shard.fmt.element.unpack(payload, shard.shape[-1]).contiguous()
    payload = _padded(payload, layout.payload_shape(layout.padded_shape))
    return (payload,), (layout, shard.scale, shard.global_scale)


def _padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` padded with zeros to `shape`, or `x` itself if it has that shape."""
    missing = [wanted - size for size, wanted in zip(x.shape, shape)]
    return F.pad(x, [n for more in reversed(missing) for n in (0, more)]) if any(missing) else x


def post_all_gather(
    weight: Any,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Gather,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Return the gathered weight and its tensors that FSDP2 must free, or write to `out`, an earlier result.

    A quantized weight is a view of the gathered bytes, or packed in new memory if one code per byte was sent.
    """
    (layout, scale, global_scale), (gathered,) = metadata, all_gather_outputs
    if scale is None:
        if out is not None:
            return None
        return type(weight)(_whole(gathered, layout.shape), layout.config).inherit(weight), ()
    element = layout.config.weight_format.element
    payload = _whole(gathered, layout.payload_shape(layout.shape))
    if out is None:
        qdata = payload.view(element.storage_dtype) if layout.travels_as_stored else element.pack(payload)
        made = quantized(qdata, metadata, param_dtype).inherit(weight)
        return made, () if layout.travels_as_stored else (qdata,)
    # With tensor parallelism, it is a DTensor.
    whole: Any = _compat.local_of(out)
    if not layout.travels_as_stored:
        with _compat.keeping_version(whole.qdata):
            whole.qdata.copy_(element.pack(payload))
    whole.scale, whole.global_scale = scale, global_scale
    return None


def _whole(gathered: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the weight without the padding at the end."""
    size = torch.Size(shape).numel()
    return gathered.view(-1)[:size].view(shape)


def quantized(qdata: torch.Tensor, gather: Gather, dtype: torch.dtype) -> QuantizedTensor:
    """Return the whole weight with this payload and the scales of `gather`."""
    layout, scale, global_scale = gather
    config, fmt = layout.config, layout.config.weight_format
    assert scale is not None
    if fmt is FP8_128X128:
        return BlockwiseFP8Tensor(qdata, scale, dtype, config.power_of_2_scales, config)
    assert global_scale is not None
    return NVFP4Tensor(qdata, scale, global_scale, layout.shape[-1], fmt.block, dtype, config)
