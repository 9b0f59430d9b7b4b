"""A rank's part of a quantized weight under FSDP2: its part's payload, and the scales of the whole.

    fully_shard: quantized Parameter ─ rows ─▶ QuantizedShard     (rows of the values, until an optimizer takes them)
    a change of values: shards of masters ─ cast, amaxes over ranks ─▶ payload of the rows, scales of the whole
    gather: payload ─ all-gather, 1 byte (FP8) or half a byte (NVFP4) an element ─▶ BlockwiseFP8Tensor | NVFP4Tensor

Rows may end anywhere in a block: no payload lies across two ranks, and every rank has every scale. High-precision
values that are copied in cannot be quantized by one rank; they wait for a cast, which all ranks make together. A
master weight has one next to it, which each pass casts again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat.torch_types import Args, Function, Kwargs, Operation, Types
from torchao_blockwise.formats import BlockFormat, Operand
from torchao_blockwise.tensors import fsdp
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.fsdp import Gather, ShardLayout
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.quantized import OPS_OF_SHARDS, QuantizedTensor, check_attributes, check_parts
from torchao_blockwise.tensors.rounding import carry_key
from torchao_blockwise.tensors.state_values import same_bits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from typing_extensions import Self

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten.contiguous.default}


class QuantizedShard(QuantizedTensor):
    """A part of a quantized weight: its qdata, and scale and global_scale of the whole weight, alike on every rank.

    qdata: of part.local_shape, in the format's storage. scale: grid of part.shape. global_scale: f32, or None.
    part: which part of which weight; rows, where it is a Parameter. dtype: that of the Parameter; values are rounded to
        part.dtype.
    ready: recorded on the stream that wrote the payload. version: change count of the master that it was made of.
    """

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["part", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["global_scale"]  # noqa: RUF012

    part: ShardLayout
    pending_master: PendingMaster
    ready: torch.cuda.Event | None = None
    version: int | None = None
    # While `fully_shard` runs: those of all ranks, or the one that it has chosen.
    chunks: list[QuantizedShard] | None = None

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        part: ShardLayout,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> Self:
        if not isinstance(part, ShardLayout):
            raise TypeError(f"{cls.__name__}: part must be a ShardLayout, got {part!r}; shard with fully_shard")
        check_attributes(cls.__name__, part.config.weight_format, dtype, part.config)
        x = _compat.make_wrapper(cls, part.local_shape, dtype=dtype, device=qdata.device)
        x.qdata, x.scale, x.global_scale = qdata, scale, global_scale
        x.part, x.config, x.pending_master = part, part.config, PendingMaster()
        x._check()
        return x

    @property
    def fmt(self) -> BlockFormat:
        return self.part.config.weight_format

    @property
    def power_of_2_scales(self) -> bool:
        return self.part.config.power_of_2_scales

    @property
    def awaits_cast(self) -> bool:
        return self.pending_master.awaits_cast

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The rows' values as they were loaded, where these wait for a cast, else decoded, in `dtype`."""
        pending = self.pending_master
        return self.dequantize(dtype) if pending.hp is None or not pending.awaits_cast else pending.hp

    def take_values(self, values: torch.Tensor) -> None:
        """Hold values, which all ranks cast together where the next pass of their root begins."""
        pending = self.pending_master
        pending.note_copy(values, ())
        pending.awaits_cast = True

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """qdata · scale [· global_scale] of the rows."""
        self._check()
        block = self.fmt.block[0] if self.dim() == 2 else 1
        border, end = self.part.start % block, self.part.start + self.shape[0]
        framed = self.qdata
        if border:
            # Zeros from the border of a block on, so that rows meet their scales; as bytes, since autocast refuses FP8.
            payload = self.qdata.view(torch.uint8)
            framed = torch.cat([payload.new_zeros(border, *payload.shape[1:]), payload]).view(self.qdata.dtype)
        scale = self.scale[self.part.start // block : -(-end // block)]
        if not self.numel():
            return torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        global_scale = self.global_scale
        if global_scale is not None and global_scale.dim():
            global_scale = global_scale[self.part.start : end]
        operand = Operand(framed, scale, global_scale, self.fmt.name)
        values = ops.dequantize(operand, dtype=dtype or self.dtype, columns=self.shape[-1])
        # A DTensor of what begins inside of its memory cannot be saved asynchronously.
        return values[border:].clone() if border else values

    def with_values(self, values: torch.Tensor) -> QuantizedShard:
        """A shard of the same rows and of other values, which wait for a cast."""
        # accelerate, torchtitan and others shard on the meta device, and load after.
        is_meta = self.device.type == "meta"
        other: Any = torch.empty_like(self, device=values.device) if is_meta else self.detach().clone()
        other.take_values(values.to(other.device))
        return other

    def _check(self) -> None:
        name, part = type(self).__name__, self.part
        got = self.qdata.shape
        if got[:-1] != part.local_shape[:-1]:
            wanted = f"{list(part.local_shape)} of {part.name}"
            raise ValueError(
                f"{name}: qdata must be the rows {wanted}, got {list(got)}; shard it again with fully_shard"
            )
        parts = self.qdata, self.scale, self.global_scale
        check_parts(name, self.fmt, *parts, part.shape, part.local_shape[-1])

    def _make(self, **changed: Any) -> Self:
        if (dtype := changed.get("dtype")) is not None and self.part.dtype == self.dtype:
            changed["part"] = dataclasses.replace(self.part, dtype=dtype)
        return super()._make(**changed)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], Gather]:
        """Return the payload that this rank sends, and the scales, which do not travel; FSDP2 calls it."""
        fsdp.check_supported(module)
        if self.awaits_cast:
            raise RuntimeError(
                f"FSDP2 gathers a weight of {module}, whose values were loaded or copied in after its last cast; call "
                "torchao_blockwise.distributed.sync_weight_scales(model) on all ranks after changing weights by hand "
                "between microbatches of a step, or before gathering by hand"
            )
        return self.sent()

    # FSDP2 calls it for the weight that layers use until it is sharded again: a quantized tensor.
    fsdp_post_all_gather = fsdp.post_all_gather

    def sent(self) -> tuple[tuple[torch.Tensor], Gather]:
        """The payload in bytes, padded to the largest shard, and the scales, which do not travel.

        One 4-bit code a byte where rows split unevenly.
        """
        if self.ready is not None:
            # Gathers run on a separate stream.
            torch.cuda.current_stream(self.device).wait_event(self.ready)
        payload = self.qdata.view(torch.uint8)
        if not self.part.travels_as_stored:
            payload = self.fmt.element.unpack(payload, self.shape[-1]).contiguous()
        payload = fsdp.padded(payload, self.part.payload_shape)
        return (payload,), Gather(self.part, self.scale, self.global_scale)

    @classmethod
    @_compat.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Types, args: Args, kwargs: Kwargs | None = None
    ) -> Any:
        if func is aten.copy_.default:
            return _copy_(*args, **(kwargs or {}))
        if func is aten.view.default and list(args[1]) in ([-1], list(args[0].shape)):
            # How a DTensor gives what it holds; flat, it is what FSDP2 keeps and does not ask for.
            func, args = aten.alias.default, args[:1]
        if func is aten.slice.Tensor and args[0].chunks is not None:
            return _narrow(*args)
        if func not in OPS_OF_SHARDS:
            raise NotImplementedError(
                f"{func}: not exact on the rows of a quantized weight that FSDP2 shards, so it is not done; copy "
                "values into the parameter; to train, take torchao_blockwise.distributed.MasterWeightOptimizer or "
                "convert with master_weights=True"
            )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COPIES and args[0].awaits_cast:
            # A copy's own: an optimizer has the master of the weight that was copied.
            out.take_values(args[0].values())
        return out


def _copy_(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """From rows of the same layout: payload and scales. From high precision: values, which wait for a cast."""
    if not isinstance(x, QuantizedShard):
        raise NotImplementedError("copy_: the source is a QuantizedShard, the target a plain tensor; copy its values()")
    if x.shape != src.shape:
        raise ValueError(f"copy_: the target has shape {list(x.shape)}, the source {list(src.shape)}")
    if not isinstance(src, QuantizedTensor):
        pending = x.pending_master
        if pending.is_owned and src.dtype == x.dtype and same_bits(src, x.dequantize()):
            # What a state dict has of it: a checkpoint that comes after the optimizer's masters leaves those.
            pending.hp, pending.awaits_cast = None, True
        else:
            x.take_values(src.to(x.device))
        return x
    if x.chunks is not None and isinstance(src, QuantizedShard):
        x.chunks[:] = [_with_own_memory(src)]
        return x
    if x.pending_master is getattr(src, "pending_master", None):
        return x
    if not isinstance(src, QuantizedShard) or src.part != x.part:
        raise ValueError(f"copy_: the target holds {x.part}, the source other rows; copy from source.dequantize()")
    pairs = list(zip(x.parts().values(), src.parts().values()))
    x.pending_master.note_copy(None, pairs)
    for mine, theirs in pairs:
        mine.copy_(theirs, non_blocking=non_blocking)
    x.pending_master.awaits_cast = False
    if src.awaits_cast:
        x.take_values(src.values())
    return x


# --- `fully_shard` of a quantized Parameter ---------------------------------------------------------------------------
#
# FSDP2 takes chunks = torch.chunk(p, ranks), padded = p.new_zeros(chunks[0].size()), copies this rank's chunk into
# padded.narrow(0, 0, rows), and holds padded.narrow(0, 0, rows). Shards need no padding: they pad what they send.


def _chunk(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Any:
    """`torch.chunk` of a Parameter by rows: a shard a rank, whatever blocks that cuts; of other tensors views."""
    weight: Any
    weight, ranks, dim = (*args, kwargs.get("dim", 0))[:3]
    config = weight.config
    is_parameter = getattr(weight, "_is_param", False)
    if not is_parameter or config is None or weight.fmt is not config.weight_format:
        with _compat.no_torch_function():
            return func(*args, **kwargs)
    pending = weight.pending_master
    reason = f"Shard({dim}) would cut its rows; shard dim 0, or convert with master_weights=True" if dim else ""
    if pending is not None and pending.is_owned:
        reason = "has its master in an optimizer already; make MasterWeightOptimizer after fully_shard"
    if reason:
        name = weight.layer or "a weight"
        raise ValueError(f"fully_shard: {name} {list(weight.shape)} is quantized itself, and {reason}")
    chunks = []
    for rank in range(ranks):
        part = ShardLayout(weight.layer, tuple(weight.shape), weight.dtype, 0, rank, ranks, config)
        rows = slice(part.start, part.start + part.local_shape[0])
        shard = QuantizedShard(weight.qdata[rows], weight.scale, part, weight.dtype, weight.global_scale)
        carry_key(weight, shard)
        if pending is not None and pending.hp is not None:
            # Scales are of this rank's values; of all ranks' parts they are with the first cast.
            shard.pending_master.hp, shard.pending_master.awaits_cast = pending.hp.detach()[rows], True
        chunks.append(shard)
    weight.chunks = chunks
    return tuple(chunks)


def _new_zeros(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Any:
    """After `torch.chunk` what stands for the padded shard; else as of any tensor."""
    x: Any = args[0]
    chunks = [x] if isinstance(x, QuantizedShard) else vars(x).pop("chunks", None)
    shapes = [tuple(chunk.part.padded_shape) for chunk in (chunks or ())[:1]]
    if [args[1:]] != [(shape,) for shape in shapes] or kwargs:
        with _compat.no_torch_function():
            return func(*args, **kwargs)
    padded: Any = chunks[0].detach()
    padded.chunks = chunks
    return padded


def _narrow(padded: Any, dim: int, start: int, end: int) -> Any:
    """The rank's chunk, once it is chosen; before, a chunk of that size, into which the chosen one is copied."""
    assert dim == start == 0, "what FSDP2 asks for"
    if len(padded.chunks) == 1:
        return padded.chunks[0].detach()
    chunk = next(x for x in padded.chunks if x.shape[0] == end)
    if not end:
        return _with_own_memory(chunk)
    rows = chunk.detach()
    rows.chunks = padded.chunks
    return rows


def _with_own_memory(chunk: QuantizedShard) -> QuantizedShard:
    """So that the whole is freed."""
    global_scale = None if chunk.global_scale is None else chunk.global_scale.clone()
    shard = QuantizedShard(chunk.qdata.clone(), chunk.scale.clone(), chunk.part, chunk.dtype, global_scale)
    carry_key(chunk, shard)
    if chunk.awaits_cast:
        shard.take_values(chunk.values())
    return shard


for _cls in (BlockwiseFP8Tensor, NVFP4Tensor):
    _cls.implements_torch_function(torch.chunk)(_chunk)
    _cls.implements_torch_function(torch.Tensor.new_zeros)(_new_zeros)
QuantizedShard.implements_torch_function(torch.Tensor.new_zeros)(_new_zeros)
torch.serialization.add_safe_globals([ShardLayout])
