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
from typing import Any, NoReturn

import torch
from typing_extensions import Self

from torchao_blockwise import _compat
from torchao_blockwise._compat import Args, Function, Kwargs, Operation, Types
from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.quantization.reference import expand_blocks
from torchao_blockwise.tensors import fsdp
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.fsdp import ShardLayout
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.quantized import OPS_OF_SHARDS, QuantizedTensor
from torchao_blockwise.tensors.state_values import same_bits

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten.contiguous.default}


class QuantizedShard(QuantizedTensor):
    """A part of a quantized weight: its qdata, and scale and global_scale of the whole weight, equal on all ranks.

    qdata: of part.local_shape, in the format's storage. scale: grid of part.shape. global_scale: f32, or None.
    part: the layout of the shard; a Parameter is split by rows. dtype: that of the Parameter; values are rounded to
        part.dtype.
    ready: event recorded on the stream that wrote the payload.
    """

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["part", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["global_scale"]  # noqa: RUF012

    part: ShardLayout
    pending_master: PendingMaster
    ready: torch.cuda.Event | None = None

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
        x = _compat.make_wrapper(cls, qdata, part.local_shape, dtype=dtype)
        x.part, x.pending_master = part, PendingMaster()
        x._set_parts(qdata, scale, global_scale, part.config)
        return x

    @property
    def fmt(self) -> BlockFormat:
        return self.part.config.weight_format

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
        fmt, start, end = self.fmt, self.part.start, self.part.start + self.shape[0]
        block = fmt.block[0] if self.dim() == 2 else 1
        # The shard may begin inside a block.
        border, (rows, columns) = start % block, self.shape[-2:]
        scale = self.scale[start // block : -(-end // block)].float()
        values = fmt.element.decode(self.qdata, columns) * expand_blocks(scale, fmt, border + rows, columns)[border:]
        global_scale = self.global_scale
        if global_scale is not None:
            values *= global_scale[start:end, None, None] if global_scale.dim() else global_scale
        return values.to(dtype or self.dtype)

    def with_values(self, values: torch.Tensor) -> QuantizedShard:
        """Return a shard of the same rows with other values, which wait for a cast."""
        # accelerate, torchtitan and others shard on the meta device and load afterwards.
        is_meta = self.device.type == "meta"
        other: Any = torch.empty_like(self, device=values.device) if is_meta else self.detach().clone()
        other.take_values(values.to(other.device))
        return other

    @property
    def scaled_shape(self) -> Sequence[int]:
        return self.part.shape

    def _check(self, columns: int | None = None) -> None:
        wanted, got = self.part.local_shape, self.qdata.shape
        if got[:-1] != wanted[:-1]:
            raise ValueError(
                f"{type(self).__name__}: qdata must be the rows {list(wanted)} of {self.part.name}, got {list(got)}; "
                "shard it again with fully_shard"
            )
        super()._check(wanted[-1])

    def _make(self, **changed: Any) -> Self:
        if (dtype := changed.get("dtype")) is not None and self.part.dtype == self.dtype:
            changed["part"] = dataclasses.replace(self.part, dtype=dtype)
        return super()._make(**changed)

    # FSDP2 calls them to get the tensor that this rank sends, and the weight that layers use until it is resharded.
    fsdp_pre_all_gather = fsdp.pre_all_gather
    fsdp_post_all_gather = fsdp.post_all_gather

    @classmethod
    @_compat.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Types, args: Args, kwargs: Kwargs | None = None
    ) -> Any:
        if func is aten.copy_.default:
            return _copy_(*args, **(kwargs or {}))
        flattens = func is aten.view.default and list(args[1]) in ([-1], list(args[0].shape))
        if flattens or (func is aten.slice.Tensor and args[1:] == (0, 0, len(args[0]))):
            # `DTensor.to_local` views a tensor in its shape. FSDP2 flattens a shard, but does not read the result, and
            # takes its rows out of its padding, which it does not have.
            func, args = aten.alias.default, args[:1]
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
    if x.pending_master is getattr(src, "pending_master", None):
        return x
    if not isinstance(src, QuantizedShard) or src.part != x.part:
        raise ValueError(
            f"copy_: the source must be a shard with the rows, dtype and config of the target ({x.part.name}); copy "
            "from source.dequantize()"
        )
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
# padded.narrow(0, 0, rows), and holds padded.narrow(0, 0, rows). Later it pads shards again. Shards need no padding:
# gathers pad what they send.


class _Padded:
    """Stands for the padded shard: it holds the chunk that is copied into it, in new memory, so that the whole weight
    can be freed."""

    is_meta = False

    def __init__(self, last: QuantizedShard):
        # Without rows in any padded shard into which no chunk is copied.
        self.rows, self.is_filled = last, False

    def copy_(self, chunk: QuantizedShard) -> None:
        copy: Any = chunk.clone()
        self.rows, self.is_filled = copy.inherit(chunk), True

    def narrow(self, dim: int, start: int, length: int) -> QuantizedShard | _Padded:
        if not length:
            self.copy_(self.rows)
        return self.rows if self.is_filled else self

    def view(self, size: int) -> _Padded:
        return self

    def cpu(self) -> NoReturn:
        part = self.rows.part
        raise ValueError(
            f"fully_shard: {part.name} {list(part.shape)} is a quantized Parameter, which must stay on its device; do "
            "not use CPUOffloadPolicy, or convert with master_weights=True"
        )


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
        parts = weight.qdata[rows], weight.scale, part, weight.dtype, weight.global_scale
        shard = QuantizedShard(*parts).inherit(weight)
        if pending is not None and pending.hp is not None:
            # The scales were computed from this rank's values; the first cast computes them from those of all ranks.
            shard.pending_master.hp, shard.pending_master.awaits_cast = pending.hp.detach()[rows], True
        chunks.append(shard)
    weight.padded = _Padded(chunks[-1])
    return tuple(chunks)


def _new_zeros(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Any:
    """Return the padded shard after `torch.chunk`, or a shard itself where FSDP2 pads it; otherwise plain zeros."""
    x: Any = args[0]
    shape = () if kwargs else args[1:]
    if isinstance(x, QuantizedShard):
        if shape == (x.part.padded_shape,) != (x.shape,):
            return x.detach()
    elif "padded" in vars(x) and shape == (x.padded.rows.part.padded_shape,):
        return vars(x).pop("padded")
    with _compat.no_torch_function():
        return func(*args, **kwargs)


for _cls in (BlockwiseFP8Tensor, NVFP4Tensor):
    _cls.implements_torch_function(torch.chunk)(_chunk)
    _cls.implements_torch_function(torch.Tensor.new_zeros)(_new_zeros)
QuantizedShard.implements_torch_function(torch.Tensor.new_zeros)(_new_zeros)
torch.serialization.add_safe_globals([ShardLayout])
