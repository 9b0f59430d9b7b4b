"""QuantizedTensor, the base class of both formats: metadata, files, printing, and errors that name a fix.

A quantized tensor reports the shape and dtype of the high-precision tensor that it represents. No operation dequantizes
implicitly: it is either exact on the payload (`quantized_ops`), or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor
from typing_extensions import Self

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat import Args, Function, Kwargs, Operation, Types
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, Operand
from torchao_blockwise.tensors.base import GEMM_CALLS, WeightTensor, layers_of
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.state_values import plain_values, same_bits
from torchao_blockwise.tensors.weight_uses import note_read

_F = TypeVar("_F", bound=Callable[..., Any])
_REMEDY = "take all parts from one tensor, or create it with from_hp"


class QuantizedTensor(WeightTensor):
    """Base of tensors that are stored as rowwise payload and scales.

    Subclasses list their tensors and attributes, and define `fmt`, `scaled_shape`, `_requantize(hp)` and `from_hp`.
    """

    # The names by which torchao flattens the tensor.
    tensor_data_names: list[str]
    tensor_attribute_names: list[str]
    config: TrainingConfig | None
    qdata: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    # Only for weights that train; not part of a weight's state.
    pending_master: PendingMaster | None = None
    # Whether it is an alias of a weight that trains, such as `weight.data`.
    trains: bool = False
    # The values of this weight in the last state dict, while that is alive.
    saved_values: weakref.ref[torch.Tensor] | None = None

    @property
    def fmt(self) -> BlockFormat:
        raise NotImplementedError

    @property
    def scaled_shape(self) -> Sequence[int]:
        """The shape [.., N, K] of the tensor that has these scales."""
        return self.qdata.shape

    def _set_parts(
        self, qdata: Tensor, scale: Tensor, global_scale: Tensor | None, config: TrainingConfig | None
    ) -> None:
        """Set the parts in a constructor, after other attributes.

        Raises TypeError or ValueError if they do not match, or cannot report their dtype or train with `config`.
        """
        self.qdata, self.scale, self.config = qdata, scale, config
        if global_scale is not None:
            self.global_scale = global_scale
        name = type(self).__name__
        if (dtype := self.dtype) not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{name}: dtype must be bfloat16, float16 or float32, got {dtype}; dequantize() for others")
        if config is not None and not isinstance(config, TrainingConfig):
            raise TypeError(f"{name}: config must be a TrainingConfig or None, got {type(config).__name__}")
        if config is not None and config.weight_format.element is not self.fmt.element:
            trains = config.weight_format.name
            raise ValueError(
                f"{name}: a {type(config).__name__} trains {trains}, not {self.fmt.name}; pass config=None"
            )
        self._check()

    def _check(self, columns: int | None = None) -> None:
        """Raise TypeError or ValueError unless the parts match.

        Kernels read sizes only from the payload, and parts come from files, gathers and callers. So parts are checked
        when a tensor is created, including views and copies, and again when they become an operand, because attributes
        can be set later. Symbolic sizes are not checked: compilers trace tensors that were checked before.
        columns: of the payload, if it has only some of those of `scaled_shape`.
        """
        qdata, scale, global_scale = self.qdata, self.scale, self.global_scale
        name, fmt, shape = type(self).__name__, self.fmt, self.scaled_shape
        for x in (qdata, scale) if global_scale is None else (qdata, scale, global_scale):
            if isinstance(x, TorchAOBaseTensor) or x.layout is not torch.strided or x.device != qdata.device:
                wanted = f"plain, strided and on {qdata.device}"
                got = f"a {type(x).__name__} in {x.layout} on {x.device}"
                raise TypeError(f"{name}: qdata and scales must be {wanted}, got {got}; {_REMEDY}")
        if qdata.dtype is not fmt.element.storage_dtype or scale.dtype is not fmt.scale_dtype:
            wanted, got = f"{fmt.element.storage_dtype} and {fmt.scale_dtype}", f"{qdata.dtype} and {scale.dtype}"
            raise TypeError(f"{name}: qdata and scale in {fmt.name} must be {wanted}, got {got}; {_REMEDY}")
        if global_scale is None:
            fits = not fmt.has_global_scale
        else:
            fits = fmt.has_global_scale and global_scale.dtype is torch.float32
            # One for all matrices, or one for each.
            fits = fits and (global_scale.dim() == 0 or global_scale.shape == torch.Size(shape[:-2]))
        if not fits:
            each = f", or one for each matrix, {list(shape[:-2])}" if len(shape) > 2 else ""
            wanted = f"a float32 scalar{each}" if fmt.has_global_scale else "None"
            got = "None" if global_scale is None else f"{global_scale.dtype} of shape {list(global_scale.shape)}"
            raise ValueError(f"{name}: global_scale in {fmt.name} must be {wanted}, got {got}; {_REMEDY}")
        if len(shape) < 2:
            raise ValueError(f"{name}: the tensor must be [.., N, K], got shape {list(shape)}; reshape it first")
        if type(qdata.numel()) is not int or type(scale.numel()) is not int:
            return
        # Computed here, because every view and GEMM calls this method.
        block_rows, block_columns = fmt.block
        grid = (*shape[:-2], -(-shape[-2] // block_rows), -(-shape[-1] // block_columns))
        columns = shape[-1] if columns is None else columns
        if scale.shape != grid or qdata.shape[-1] != -(-columns // fmt.element.per_byte):
            wanted = f"scale {list(grid)} and rows of {fmt.element.packed(columns)} in qdata"
            got = f"{list(scale.shape)} and {list(qdata.shape)}"
            raise ValueError(f"{name}: a tensor {list(shape)} in {fmt.name} has {wanted}, got {got}; {_REMEDY}")

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the tensors that hold the values, by name."""
        return {name: getattr(self, name) for name in self.__tensor_flatten__()[0] if name != "rounding_key"}

    def _make(self, **changed: Any) -> Self:
        """Return a tensor of the same layer and key, with parts and attributes replaced by those that are not None."""
        changed = {name: value for name, value in changed.items() if value is not None}
        made: Self = type(self).__tensor_unflatten__(
            self.parts() | changed, self.__tensor_flatten__()[1] | changed, None, None
        )
        return made.inherit(self)

    def _requantize(self, hp: torch.Tensor) -> QuantizedTensor:
        """Quantize `hp` like this tensor."""
        raise NotImplementedError

    def operand(self) -> Operand:
        """Return the rowwise operand for `ops.matmul`."""
        return Operand(*self.operand_tensors(), self.fmt.name)

    def operand_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (qdata, scale, global_scale). In compiled code, methods can return only tensors."""
        # Kernels rely on these, and attributes may have been set since the tensor was created.
        self._check()
        return self.qdata, self.scale, self.global_scale

    def columnwise(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (qdata [.., K, N], scale [.., K blocks, N blocks]), the exact transpose.

        It is not stored: a field that appears later changes the flattened structure, which causes recompilation, and
        nothing would free it. Raises ValueError for blocks that are not square.
        """
        copy = ops.transpose(self.operand(), columns=self.shape[-1])
        return copy.qdata, copy.scale

    def transposed_view(self) -> Self:
        """Return a strided view [.., K, N] of the same memory; raise NotImplementedError for packed elements."""
        if self.fmt.element.per_byte > 1:
            raise NotImplementedError(
                f"transpose: {type(self).__name__} packs two elements in a byte, so its transpose cannot be a view; "
                "use .columnwise(), or F.linear, which transposes internally"
            )
        qdata, scale = self.qdata.transpose(-2, -1), self.scale.transpose(-2, -1)
        return self._make(qdata=qdata, scale=scale, columns=self.shape[-2])

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return qdata · scale [· global_scale] as a plain tensor [.., N, K] of `dtype`, default the reported dtype."""
        note_read(self)
        dtype = self.dtype if dtype is None else dtype
        return ops.dequantize(self.operand(), dtype=dtype, columns=self.shape[-1])

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # a property of PyTorch's too
        """Bytes of payload and scales."""
        return sum(t.nbytes for t in self.parts().values())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle payload and scales as bytes, because pickle does not support fp8 storages."""
        names, attributes = self.__tensor_flatten__()
        tensors = {name: (as_bits(getattr(self, name)), getattr(self, name).dtype) for name in names}
        is_parameter = {"_is_param": True} if isinstance(self, torch.nn.Parameter) else {}
        return _rebuild, (type(self), tensors, attributes, is_parameter, self.requires_grad)

    def data_ptr(self) -> int:
        """Return an address that distinguishes the tensor from others; it does not point to values."""
        note_read(self)
        return self.qdata.data_ptr()

    def _refuse_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise TypeError: the memory holds blocks, not values."""
        # Not NotImplementedError, which makes safetensors assume a tensor without memory and read `data_ptr()`.
        raise TypeError(
            f"the memory of a {type(self).__name__} holds {self.fmt.name} blocks, not its values; use "
            "weight.dequantize(), or model.state_dict()"
        )

    __array__ = __dlpack__ = apply_ = numpy = storage = tolist = _refuse_memory

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        rows, columns = self.fmt.block
        grad = ", requires_grad=True" if self.requires_grad else ""
        per_expert = self.global_scale is not None and self.global_scale.dim() > 0
        grad = f"{', scale_per_expert=True' * per_expert}{grad}"
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', "
            f"blocks={rows}x{columns}, bytes={self.nbytes}{grad})"
        )

    @classmethod
    @_compat.never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Types, args: Args, kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (implementation := _OPS.get(func)) is not None:
            return implementation(func, *args, **kwargs)
        if (result := _compat.decomposed(func, args, kwargs)) is not NotImplemented:
            return result
        layers = layers_of(_compat.pytree.tree_leaves((args, kwargs)), ", ".join(t.__name__ for t in types))
        raise NotImplementedError(
            f"{func}: not exact on quantized data ({layers}), so it is not supported; for a GEMM, {GEMM_CALLS}, "
            "otherwise call .dequantize() first; to train the weight, use torchao_blockwise.distributed."
            "MasterWeightOptimizer(torch.optim.AdamW, model, lr=...), or keep high-precision weights "
            "(master_weights=True)"
        )


# --- files ------------------------------------------------------------------------------------------------------------


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """View the same bytes as an integer tensor with the same element size."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


def _rebuild(
    cls: type[QuantizedTensor],
    tensors: dict[str, tuple[Tensor, torch.dtype]],
    attributes: dict[str, Any],
    others: dict[str, Any],
    requires_grad: bool,
) -> QuantizedTensor:
    """Invert `__reduce_ex__`; the constructor checks the parts.

    tensors: {name: (bytes as integers, dtype)}. others: `_is_param` if it was a Parameter.
    """
    inner = {name: bits.view(dtype) for name, (bits, dtype) in tensors.items()}
    x = cls.__tensor_unflatten__(inner, attributes, None, None)
    if others.get("_is_param") is True:
        x._is_param = True
    return x.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild])


_OPS: dict[Operation, Callable[..., Any]] = {}
# Operations that work the same on a rank's shard as on a whole weight: copies, moves, and `*_like` functions.
OPS_OF_SHARDS: set[Operation] = set()


def implements(*funcs: Operation, of_shards: bool = False) -> Callable[[_F], _F]:
    def register(implementation: _F) -> _F:
        for func in funcs:
            assert func not in _OPS, f"{func} is registered twice"
            _OPS[func] = implementation
        OPS_OF_SHARDS.update(funcs if of_shards else ())
        return implementation

    return register


def source_for(op: str, x: QuantizedTensor, src: Tensor) -> QuantizedTensor:
    """Return `src`, which is copied into `x`, as a tensor like `x`: quantize high precision, refuse other formats."""
    if x.shape != src.shape:
        raise ValueError(f"{op}: the target has shape {list(x.shape)}, the source {list(src.shape)}")
    hp = None
    if not isinstance(src, QuantizedTensor):
        hp = src.to(x.device)
        # Rounded to the reported dtype first, like master weights; `_requantize` refuses other dtypes.
        src = x._requantize(hp.to(x.dtype) if hp.dtype in HIGH_PRECISION_DTYPES else hp)
    if type(src) is not type(x) or src.fmt is not x.fmt:
        raise ValueError(f"{op}: the target is {x.fmt.name}, the source {src.fmt.name}; copy from source.dequantize()")
    shapes = [None if y.global_scale is None else list(y.global_scale.shape) for y in (x, src)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{op}: the target has tensor scales of shape {shapes[0]}, the source {shapes[1]} (one for all experts, or "
            "one for each with scale_per_expert); copy from source.dequantize()"
        )
    if x.pending_master is not None:
        if hp is not None and x.pending_master.is_owned and hp.dtype == x.dtype and same_bits(hp, plain_values(x)):
            # These are the values of a state dict: the exact masters that the optimizer has loaded must stay.
            return x
        x.pending_master.note_copy(hp, zip(x.parts().values(), src.parts().values()))
    return src


@QuantizedTensor.implements_torch_function(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Function, types: Types, args: Args, kwargs: Kwargs) -> None:
    """`x.data = src`: take the payload of a tensor of the same kind, or of high-precision values quantized like `x`."""
    x: QuantizedTensor = args[0]
    src = source_for("data", x, args[1])
    parts = {name: getattr(src, name) for name in x.parts()}
    # Raises if these are not the parts of a tensor with the attributes of `x`.
    type(x).__tensor_unflatten__(parts, x.__tensor_flatten__()[1], None, None)
    with _compat.no_torch_function():
        func(x, src)
    vars(x).update(parts)


@QuantizedTensor.implements_torch_function([torch.isfinite, Tensor.isfinite])
def _isfinite(func: Function, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """PEFT calls it to check merged weights."""
    return func(args[0].dequantize())


def map_tensors(x: QuantizedTensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    """Return a tensor like `x` with `fn` applied to its parts."""
    return x._make(**{name: fn(part) for name, part in x.parts().items()})
