"""MasterWeightTensor: high-precision values that layers quantize when they use them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torchao.utils import TorchAOBaseTensor
from typing_extensions import Self

from torchao_blockwise import _compat
from torchao_blockwise._compat import Args, Function, Kwargs, Operation, Types, pytree, torch_fsdp
from torchao_blockwise._compat.modes import FakeTensor
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, Operand
from torchao_blockwise.tensors import fsdp
from torchao_blockwise.tensors.base import GEMM_CALLS, WeightTensor, layers_of
from torchao_blockwise.tensors.config import TrainingConfig, config_of_groups
from torchao_blockwise.tensors.operations import Result, is_sum, is_update, result_of
from torchao_blockwise.tensors.transposed_weight import TransposedWeight, swaps_last_dims
from torchao_blockwise.tensors.weight_operands import kept_copies, weight_operand, weight_options
from torchao_blockwise.tensors.weight_uses import note_read

if TYPE_CHECKING:
    from torchao_blockwise.tensors.quantized_shard import QuantizedShard

aten = torch.ops.aten

# Plain aliases of a weight: checkpointing detaches saved tensors, and a DTensor returns a view of its local tensor.
_ALIASES = {aten.alias.default, aten.detach.default}
# Operations that return new memory without values, in any dtype.
_NEW = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default, aten.new_zeros.default}
_JOINS = {aten.cat.default, aten.stack.default}
# Attributes that an alias shares with its weight; they are meaningless in copies and in other models.
_OF_ALIASES = "cast_of", "shard", "shard_version"


class MasterWeightTensor(WeightTensor):
    """A weight that holds high-precision values `hp` and is quantized when a layer uses it.

    Optimizers, initializers and state dicts use the high-precision values. `F.linear`, and `F.grouped_mm` with experts
    [E, N, K], quantize them in forward and in backward, and run the three GEMMs as configured by `config`.
    `weights_unchanged` keeps the quantized copies for several passes. Operations that may be GEMMs in high precision
    raise an error (`tensors.operations`). FSDP2 all-gathers the quantized weight.

    hp: [.., N, K] bf16 | f16 | f32; the weight shares its memory.
    config: a `BlockwiseFP8TrainingConfig` or `NVFP4TrainingConfig`.
    rounding_key: the key of stochastic rounding; see `tensors.rounding`.
    Raises TypeError for another dtype or config.
    """

    tensor_data_names = ["hp"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names = ["config"]  # noqa: RUF012
    optional_tensor_data_names = ["rounding_key"]  # noqa: RUF012

    @staticmethod
    def __new__(cls, hp: torch.Tensor, config: TrainingConfig, rounding_key: torch.Tensor | None = None) -> Self:
        return _compat.make_wrapper(cls, hp, hp.shape, hp.stride(), storage_offset=hp.storage_offset())

    def __init__(self, hp: torch.Tensor, config: TrainingConfig, rounding_key: torch.Tensor | None = None):
        if isinstance(hp, TorchAOBaseTensor) or hp.layout is not torch.strided:
            got = f"a {type(hp).__name__} in {hp.layout}"
            raise TypeError(f"MasterWeightTensor: hp must be a plain strided tensor, got {got}; dequantize() it")
        if hp.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"MasterWeightTensor: hp must be bfloat16, float16 or float32, got {hp.dtype}; cast it")
        if not isinstance(config, TrainingConfig):
            raise TypeError(f"MasterWeightTensor: config must be a TrainingConfig, got {type(config).__name__}")
        self.hp = hp.detach() if hp.requires_grad else hp
        self.config = config
        if rounding_key is not None:
            self.rounding_key = rounding_key

    # If this is a cast whose source GEMMs may read: (the source's values, this tensor's version when it was created).
    # Not part of a weight's state, nor is the next attribute.
    cast_of: tuple[torch.Tensor, int] | None = None
    # The quantized shard that FSDP2 gathers, or the shard's layout if it gathers high-precision values.
    shard: QuantizedShard | fsdp.ShardLayout | None = None
    # The version of the values from which the shard was computed; None if it is unknown.
    shard_version: int | None = None

    @property
    def fmt(self) -> BlockFormat:
        """The format of the operands of GEMMs."""
        return self.config.weight_format

    @property
    def source(self) -> tuple[torch.Tensor, torch.dtype | None]:
        """(hp, dtype): the values that GEMMs read, rounded to `dtype`; (own values, None) if this is not a cast.

        Models cast weights on every use. GEMMs with a cast that autograd records read the current values of the source
        weight, in forward and backward, so that the cast is neither kept nor saved for backward. If the cast was
        modified afterwards, GEMMs read its own values.
        """
        if self.cast_of is None or _compat.version_of(self.hp) != self.cast_of[1]:
            return self.hp, None
        return self.cast_of[0], self.dtype

    def dequantize(self) -> torch.Tensor:
        """Return a copy of the values. PEFT merges adapters into it."""
        note_read(self)
        return self.hp.clone()

    def transposed_view(self) -> MasterWeightTensor:
        """Return a strided view [.., K, N] of the same memory."""
        with _compat.counting_changes():
            return self._like(self.hp.transpose(-2, -1))

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantized copies that `weights_unchanged` currently keeps."""
        kept = kept_copies(self.hp)
        return 0 if kept is None else kept.nbytes

    def quantized(self, *, columnwise: bool = False) -> Operand:
        """Return the operand of GEMMs: `hp` quantized in `fmt`, rowwise or columnwise."""
        return weight_operand(self.hp, weight_options(self.config, not columnwise, columnwise))

    # FSDP2 calls them to get the tensors that this rank sends, and the weight that layers use until it is resharded.
    fsdp_pre_all_gather = fsdp.pre_all_gather
    fsdp_post_all_gather = fsdp.post_all_gather

    @_compat.never_compiled
    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Set the storage, as `torch.Tensor.set_` does."""
        # A weight and its values share one storage. When PyTorch creates fake tensors of them, it also sets the storage
        # of the fake values, which is on the meta device, on the fake weight.
        if args and isinstance(self.hp, FakeTensor) and args[0] is self.hp.untyped_storage():
            return self
        return super().set_(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("layer", "rounding_keys", *_OF_ALIASES)
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the values, which asynchronous saving copies; compilers need the wrapper's own to tell
        wrappers apart."""
        return self.hp.untyped_storage() if type(self.hp) is torch.Tensor else super().untyped_storage()

    def __format__(self, spec: str) -> str:
        # PyTorch formats only the number of a plain tensor.
        return format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"MasterWeightTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"quantized_to={self.fmt.name}{grad})"
        )

    @classmethod
    @_compat.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Types, args: Args, kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (result := _compat.decomposed(func, args, kwargs)) is not NotImplemented:
            return result
        if func in _ALIASES or (func is aten.view.default and list(args[1]) == list(args[0].shape)):
            # Keep the same `hp` object, because kept copies are an attribute of it.
            alias = args[0]._like(args[0].hp)
            vars(alias).update({name: vars(args[0])[name] for name in _OF_ALIASES if name in vars(args[0])})
            return alias
        if swaps_last_dims(func, args) and args[0].dim() == 3:
            return TransposedWeight(args[0])
        masters: list[MasterWeightTensor] = []

        def unwrap(x: MasterWeightTensor) -> torch.Tensor:
            masters.append(x)
            return x.hp

        plain_args = pytree.tree_map_only(cls, unwrap, args)
        first_alone = len(masters) == 1 and args[0] is masters[0]
        plain_kwargs = pytree.tree_map_only(cls, unwrap, kwargs)
        first = masters[0]
        result = result_of(func, first.dim(), first_alone)
        if result is Result.REFUSED:
            others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x is not first]
            is_written = [x is first for x in _written(func, args, kwargs)] == [True]
            if not is_written or not is_update(func, first.shape, others):
                raise NotImplementedError(_refusal(func, masters))
            result = Result.PLAIN
        if result is not Result.WEIGHT:
            for master in masters:
                note_read(master)
        if torch.Tag.inplace_view in func.tags and args[0] is first:
            # As with plain tensors, aliases keep their shape and strides.
            with _compat.counting_changes():
                hp = func(first.hp.detach(), *plain_args[1:], **plain_kwargs)
            _take_over(first, first._like(hp))
            return first
        with _compat.counting_changes():
            out = func(*plain_args, **plain_kwargs)
        if _compat.schema_of(func).is_mutable:
            # Autograd checks the versions of saved tensors: eager layers save the weight, compiled ones its values.
            # Fused and foreach operations do not increment the version of a subclass.
            written = [x for master in _written(func, args, kwargs) for x in (master, master.hp)]
            torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
            # In-place operations return their argument; their foreach forms return nothing.
            return kwargs.get("out", args[0]) if isinstance(out, torch.Tensor) else out
        if result is Result.PLAIN:
            return out
        if func.namespace == "_c10d_functional":
            _warn_of_high_precision_gather()
            out = _compat.waited(out)
        shapes = [master.shape for master in masters] if result is Result.DERIVED else None
        if shapes is not None and not _stays_weight(func, args, masters):
            return out

        # Concatenated flat weights, as in `parameters_to_vector`, are not a weight.
        flat = func in _JOINS and first.dim() < 2
        # Views of a weight that does not change do not change either.
        kept = kept_copies(first.hp) if _compat.is_view(func) else None

        def rewrap(x: torch.Tensor) -> torch.Tensor:
            fits = x.is_floating_point() and not (flat and x.dim() < 2) and (shapes is None or x.shape in shapes)
            if fits and x.dtype not in HIGH_PRECISION_DTYPES and func not in _NEW:
                raise NotImplementedError(_refusal_of_dtype(func, masters, x.dtype))
            if not fits or x.dtype not in HIGH_PRECISION_DTYPES:
                return x
            splits_rows = x.dim() > first.dim() == 2 and func not in _JOINS
            if kept is not None:
                x.kept_copies = kept  # type: ignore[attr-defined]
            return first._like(x, config_of_groups(first.config) if splits_rows else None)

        out = pytree.tree_map_only(torch.Tensor, rewrap, out)
        if func is aten.clone.default and isinstance(out, cls):
            out.inherit(first, copied=True)
        if func is aten._to_copy.default and isinstance(out, cls):
            fsdp.carry_shard(first, out)
            _link(first, out)
        return out

    def _like(self, hp: torch.Tensor, config: TrainingConfig | None = None) -> MasterWeightTensor:
        """Return a weight of the same layer with other values. config: default its own."""
        return type(self)(hp, config or self.config).inherit(self)


@functools.cache
def _warn_of_high_precision_gather() -> None:
    warnings.warn(
        "a sharded master weight is all-gathered in high precision by DTensor and quantized afterwards; use "
        "torch.distributed.fsdp.fully_shard to gather it quantized",
        stacklevel=2,
    )


def _refusal_of_dtype(func: Operation, masters: list[MasterWeightTensor], dtype: torch.dtype) -> str:
    return (
        f"{func}: {layers_of(masters)} can only be bfloat16, float16 or float32, got {dtype}; for other dtypes, use "
        "weight.hp; before you apply another recipe (torchao's float8, accelerate's mixed_precision='fp8'), call "
        "unconvert(model)"
    )


def _refusal(func: Operation, masters: list[MasterWeightTensor]) -> str:
    return (
        f"{func}: {layers_of(masters)} would silently be used in high precision; for low precision, {GEMM_CALLS}; "
        "for high precision, use weight.hp, or exclude the layer (filter_fn=skip_fqns(...)); for an optimizer that "
        "does this, convert with master_weights=False and use torchao_blockwise.distributed.MasterWeightOptimizer"
    )


def _stays_weight(func: Operation, args: Args, masters: list[MasterWeightTensor]) -> bool:
    """Whether the result of an operation on a weight, in the weight's shape, is a weight.

    Gradients are not. Under `no_grad`, neither are sums whose first operand is another tensor, because optimizers
    compute `grad.add(w)`.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    return not _compat.in_backward() and (pytree.tree_leaves(args)[0] is masters[0] or not is_sum(func))


@MasterWeightTensor.implements_torch_function(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Function, types: Types, args: Args, kwargs: Kwargs) -> None:
    """Set the values of `weight` to those of `x`, a weight or a plain tensor, for `weight.data = x`."""
    weight, data = args
    if not isinstance(data, MasterWeightTensor):
        torch_fsdp.check_not_flattened(data, layers_of([weight]))
    new = data if isinstance(data, MasterWeightTensor) else MasterWeightTensor(data.detach(), weight.config)
    _take_over(weight, new)


def _link(weight: MasterWeightTensor, cast: MasterWeightTensor) -> None:
    """Let GEMMs with `cast`, which is `weight` in another dtype, read the weight instead.

    This applies if autograd records the cast, or if a scope declares that the weight does not change. Otherwise a cast
    is a copy.
    """
    recorded = torch.is_grad_enabled() and weight.requires_grad
    is_cast = weight.dtype != cast.dtype and weight.device == cast.device and not cast.hp.is_inference()
    if is_cast and (recorded or kept_copies(weight.hp) is not None):
        cast.cast_of = weight.hp, _compat.version_of(cast.hp)


def _take_over(weight: MasterWeightTensor, new: MasterWeightTensor) -> None:
    """Give `weight` the content of `new`; it stays the same object."""
    with _compat.no_torch_function():
        weight.data = new
    weight.hp, weight.cast_of = new.hp, None
    # A weight keeps its random bits, which may need a key on the device of the new values.
    weight.inherit(new if weight.rounding_key is None else weight)
    weight.shard = None


def _written(func: Operation, args: Args, kwargs: Kwargs) -> list[MasterWeightTensor]:
    """Return the master weights among the arguments that `func` modifies."""
    arguments = _compat.schema_of(func).arguments
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    given = {**dict(zip((a.name for a in arguments), args)), **kwargs}
    leaves = pytree.tree_leaves([given.get(name) for name in names])
    return [x for x in leaves if isinstance(x, MasterWeightTensor)]


def _of_values(name: str) -> Callable[..., Any]:
    """Return the tensor method `name`, which exposes the weight's memory or values; it raises as for a plain tensor."""

    def method(weight: MasterWeightTensor, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the values."""
        note_read(weight)
        return getattr(weight.hp.detach().requires_grad_(weight.requires_grad), name)(*args, **kwargs)

    return method


for _name in ("__array__", "__dlpack__", "apply_", "data_ptr", "numpy", "storage", "tolist"):
    setattr(MasterWeightTensor, _name, _of_values(_name))
