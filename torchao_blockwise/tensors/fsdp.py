"""How FSDP2 gathers a master weight: each rank sends its part quantized, with the scales of the whole weight.

    master shard ──(its amaxes, MAX over ranks, scales: `distributed.sync_weight_scales`)──▶ QuantizedShard, kept
    its payload ─ all-gather, 1 byte (FP8) or half a byte (NVFP4) an element ─▶ BlockwiseFP8Tensor | NVFP4Tensor

One input a weight travels, in bytes: FSDP2 keeps only the first one in a group of one rank, refuses several where it
shards another dim than the first, and wants each in the padded size of the shard where rows split unevenly. Scales do
not travel: every rank has computed all of them.
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
    """Which part of a weight a rank holds, and how it travels.

    name: of the parameter. shape: of the whole weight [.., N, K]. dtype: what its values are rounded to first.
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
        """Shape of the largest shard; FSDP2 pads all to it."""
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
        """Whether 4-bit codes travel two a byte: FSDP2 takes other sizes than the shard's only for even rows."""
        return self.dim == 0 and self.shape[0] % self.ranks == 0

    @property
    def travels_as_stored(self) -> bool:
        """Whether what travels are entries of the stored payload; else one 4-bit code a byte."""
        return self.packs or self.config.weight_format.element.per_byte == 1

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Shape of the payload that the rank sends, in bytes."""
        return self.config.weight_format.qdata_shape(*self.padded_shape) if self.packs else self.padded_shape

    def _with_size(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


class Gather(NamedTuple):
    """FSDP2 keeps it of a weight from before its gather to after it. scale: of the whole, None in high precision."""

    layout: ShardLayout
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def gathered_dtype(master: MasterWeightTensor) -> torch.dtype:
    """The dtype that values of `master` are rounded to where FSDP2 gathers them; their own where it does not."""
    shard = master.shard
    layout = shard if shard is None or isinstance(shard, ShardLayout) else shard.part
    return master.dtype if layout is None else layout.dtype


def is_gathered_quantized(weight: torch.Tensor) -> bool:
    """Whether the rank keeps a quantized shard of `weight`, or of a DTensor's part, for FSDP2 to gather."""
    shard = getattr(_compat.local_of(weight), "shard", None)
    return shard is not None and not isinstance(shard, ShardLayout)


def attach(shard: QuantizedShard, master: MasterWeightTensor) -> None:
    """Let gathers of `master` send `shard`, as long as its values do not change."""
    shard.version = None if master.hp.is_inference() else _compat.version_of(master.hp)
    master.shard = shard


def is_current(shard: QuantizedShard, master: MasterWeightTensor) -> bool:
    """Whether `master`, as far as PyTorch counts, still has the values that `shard` was made of."""
    return shard.version is None or shard.version == _compat.version_of(master.hp)


def carry_shard(master: MasterWeightTensor, copy: MasterWeightTensor) -> None:
    """Let `copy`, `master` on another device, be gathered as it is: FSDP2 copies offloaded shards first."""
    shard = master.shard
    if isinstance(shard, ShardLayout):
        copy.shard = shard
    elif shard is not None and copy.dtype == master.dtype and is_current(shard, master):
        alias: Any = shard.detach()
        alias.ready = shard.ready
        attach(alias, copy)


def check_supported(module: torch.nn.Module) -> None:
    """Raise RuntimeError if this PyTorch's FSDP2, which gathers a weight of `module`, cannot cast its shards."""
    reason = torch_fsdp.why_unknown()
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
    """Return what this rank sends of `master`, a parameter of `module`, and how all ranks' parts become the weight."""
    check_supported(module)
    shard = master.shard
    if isinstance(shard, ShardLayout):
        # A module other than a linear layer shares the weight, and needs its values.
        return (padded(master.hp.to(shard.dtype), shard.padded_shape),), Gather(shard)
    if shard is None or not is_current(shard, master):
        name = f"a weight of {module}" if shard is None else shard.part.name
        why = "have no scales of the whole weight yet" if shard is None else "changed after their scales were computed"
        raise RuntimeError(
            f"FSDP2 gathers {name}, whose values {why}, outside of a forward pass of the root; change weights before "
            "forward or after backward, or call torchao_blockwise.distributed.sync_weight_scales(model) on all ranks"
        )
    return shard.sent()


@functools.cache
def warn_of_high_precision_gather() -> None:
    """Say once that shards were gathered by another way than FSDP2's."""
    warnings.warn(
        "a sharded master weight is gathered in high precision and quantized after it, as DTensor does by itself; "
        "torch.distributed.fsdp.fully_shard gathers it quantized",
        stacklevel=2,
    )


def padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`x` with zeros behind it up to `shape`; itself where it has that."""
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
    """The gathered weight and the tensors in it that FSDP2 must free; into `out`, an earlier result, where given.

    A quantized weight is a view of the gathered bytes, or packed in new memory if codes came one a byte.
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
    # Tensor parallelism has wrapped it.
    weight: Any = _compat.local_of(out)
    if not layout.travels_as_stored:
        with _compat.keeping_version(weight.qdata):
            weight.qdata.copy_(element.pack(payload))
    weight.scale, weight.global_scale = metadata.scale, metadata.global_scale
    return None


def _whole(gathered: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight without the padding, which lies behind it."""
    size = torch.Size(shape).numel()
    return gathered.view(-1)[:size].view(shape)


def quantized(
    qdata: torch.Tensor,
    layout: ShardLayout,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantizedTensor:
    """The whole weight that has this payload and these scales, parts of which are laid out so."""
    config, fmt = layout.config, layout.config.weight_format
    assert scale is not None
    if fmt is FP8_128X128:
        return BlockwiseFP8Tensor(qdata, scale, dtype, config.power_of_2_scales, config)
    assert global_scale is not None
    return NVFP4Tensor(qdata, scale, global_scale, layout.shape[-1], fmt.block, dtype, config)
