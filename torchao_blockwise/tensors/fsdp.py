"""How FSDP2 gathers a master weight: each rank sends its part quantized, with the scales of the whole weight.

    master shard ──(its amaxes, MAX over ranks, scales: `distributed.sync_weight_scales`)──▶ QuantizedShard, kept
    its payload ─ all-gather, 1 byte (FP8) or half a byte (NVFP4) an element ─▶ BlockwiseFP8Tensor | NVFP4Tensor

Each weight sends one tensor, in bytes: FSDP2 keeps only the first tensor in a group of one rank, does not support
several if it shards another dim than the first, and needs the padded size of the shard if rows split unevenly. Scales
are not sent, because every rank has computed all of them.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.formats import FP8_128X128
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.quantized import QuantizedTensor
from torchao_blockwise.tensors.rounding import carry_key

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

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
    def packs(self) -> bool:
        """Whether 4-bit codes are sent packed; FSDP2 supports sizes other than the shard's only for even rows."""
        return self.dim == 0 and self.shape[0] % self.ranks == 0

    @property
    def travels_as_stored(self) -> bool:
        """Whether the stored payload is sent; otherwise one 4-bit code a byte."""
        return self.packs or self.config.weight_format.element.per_byte == 1

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Shape of the payload that the rank sends, in bytes."""
        return self.config.weight_format.qdata_shape(*self.padded_shape) if self.packs else self.padded_shape

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


class Gather(NamedTuple):
    """Metadata that FSDP2 passes from before to after an all-gather. scale: of the whole weight; None in high
    precision."""

    layout: ShardLayout
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def gathered_dtype(master: MasterWeightTensor) -> torch.dtype:
    """Return the dtype to which FSDP2 rounds the values of `master`; their own if it does not gather them."""
    shard = master.shard
    layout = shard if shard is None or isinstance(shard, ShardLayout) else shard.part
    return master.dtype if layout is None else layout.dtype


def is_gathered_quantized(weight: torch.Tensor) -> bool:
    """Whether this rank keeps a quantized shard of `weight` (maybe a DTensor) that FSDP2 gathers."""
    shard = getattr(_compat.local_of(weight), "shard", None)
    return shard is not None and not isinstance(shard, ShardLayout)


def attach(shard: QuantizedShard | ShardLayout, master: MasterWeightTensor) -> None:
    """Let FSDP2 send `shard` for `master`, as long as the values of `master` do not change."""
    if not isinstance(shard, ShardLayout):
        shard.version = None if master.hp.is_inference() else _compat.version_of(master.hp)
    master.shard = shard


def is_current(shard: QuantizedShard, master: MasterWeightTensor) -> bool:
    """Whether, according to its version counter, `master` has not changed since `shard` was computed."""
    return shard.version is None or shard.version == _compat.version_of(master.hp)


def carry_shard(master: MasterWeightTensor, copy: MasterWeightTensor) -> None:
    """Let FSDP2 gather `copy`, which is `master` on another device, because it copies offloaded shards first."""
    shard = master.shard
    if isinstance(shard, ShardLayout):
        copy.shard = shard
    elif shard is not None and copy.dtype == master.dtype and is_current(shard, master):
        alias: Any = shard.detach()
        alias.ready = shard.ready
        attach(alias, copy)


def check_supported(module: torch.nn.Module) -> None:
    """Raise RuntimeError if shards cannot be cast with the FSDP2 of this PyTorch version."""
    reason = torch_fsdp.install()
    if reason is not None:
        raise RuntimeError(f"FSDP2 gathers a weight of {module}: {reason}")


def pre_all_gather(
    master: MasterWeightTensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor], Gather]:
    """Return the tensor that this rank sends for `master`, a parameter of `module`, and the metadata of the gather."""
    check_supported(module)
    shard = master.shard
    if isinstance(shard, ShardLayout):
        # The weight is shared with a module, such as an embedding, that needs its values.
        return (padded(master.hp.to(shard.dtype), shard.padded_shape),), Gather(shard)
    if shard is None or not is_current(shard, master):
        name = f"a weight of {module}" if shard is None else shard.part.name
        why = "have no scales of the whole weight yet" if shard is None else "changed after their scales were computed"
        raise RuntimeError(
            f"FSDP2 gathers {name} outside of a forward pass of the root, but its values {why}; change weights before "
            "forward or after backward, or call torchao_blockwise.distributed.sync_weight_scales(model) on all ranks"
        )
    return shard.sent()


@functools.cache
def warn_of_high_precision_gather() -> None:
    """Warn once that shards were not gathered by FSDP2."""
    warnings.warn(
        "a sharded master weight is all-gathered in high precision by DTensor and quantized afterwards; use "
        "torch.distributed.fsdp.fully_shard to gather it quantized",
        stacklevel=2,
    )


def padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `x` padded with zeros to `shape`, or `x` itself if it has that shape."""
    if tuple(x.shape) == shape:
        return x
    larger = x.new_zeros(shape)
    larger[tuple(slice(n) for n in x.shape)] = x
    return larger


def post_all_gather(
    master: torch.Tensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Gather,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Return the gathered weight and its tensors that FSDP2 must free, or write to `out`, an earlier result.

    A quantized weight is a view of the gathered bytes, or packed in new memory if one code a byte was sent.
    """
    layout = metadata.layout
    (gathered,) = all_gather_outputs
    if metadata.scale is None:
        if out is not None:
            return None
        whole = type(master)(_whole(gathered, layout.shape), layout.config)
        whole.layer = getattr(master, "layer", "")  # type: ignore[attr-defined]  # a master weight's
        return whole, ()
    element = layout.config.weight_format.element
    payload = _whole(gathered, layout.config.weight_format.qdata_shape(*layout.shape) if layout.packs else layout.shape)
    if out is None:
        qdata = payload.view(element.storage_dtype) if layout.travels_as_stored else element.pack(payload)
        made = quantized(qdata, layout, metadata.scale, metadata.global_scale, param_dtype)
        carry_key(master, made)
        made.layer = getattr(master, "layer", "")
        return made, () if layout.travels_as_stored else (qdata,)
    # With tensor parallelism, it is a DTensor.
    weight: Any = _compat.local_of(out)
    if not layout.travels_as_stored:
        with _compat.keeping_version(weight.qdata):
            weight.qdata.copy_(element.pack(payload))
    weight.scale, weight.global_scale = metadata.scale, metadata.global_scale
    return None


def _whole(gathered: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the weight without the padding at the end."""
    size = torch.Size(shape).numel()
    return gathered.view(-1)[:size].view(shape)


def quantized(
    qdata: torch.Tensor,
    layout: ShardLayout,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantizedTensor:
    """Return the whole weight with this payload and these scales."""
    config, fmt = layout.config, layout.config.weight_format
    assert scale is not None
    if fmt is FP8_128X128:
        return BlockwiseFP8Tensor(qdata, scale, dtype, config.power_of_2_scales, config)
    assert global_scale is not None
    return NVFP4Tensor(qdata, scale, global_scale, layout.shape[-1], fmt.block, dtype, config)
