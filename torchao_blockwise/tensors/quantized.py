"""What the quantized tensors share: metadata, files, printing, and refusals that name a remedy.

A quantized tensor reports the shape and dtype of the high-precision tensor it stands for. Nothing here dequantizes: an
operation either has an exact meaning on the payload or raises. Copies are in `copying`, views in `views`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar

import torch
from torchao.utils import TorchAOBaseTensor

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat.torch_types import Args, Kwargs, Operation, Types
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, BlockFormat, Operand
from torchao_blockwise.tensors.caching import stable_hash
from torchao_blockwise.tensors.config import TrainingConfig
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.reads import note_read
from torchao_blockwise.tensors.rounding import RoundingKeys, carry_key, checked_key

if TYPE_CHECKING:
    from typing_extensions import Self

aten = torch.ops.aten
_F = TypeVar("_F", bound=Callable[..., Any])


class QuantizedTensor(TorchAOBaseTensor):
    """Base of tensors that are stored as rowwise payload and scales. Subclasses list their tensors and attributes.

    Subclasses define `fmt`, `_check()`, `_requantize(hp)` and `from_hp`.
    """

    # Names for torchao, which flattens by them.
    tensor_data_names: list[str]
    tensor_attribute_names: list[str]
    config: TrainingConfig | None
    qdata: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    # Of weights that train; no part of a weight's state.
    pending_master: PendingMaster | None = None
    # Whether it is an alias of a weight that trains, as `weight.data` is.
    trains: bool = False
    # What the last state dict holds in its place, as long as that lives.
    saved_values: weakref.ref[torch.Tensor] | None = None
    # The layer's name in the model that was converted, for errors.
    layer: str = ""
    # Of formats that round gradients stochastically; see tensors/rounding.py.
    rounding_key: torch.Tensor | None = None
    rounding_keys: RoundingKeys | None = None

    @property
    def fmt(self) -> BlockFormat:
        raise NotImplementedError

    def _check(self) -> None:
        """Raise TypeError or ValueError unless the parts fit each other, as the constructor does."""
        raise NotImplementedError

    def _make(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        *,
        columns: int | None = None,
        dtype: torch.dtype | None = None,
        global_scale: torch.Tensor | None = None,
    ) -> Self:
        """A tensor like this one over other payload.

        columns: the logical last dim, default this one's. global_scale: where it is another than this one's.
        """
        global_scale = self.global_scale if global_scale is None else global_scale
        parts = {"qdata": qdata, "scale": scale, "global_scale": global_scale}
        attributes = {"columns": columns, "dtype": dtype}
        return self._rebuilt(parts, {name: value for name, value in attributes.items() if value is not None})

    def _rebuilt(self, parts: dict[str, torch.Tensor | None], changed: dict[str, Any]) -> Self:
        """A tensor of the same layer, with the same key, of these parts and, where not `changed`, these attributes."""
        made = type(self).__tensor_unflatten__(parts, self.__tensor_flatten__()[1] | changed, None, None)
        carry_key(self, made)
        if self.layer:
            made.layer = self.layer
        return made

    def _requantize(self, hp: torch.Tensor) -> QuantizedTensor:
        """`hp` quantized as this tensor is."""
        raise NotImplementedError

    def operand(self) -> Operand:
        """The rowwise operand for `ops.matmul`."""
        return Operand(*self.operand_tensors(), self.fmt.name)

    def operand_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Its tensors (qdata, scale, global_scale): what compilers can call, who take only tensors from a method."""
        # Kernels trust them, and attributes may have been set since the tensor was made.
        self._check()
        return self.qdata, self.scale, self.global_scale

    def columnwise_operand(self, backend: ops.Backend | str | None = None) -> Operand:
        """The columnwise operand, built from rowwise now and owned by the caller alone.

        No field: one that appears later changes the flattened structure, which recompiles, and nobody frees it.
        """
        self._check_square("columnwise")
        return ops.transpose(self.operand(), columns=self.shape[-1], backend=backend)

    def columnwise(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(qdata [.., K, N], scale [.., K blocks, N blocks]): the exact transpose, built now and kept nowhere.

        Raises ValueError for blocks that are not square.
        """
        copy = self.columnwise_operand()
        return copy.qdata, copy.scale

    def transposed_view(self) -> Self:
        """[.., K, N] over the same memory, strided: exact for square blocks of unpacked elements.

        Raises ValueError for other blocks, NotImplementedError for packed elements.
        """
        self._check_square("transpose")
        if self.fmt.element.per_byte > 1:
            raise NotImplementedError(
                f"transpose: {type(self).__name__} packs two elements a byte, so a transpose is no view; "
                "use .columnwise(), or F.linear, which transposes by itself"
            )
        return self._make(self.qdata.transpose(-2, -1), self.scale.transpose(-2, -1), columns=self.shape[-2])

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """qdata · scale [· global_scale] as a plain tensor [.., N, K] of `dtype`, default the reported dtype."""
        note_read(self)
        dtype = self.dtype if dtype is None else dtype
        return ops.dequantize(self.operand(), dtype=dtype, columns=self.shape[-1])

    def _check_square(self, op: str) -> None:
        if not self.fmt.is_square:
            rows, columns = self.fmt.block
            raise ValueError(
                f"{op}: {type(self).__name__} with {rows}x{columns} blocks has no exact transpose; "
                f"quantize with square blocks"
            )

    def _tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in parts_of(self)]

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # a property of PyTorch's too
        """Bytes at rest: payload and scales."""
        return sum(t.nbytes for t in self._tensors())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle payload and scales as bytes: plain pickle knows no fp8 storage."""
        names, attributes = self.__tensor_flatten__()
        tensors = {name: (as_bits(getattr(self, name)), getattr(self, name).dtype) for name in names}
        is_parameter = {"_is_param": True} if isinstance(self, torch.nn.Parameter) else {}
        return _rebuild, (type(self), tensors, attributes, is_parameter, self.requires_grad)

    _stable_hash_for_caching = stable_hash

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
        implementation = _OPS.get(func)
        if implementation is None and (result := _compat.decomposed(func, args, kwargs or {})) is not NotImplemented:
            return result
        if implementation is None:
            raise NotImplementedError(
                f"{func}: not exact on quantized data (in {_names(types, args, kwargs)}), so it is not done; call "
                ".dequantize() first; to train it, step torchao_blockwise.distributed.MasterWeightOptimizer("
                "torch.optim.AdamW, model, lr=...), or keep high-precision weights (master_weights=True)"
            )
        return implementation(func, *args, **(kwargs or {}))


def _names(types: Types, args: Args, kwargs: Kwargs | None) -> str:
    """The layers whose weights are among the arguments, or what kinds of tensors are."""
    leaves = _compat.pytree.tree_leaves((args, kwargs))
    layers = {x.layer for x in leaves if isinstance(x, QuantizedTensor) and x.layer}
    return ", ".join(sorted(layers) or [t.__name__ for t in types])


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as an integer tensor of the same element size."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)


def _rebuild(kind: object, tensors: Any, attributes: Any, others: object, requires_grad: object) -> QuantizedTensor:
    """What `__reduce_ex__` took apart. Files are not trusted: this sets what it knows, and the constructor checks it.

    kind: the class, or its name, which is what files loaded with weights_only=True have of it.
    others: `_is_param` if it was a Parameter; what else older versions wrote there is left out.
    """
    cls = _IN_FILES.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(cls, type) and issubclass(cls, QuantizedTensor)):
        raise TypeError(f"load: a quantized tensor is one of {', '.join(_IN_FILES)}, got {kind!r}; save it anew")
    name = cls.__name__
    required, optional = set(cls.tensor_data_names), set(getattr(cls, "optional_tensor_data_names", ()))
    _check_names(name, "tensors", tensors, required, optional)
    _check_names(name, "attributes", attributes, set(cls.tensor_attribute_names))
    if not isinstance(others, dict) or not isinstance(requires_grad, bool):
        raise TypeError(f"{name}: a file has {others!r} and requires_grad={requires_grad!r} for it; save it anew")
    inner = {part: _from_bits(name, part, stored) for part, stored in tensors.items()}
    checked_key(name, inner.get("rounding_key"))
    x = cls.__tensor_unflatten__(inner, attributes, None, None)
    if others.get("_is_param") is True:
        x._is_param = True
    return x.requires_grad_(requires_grad)


def _check_names(name: str, what: str, given: object, required: Set[str], optional: Set[str] = frozenset()) -> None:
    if not isinstance(given, dict) or not required <= given.keys() <= required | optional:
        got = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"{name}: a file must have the {what} {sorted(required)} for it, got {got}; save it anew")


def _from_bits(name: str, part: str, stored: object) -> torch.Tensor:
    """The inner tensor of (its bytes as integers, its dtype): memory of its own, plain, no entry twice."""
    x, dtype = stored if isinstance(stored, tuple) and len(stored) == 2 else (stored, None)
    if not isinstance(x, torch.Tensor) or hasattr(x, "__tensor_flatten__") or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: {part} must be stored as a plain tensor and a dtype, got {stored!r}; save it anew")
    if x.layout is not torch.strided or x.dtype not in (torch.uint8, torch.int32):
        raise TypeError(f"{name}: {part} must be stored as strided bytes, got {x.dtype}, {x.layout}; save it anew")
    extent = 0
    for stride, size in sorted(zip(x.stride(), x.shape)) if x.numel() else ():
        if size > 1 and stride <= extent:
            raise ValueError(f"{name}: {part} {list(x.shape)} has strides {x.stride()}, which overlap; save it anew")
        extent += stride * (size - 1)
    # Another tensor than the file's own, which it may yet change.
    return x.view(dtype)


_IN_FILES: dict[str, type[QuantizedTensor]] = {}


def allow_in_files(cls: type[QuantizedTensor]) -> None:
    """Let `torch.load(weights_only=True)` make tensors of `cls` through `_rebuild`, and by no other way.

    Where a file names the class, the loader hands out its name: of a class it would also make and change instances
    without a check.
    """
    _IN_FILES[cls.__name__] = cls
    name = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
    # PyTorch declares functions and classes alone, and hands out what it is given.
    torch.serialization.add_safe_globals([name])  # type: ignore[list-item]


torch.serialization.add_safe_globals([_rebuild])


def check_quantizable(hp: torch.Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless `hp` is a plain floating-point tensor of at least 2 dims."""
    if isinstance(hp, QuantizedTensor):
        raise TypeError(f"{name}.from_hp: w is a {type(hp).__name__} already; dequantize() it first")
    if hp.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{name}.from_hp: w must be bfloat16, float16 or float32, got {hp.dtype}; cast it first")
    if hp.dim() < 2:
        raise ValueError(f"{name}.from_hp: w must be [.., N, K], got shape {list(hp.shape)}; reshape it")


_OPS: dict[Operation, Callable[..., Any]] = {}


def implements(*funcs: Operation) -> Callable[[_F], _F]:
    def register(implementation: _F) -> _F:
        for func in funcs:
            assert func not in _OPS, f"{func} is registered twice"
            _OPS[func] = implementation
        return implementation

    return register


def map_tensors(x: QuantizedTensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    """A tensor like `x` with `fn` over what holds its values."""
    return x._rebuilt({name: fn(getattr(x, name)) for name in parts_of(x)}, {})


def parts_of(x: QuantizedTensor) -> list[str]:
    """Names of the tensors that hold the values of `x`."""
    return [name for name in x.__tensor_flatten__()[0] if name != "rounding_key"]


_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.linear.default,
    aten._grouped_mm.default,
)


@implements(*_PRODUCTS)
def _product(func: Operation, *args: Any, **kwargs: Any) -> NoReturn:
    kinds = [type(x) for x in args if isinstance(x, QuantizedTensor)]
    raise NotImplementedError(
        f"{func} of {_names(kinds, args, kwargs)}: GEMMs with quantized weights go through "
        "torch.nn.functional.linear (or nn.Linear; grouped_mm for experts, in transformers "
        'model.set_experts_implementation("grouped_mm")), which runs all three in low precision; call that, or '
        ".dequantize() the weight for high precision"
    )
