"""WeightTensor, the base class of the tensor subclasses."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from typing import Any, SupportsIndex

from torch import Tensor
from torchao.utils import TorchAOBaseTensor
from typing_extensions import Self

from torchao_blockwise import _compat
from torchao_blockwise._compat import Args, Function, Kwargs, Types
from torchao_blockwise._names import shown
from torchao_blockwise.tensors.rounding import Keys, carry_key

# Attributes that are not copied: the source of a cast, FSDP2's last cast, and the values in the last state dict.
_OF_ONE_OBJECT = ("cast_of", "shard", "shard_version", "ready", "saved_values")

# How to multiply in low precision, for errors.
GEMM_CALLS = (
    "call torch.nn.functional.linear (or nn.Linear; grouped_mm or bmm for experts, in transformers "
    'model.set_experts_implementation("grouped_mm"); for a DTensor, nn.Linear or one of these with x.to_local() and '
    "weight.to_local())"
)


class WeightTensor(TorchAOBaseTensor):
    """A tensor subclass that is hashed, copied and saved by its inner tensors.

    (PyTorch would treat a wrapper whose values begin inside a storage like a tensor with memory.)
    layer: the weight's name in the converted model, for errors. rounding_key, rounding_keys: for stochastic rounding of
        gradients; see `tensors.rounding`.
    """

    layer: str = ""
    rounding_key: Tensor | None = None
    rounding_keys: Keys | None = None

    def inherit(self, source: WeightTensor, *, copied: bool = False) -> Self:
        """Take the layer and the key of `source`, from which this tensor was derived. copied: copy the key."""
        if source.layer and not self.layer:
            self.layer = source.layer
        carry_key(source, self, copied=copied)
        return self

    def _stable_hash_for_caching(self) -> str:
        """Return a hash of the type, the attributes and the inner tensors, on which a compiled graph may depend.

        A config is an attribute, and its repr includes all fields.
        """
        names, attributes = self.__tensor_flatten__()
        inner = [_described(getattr(self, name)) for name in names]
        kind = type(self).__module__, type(self).__qualname__
        described = repr((kind, sorted(attributes.items()), names, inner, self.requires_grad, self.is_inference()))
        return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            # Raises, as for a plain tensor.
            with _compat.no_torch_function():
                return super().__deepcopy__(memo)
        names, attributes = self.__tensor_flatten__()
        inner = copy.deepcopy({name: getattr(self, name) for name in names}, memo)
        other = type(self).__tensor_unflatten__(inner, attributes, None, None)
        kept = {name: value for name, value in vars(self).items() if name not in _OF_ONE_OBJECT}
        vars(other).update(copy.deepcopy(kept, memo))
        other.grad = copy.deepcopy(self.grad, memo)
        return other.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _compat.reduced_wrapper(self)

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])

    def share_memory_(self) -> WeightTensor:
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self


@WeightTensor.implements_torch_function(Tensor.contiguous)
def _contiguous(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Call PyTorch's implementation, because torchao's bypasses autograd, so the weight would get no gradient."""
    with _compat.no_torch_function():
        return func(*args, **kwargs)


def layers_of(leaves: Iterable[object], unnamed: str = "a converted weight") -> str:
    """Return the first names of the weights among `leaves`, or `unnamed` if they have none."""
    return shown(sorted({x.layer for x in leaves if isinstance(x, WeightTensor) and x.layer})) or unnamed


def _described(inner: Tensor) -> tuple[object, ...]:
    own = inner._stable_hash_for_caching() if hasattr(inner, "_stable_hash_for_caching") else ""
    layout = inner.dtype, tuple(inner.shape), inner.stride(), inner.storage_offset(), str(inner.device)
    return type(inner).__qualname__, own, layout, inner.requires_grad, inner.is_inference()
