"""TransposedWeight: a view of expert weights with the last two dims swapped, as models pass them to grouped GEMMs.

`torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=..)` takes [E, K, N], but [E, N, K] is stored. A
strided view of the values would be copied before quantization, and a packed payload has no such view. This view
refers to the weight instead.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import Self

from torchao_blockwise import _compat
from torchao_blockwise._compat import Args, Kwargs, Operation, Types, pytree
from torchao_blockwise.tensors.base import WeightTensor

aten = torch.ops.aten

# Operations that are applied to the weight, and whose result is transposed again.
_COMMUTES = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}


class TransposedWeight(WeightTensor):
    """A converted weight [E, N, K] as [E, K, N]: the result of `transpose(-2, -1)`, `.mT` and `permute(0, 2, 1)`.

    Grouped GEMMs quantize `weight`. Copies and casts are transposed weights, and a second transpose returns the weight.
    Any other operation is applied to a transposed view of the values or payload, which is exact, or raises: NVFP4 packs
    two elements in a byte and has no such view.
    weight: the `MasterWeightTensor`, `BlockwiseFP8Tensor` or `NVFP4Tensor`, whose memory is shared.
    """

    tensor_data_names = ["weight"]  # noqa: RUF012  # torchao copies it as a list
    tensor_attribute_names: list[str] = []  # noqa: RUF012

    weight: torch.Tensor

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Self:
        shape, strides = ((t[0], t[2], t[1]) for t in (weight.shape, weight.stride()))
        x = _compat.make_wrapper(cls, weight, shape, strides, storage_offset=weight.storage_offset())
        x.weight = weight
        return x

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values of a quantized weight as a plain tensor [E, K, N]. dtype: default the reported dtype."""
        return self.weight.dequantize(dtype).transpose(-2, -1)  # type: ignore[call-arg]  # a subclass's

    def data_ptr(self) -> int:
        """Return the address of the weight's memory."""
        return self.weight.data_ptr()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"TransposedWeight(shape={tuple(self.shape)}, of {self.weight!r})"

    @classmethod
    @_compat.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Types, args: Args, kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (result := _compat.decomposed(func, args, kwargs)) is not NotImplemented:
            return result
        if func in _COMMUTES:
            return cls(func(args[0].weight, *args[1:], **kwargs))
        if swaps_last_dims(func, args):
            return args[0].weight.detach()
        views = pytree.tree_map_only(cls, lambda x: x.weight.transposed_view(), (args, kwargs))
        out = func(*views[0], **views[1])
        # In-place operations return their argument.
        return args[0] if _compat.schema_of(func).is_mutable and isinstance(out, torch.Tensor) else out


def swaps_last_dims(func: Operation, args: Args) -> bool:
    """Whether the operation `func(*args)` only swaps the last two dims of a tensor."""
    if func is aten.t.default:
        return args[0].dim() == 2
    if func not in (aten.transpose.int, aten.permute.default) or args[0].dim() < 2:
        return False
    x, *dims = args
    last = x.dim() - 2, x.dim() - 1
    if func is aten.transpose.int:
        return sorted(d % x.dim() for d in dims) == [*last]
    return [d % x.dim() for d in dims[0]] == [*range(last[0]), *reversed(last)]
