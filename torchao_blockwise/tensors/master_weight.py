"""MasterWeightTensor: high-precision values that layers quantise when they use them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torchao.utils import TorchAOBaseTensor

from torchao_blockwise import _compat, _compat_fsdp
from torchao_blockwise._compat import pytree
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.tensors import fsdp, weight_cache
from torchao_blockwise.tensors.caching import stable_hash
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.transposed_weight import TransposedWeight, swaps_last_dims

aten = torch.ops.aten

# What stays a master weight: moves, copies and views. Everything else computes on the values and gives plain tensors.
_SAME_VALUES = {aten.alias.default, aten.detach.default}
_KEEPS_TYPE = {
    aten.as_strided.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.empty_like.default,
    aten.expand.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._pin_memory.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
}
# Some experts are master weights still; rows of a matrix, which embeddings look up so, are values.
_PICKS_EXPERTS = {aten.index.Tensor, aten.index_select.default}
_GATHERS = _compat.functional_gathers()
_KEEPS_TYPE |= _GATHERS | {aten.constant_pad_nd.default}
_PRODUCTS = {
    aten.addbmm.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.dot.default,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.mv.default,
    aten._grouped_mm.default,
    aten._trilinear.default,
}


@dataclass(frozen=True)
class _Rounding:
    """What `weight.to(dtype)` was made of: the same values as long as neither the weight nor the copy changes."""

    hp: weakref.ref
    version: int
    own_version: int


class MasterWeightTensor(TorchAOBaseTensor):
    """A weight that holds high-precision values `hp` and is quantised when a layer uses it.

    To optimizers, initialisers and state dicts it is the high-precision tensor. `F.linear`, and `F.grouped_mm` on
    experts [E, N, K], quantise it once per change of value, over any number of microbatches, and run the three GEMMs as
    `config` says. A product that would run in high precision without being seen raises. Where FSDP2 shards it, ranks
    gather it quantised.

    hp: [.., N, K] bf16 | f16 | f32; values are shared with it, not copied.
    config: a `BlockwiseFP8TrainingConfig` or `NVFP4TrainingConfig`.
    Raises TypeError for another dtype or config.
    """

    tensor_data_names = ["hp"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["config"]  # noqa: RUF012

    @staticmethod
    def __new__(cls, hp: torch.Tensor, config: TrainingConfig):
        return _compat.make_wrapper(
            cls,
            hp.shape,
            inner=hp,
            strides=hp.stride(),
            storage_offset=hp.storage_offset(),
            dtype=hp.dtype,
            device=hp.device,
        )

    def __init__(self, hp: torch.Tensor, config: TrainingConfig):
        if hp.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"MasterWeightTensor: hp must be bfloat16, float16 or float32, got {hp.dtype}")
        if not isinstance(config, TrainingConfig):
            raise TypeError(f"MasterWeightTensor: config must be a TrainingConfig, got {type(config).__name__}")
        self.hp = hp.detach() if hp.requires_grad else hp
        self.config = config

    # Of what `to(dtype)` gives; no part of a weight's state.
    _rounding: _Rounding | None = None

    @property
    def source(self) -> tuple[torch.Tensor, torch.dtype | None]:
        """(hp, dtype): whose values, rounded to `dtype`, are this one's; (its own, None) if it is no copy of others.

        Models cast weights on every use; by this the quantised copy of the rounded values is kept with the weight.
        """
        made = self._rounding
        hp = None if made is None else made.hp()
        if made is None or hp is None:
            return self.hp, None
        versions = _compat.version_of(hp), _compat.version_of(self.hp)
        return (hp, self.dtype) if versions == (made.version, made.own_version) else (self.hp, None)

    def transposed_view(self) -> MasterWeightTensor:
        """[.., K, N] over the same memory, strided; its quantised copy is another one."""
        with _compat.counting_changes():
            return type(self)(self.hp.transpose(-2, -1), self.config)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantised copies that are kept between uses now."""
        return weight_cache.kept_bytes(self.hp)

    def quantized(self, *, columnwise: bool = False):
        """The operand that products use: `hp` quantised in `config.weight_format`, rowwise or columnwise."""
        return weight_cache.quantized_weight(
            self.hp,
            self.config.weight_format,
            columnwise=columnwise,
            keep=self.config.kept_copies,
            power_of_2_scales=self.config.power_of_2_scales,
        )

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """FSDP2 calls it for what this rank sends; see `tensors.fsdp`."""
        return fsdp.pre_all_gather(self, module)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """FSDP2 calls it for the weight that layers use until it is sharded again: a quantised tensor."""
        return fsdp.post_all_gather(self, all_gather_outputs, metadata, param_dtype, out)

    def _stable_hash_for_caching(self) -> str:
        return stable_hash(self)

    def __repr__(self, *, tensor_contents=None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"MasterWeightTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"quantized_to={self.config.weight_format.name}{grad})"
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is aten.cat.default and _compat_fsdp.flattens_for_fsdp1():
            raise NotImplementedError(
                "FullyShardedDataParallel (FSDP1) makes plain tensors of parameters: converted layers would train in "
                "high precision; use torch.distributed.fsdp.fully_shard (FSDP2), or leave the model unconverted"
            )
        if func in _PRODUCTS:
            raise NotImplementedError(
                f"{func}: a product with a MasterWeightTensor would run in high precision; use "
                "torch.nn.functional.linear (or nn.Linear; grouped_mm for experts) for low precision, or weight.hp for "
                "high precision"
            )
        if (result := _compat.decomposed(func, args, kwargs or {})) is not NotImplemented:
            return result
        if func in _SAME_VALUES or (func is aten.view.default and list(args[1]) == list(args[0].shape)):
            # The very same `hp`, so that its quantised copy is found again: checkpointing detaches what it saves, and
            # what a DTensor holds is asked for as a view.
            return cls(args[0].hp, args[0].config)
        if swaps_last_dims(func, args):
            return TransposedWeight(args[0])
        masters: list[MasterWeightTensor] = []

        def unwrap(x):
            masters.append(x)
            return x.hp

        plain_args = pytree.tree_map_only(cls, unwrap, args)
        plain_kwargs = pytree.tree_map_only(cls, unwrap, kwargs or {})
        with _compat.counting_changes():
            out = func(*plain_args, **plain_kwargs)
        if _compat.schema_of(func).is_mutable:
            for master in _written(func, args, kwargs or {}):
                weight_cache.note_change(master.hp)
                if not master.is_inference():
                    # Foreach and fused operations count no change of a subclass, which is what eager layers save.
                    torch.autograd.graph.increment_version(master)
            return _same_objects(out, args, kwargs or {})
        if _keeps_type(func, masters[0]) and _is_float(out):
            config = masters[0].config
            if func is aten._to_copy.default:
                fsdp.carry_shard(masters[0].hp, out)
                return _rounded(masters[0], cls(out, config))
            if func in _GATHERS:
                fsdp.warn_of_high_precision_gather()
                out = _compat.waited(out)
            return pytree.tree_map_only(torch.Tensor, lambda x: cls(x, config), out)
        return out


@MasterWeightTensor.implements_torch_function(torch.Tensor.data.__set__)
def _set_data(func, types, args, kwargs):
    """`weight.data = x` takes over the values of `x`, plain or a master weight."""
    weight, data = args
    new = data if isinstance(data, MasterWeightTensor) else MasterWeightTensor(data.detach(), weight.config)
    with _compat.no_torch_function():
        func(weight, new)
    weight.hp = new.hp


@MasterWeightTensor.implements_torch_function(torch.Tensor.share_memory_)
def _share_memory(func, types, args, kwargs):
    """A wrapper has no storage that could be shared, its values have."""
    args[0].hp.share_memory_()
    return args[0]


def _keeps_type(func, weight: MasterWeightTensor) -> bool:
    return func in _KEEPS_TYPE or (func in _PICKS_EXPERTS and weight.dim() == 3)


def _rounded(weight: MasterWeightTensor, copy: MasterWeightTensor) -> MasterWeightTensor:
    """`copy`, that knows it is `weight` in another dtype."""
    hp, own = weight.hp, copy.hp
    if hp.dtype != own.dtype and hp.device == own.device and not (hp.is_inference() or own.is_inference()):
        copy._rounding = _Rounding(weakref.ref(hp), _compat.version_of(hp), _compat.version_of(own))
    return copy


def _is_float(out) -> bool:
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _written(func, args, kwargs) -> list[MasterWeightTensor]:
    """The master weights among the arguments that `func` changes."""
    arguments = _compat.schema_of(func).arguments
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {**dict(zip((a.name for a in arguments), args)), **kwargs}
    leaves = pytree.tree_leaves([given.get(name) for name in names])
    return [x for x in leaves if isinstance(x, MasterWeightTensor)]


def _same_objects(out, args, kwargs):
    """In-place operations return the tensor that they were given, and lists of them return nothing."""
    return kwargs.get("out", args[0]) if isinstance(out, torch.Tensor) else out
