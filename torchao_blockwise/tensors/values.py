"""Functions of weights that are no operations: addresses, storages, NumPy arrays, deep copies and files.

A master weight gives its values' memory. A quantized tensor has an address, which distinguishes it from others, and
nothing to read there: its bytes are not the values that it stands for. Copies and files are made of the inner tensors:
PyTorch's own take a wrapper whose values begin inside a storage for a tensor with memory.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchao_blockwise import _compat
from torchao_blockwise._compat.torch_types import Args, Function, Kwargs, Types
from torchao_blockwise.tensors.blockwise_fp8 import BlockwiseFP8Tensor
from torchao_blockwise.tensors.copying import source_for
from torchao_blockwise.tensors.master_weight import MasterWeightTensor
from torchao_blockwise.tensors.nvfp4 import NVFP4Tensor
from torchao_blockwise.tensors.quantized import QuantizedTensor, parts_of
from torchao_blockwise.tensors.quantized_shard import QuantizedShard
from torchao_blockwise.tensors.reads import note_read
from torchao_blockwise.tensors.transposed_weight import TransposedWeight

# What gives a weight's memory or its values away.
_READS = [Tensor.__array__, Tensor.__dlpack__, Tensor.numpy, Tensor.storage, Tensor.tolist]
_STATISTICS = [torch.histc, Tensor.histc, torch.histogram, Tensor.histogram, torch.histogramdd]
_FINITE = [torch.isfinite, Tensor.isfinite]
# What a copy does not have: of FSDP2's last cast, and of the last state dict.
_OF_ONE_OBJECT = ("shard", "ready", "version", "saved_values")
_QUANTIZED = (BlockwiseFP8Tensor, NVFP4Tensor, QuantizedShard)


@MasterWeightTensor.implements_torch_function(Tensor.data_ptr)
def _address_of_values(func: Function, types: Types, args: Args, kwargs: Kwargs) -> int:
    note_read(args[0])
    return args[0].hp.data_ptr()


@TransposedWeight.implements_torch_function(Tensor.data_ptr)
def _address_of_weight(func: Function, types: Types, args: Args, kwargs: Kwargs) -> int:
    return args[0].weight.data_ptr()


@MasterWeightTensor.implements_torch_function(Tensor.untyped_storage)
def _storage_of_values(func: Function, types: Types, args: Args, kwargs: Kwargs) -> torch.UntypedStorage:
    """Asynchronous saving copies it. Compilers tell the wrappers that they trace apart by the wrappers' own."""
    hp = args[0].hp
    if type(hp) is torch.Tensor:
        return hp.untyped_storage()
    with _compat.no_torch_function():
        return func(*args)


@MasterWeightTensor.implements_torch_function([Tensor.is_shared, *_READS, *_STATISTICS])
def _of_values(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Any:
    """As of a plain tensor, which refuses `numpy()` where it requires a gradient."""
    note_read(args[0])
    weight, *others = args
    return func(weight.hp.detach().requires_grad_(weight.requires_grad), *others, **kwargs)


@MasterWeightTensor.implements_torch_function(Tensor.apply_)
def _apply_in_python(func: Function, types: Types, args: Args, kwargs: Kwargs) -> MasterWeightTensor:
    _of_values(func, types, args, kwargs)
    return args[0]


def _address(func: Function, types: Types, args: Args, kwargs: Kwargs) -> int:
    note_read(args[0])
    return args[0].qdata.data_ptr()


def _is_shared(func: Function, types: Types, args: Args, kwargs: Kwargs) -> bool:
    return all(t.is_shared() for t in args[0]._tensors())


def _share_memory(func: Function, types: Types, args: Args, kwargs: Kwargs) -> QuantizedTensor:
    """A wrapper has no storage that could be shared, its inner tensors have."""
    for t in args[0]._tensors():
        t.share_memory_()
    return args[0]


def _set_data(func: Function, types: Types, args: Args, kwargs: Kwargs) -> None:
    """`x.data = src`: takes over the payload of a tensor of the same kind, or of high precision quantized as `x` is."""
    x: QuantizedTensor = args[0]
    src = source_for("data", x, args[1])
    _, attributes = x.__tensor_flatten__()
    parts = {name: getattr(src, name) for name in parts_of(x)}
    # Raises where these are no parts of a tensor with the attributes of `x`.
    type(x).__tensor_unflatten__(parts, attributes, None, None)
    with _compat.no_torch_function():
        func(x, src)
    vars(x).update(parts)


def _of_decoded(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Which elements are finite, as PEFT asks of what it merges."""
    return func(args[0].dequantize())


def _refuse(func: Function, types: Types, args: Args, kwargs: Kwargs) -> NoReturn:
    # No NotImplementedError: safetensors takes that for a tensor without memory, and goes on by `data_ptr()`.
    raise TypeError(
        f"{func.__name__}: the memory of a {type(args[0]).__name__} holds {args[0].fmt.name} blocks, not its values; "
        "take weight.dequantize(), or model.state_dict()"
    )


def _contiguous(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Itself or a clone, as PyTorch has it: torchao's own leaves autograd out, and the weight without a gradient."""
    with _compat.no_torch_function():
        return func(*args, **kwargs)


def _deepcopy(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    x, memo = args
    if not x.is_leaf:
        # Refused as for a plain tensor.
        with _compat.no_torch_function():
            return func(x, memo)
    names, attributes = x.__tensor_flatten__()
    inner = copy.deepcopy({name: getattr(x, name) for name in names}, memo)
    other = type(x).__tensor_unflatten__(inner, attributes, None, None)
    vars(other).update(copy.deepcopy({k: v for k, v in vars(x).items() if k not in _OF_ONE_OBJECT}, memo))
    other.grad = copy.deepcopy(x.grad, memo)
    return other.requires_grad_(x.requires_grad)


def _reduce(func: Function, types: Types, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    return _compat.reduced_wrapper(args[0])


for _cls in (MasterWeightTensor, TransposedWeight, *_QUANTIZED):
    _cls.implements_torch_function(Tensor.contiguous)(_contiguous)
    _cls.implements_torch_function(Tensor.__deepcopy__)(_deepcopy)

for _cls in (MasterWeightTensor, TransposedWeight):
    _cls.implements_torch_function(Tensor.__reduce_ex__)(_reduce)

for _cls in _QUANTIZED:
    _cls.implements_torch_function(Tensor.data_ptr)(_address)
    _cls.implements_torch_function(Tensor.data.__set__)(_set_data)  # type: ignore[attr-defined]
    _cls.implements_torch_function(_FINITE)(_of_decoded)
    _cls.implements_torch_function(Tensor.is_shared)(_is_shared)
    _cls.implements_torch_function(Tensor.share_memory_)(_share_memory)
    _cls.implements_torch_function([*_READS, Tensor.apply_])(_refuse)
