"""A rank's shard of a quantized weight under FSDP2: the payload of the shard, and the scales of the whole weight.

    fully_shard: quantized Parameter ─ rows ─▶ QuantizedShard     (rows of the values, until an optimizer takes them)
    a change of values: shards of masters ─ cast, amaxes over ranks ─▶ payload of the rows, scales of the whole
    gather: payload ─ all-gather, 1 byte (FP8) or half a byte (NVFP4) an element ─▶ BlockwiseFP8Tensor | NVFP4Tensor

A shard may end anywhere in a block, because every rank has every scale. One rank cannot quantize high-precision values
that are copied in: they wait for a cast, which is a collective. A master weight has such a shard as an attribute, which
each forward pass casts again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    """A part of a quantized weight: its qdata, and scale and global_scale of the whole weight, equal on all ranks.

    qdata: of part.local_shape, in the format's storage. scale: grid of part.shape. global_scale: f32, or None.
    part: the layout of the shard; a Parameter is split by rows. dtype: that of the Parameter; values are rounded to
        part.dtype.
    ready: event recorded on the stream that wrote the payload. version: version of the master it was computed from.
    """

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["part", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["global_scale"]  # noqa: RUF012

    part: ShardLayout
    pending_master: PendingMaster
    ready: torch.cuda.Event | None = None
    version: int | None = None
    # While `fully_shard` runs: the chunks of all ranks, or the one that it has selected.
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
        """Return the loaded values of the rows if they wait for a cast, or else the decoded values in `dtype`."""
        pending = self.pending_master
        return self.dequantize(dtype) if pending.hp is None or not pending.awaits_cast else pending.hp

    def take_values(self, values: torch.Tensor) -> None:
        """Keep values, which all ranks cast together at the beginning of the next forward pass of their root."""
        pending = self.pending_master
        pending.note_copy(values, ())
        pending.awaits_cast = True

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return qdata · scale [· global_scale] of the rows."""
        self._check()
        block = self.fmt.block[0] if self.dim() == 2 else 1
        border, end = self.part.start % block, self.part.start + self.shape[0]
        framed = self.qdata
        if border:
            # Prepend zeros up to a block boundary to align rows with their scales; as bytes, since autocast lacks FP8.
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
        # Clone, because a DTensor that starts at a storage offset cannot be saved asynchronously.
        return values[border:].clone() if border else values

    def with_values(self, values: torch.Tensor) -> QuantizedShard:
        """Return a shard of the same rows with other values, which wait for a cast."""
        # accelerate, torchtitan and others shard on the meta device and load afterwards.
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
        """Return the payload that this rank sends, and the scales, which are not sent; FSDP2 calls it."""
        fsdp.check_supported(module)
        if self.awaits_cast:
            raise RuntimeError(
                f"FSDP2 gathers a weight of {module}, but values were loaded or copied in after its last cast; after "
                "changing weights by hand between the microbatches of a step, or before gathering by hand, call "
                "torchao_blockwise.distributed.sync_weight_scales(model) on all ranks"
            )
        return self.sent()

    # FSDP2 calls it to get the quantized tensor that layers use until it is resharded.
    fsdp_post_all_gather = fsdp.post_all_gather

    def sent(self) -> tuple[tuple[torch.Tensor], Gather]:
        """Return the payload as bytes, padded to the largest shard, and the scales, which are not sent.

        If rows split unevenly, each 4-bit code takes one byte.
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
            # `DTensor.to_local` calls it. FSDP2 flattens the shard with it, but does not read the result.
            func, args = aten.alias.default, args[:1]
        if func is aten.slice.Tensor and args[0].chunks is not None:
            return _narrow(*args)
        if func is aten._to_copy.default and args[0].chunks is not None:
            raise refused_offload(args[0].part.name, args[0].part.shape)
        if func not in OPS_OF_SHARDS:
            raise NotImplementedError(
                f"{func}: not exact on the shard of a quantized weight, so it is not supported; copy values into the "
                "Parameter; to train it, use torchao_blockwise.distributed.MasterWeightOptimizer, or convert with "
                "master_weights=True"
            )
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COPIES and args[0].awaits_cast:
            # The copy has its own pending values: the optimizer has the master of the original weight.
            out.take_values(args[0].values())
        return out


def refused_offload(name: str, shape: Sequence[int]) -> ValueError:
    """The error for the shard of a quantized Parameter that `fully_shard` moves to the CPU."""
    return ValueError(
        f"fully_shard: {name} {list(shape)} is a quantized Parameter, which must stay on its device; do not use "
        "CPUOffloadPolicy, or convert with master_weights=True"
    )


def _copy_(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy payload and scales from rows of the same layout, or keep high-precision values, which wait for a cast."""
    if not isinstance(x, QuantizedShard):
        raise NotImplementedError("copy_: cannot copy a QuantizedShard to a plain tensor; copy its values()")
    if x.shape != src.shape:
        raise ValueError(f"copy_: the target has shape {list(x.shape)}, the source {list(src.shape)}")
    if not isinstance(src, QuantizedTensor):
        pending = x.pending_master
        if pending.is_owned and src.dtype == x.dtype and same_bits(src, x.dequantize()):
            # These are the values of a state dict: the exact masters that the optimizer has loaded must stay.
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
        raise ValueError(f"copy_: the target is {x.part}, but the source other rows; copy from source.dequantize()")
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
    """`torch.chunk`: return a shard for each rank for a Parameter, even if that cuts blocks, and views for others."""
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
        reason = "an optimizer already has its master; create MasterWeightOptimizer after fully_shard"
    if reason:
        name = weight.layer or "a weight"
        raise ValueError(f"fully_shard: {name} {list(weight.shape)} is a quantized Parameter, and {reason}")
    chunks = []
    for rank in range(ranks):
        part = ShardLayout(weight.layer, tuple(weight.shape), weight.dtype, 0, rank, ranks, config)
        rows = slice(part.start, part.start + part.local_shape[0])
        shard = QuantizedShard(weight.qdata[rows], weight.scale, part, weight.dtype, weight.global_scale)
        carry_key(weight, shard)
        if pending is not None and pending.hp is not None:
            # The scales were computed from this rank's values; the first cast computes them from those of all ranks.
            shard.pending_master.hp, shard.pending_master.awaits_cast = pending.hp.detach()[rows], True
        chunks.append(shard)
    weight.chunks = chunks
    return tuple(chunks)


def _new_zeros(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Any:
    """Return a placeholder for the padded shard after `torch.chunk`; otherwise run PyTorch's implementation."""
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
    """Return the rank's chunk once it is selected; before, a chunk of that size into which it will be copied."""
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
    """Copy a chunk, so that the whole weight can be freed."""
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
