"""Handlers: what `quantize_(model, config)` does to a linear layer, or to a module that holds weights of experts.

A conversion swaps Parameters in place: the object stays, so optimizers and tied modules that hold it see the converted
weight. A linear layer gets a class, derived from its own, that calls `linear` by name; a module of experts keeps its
class, whose forward pass uses `F.grouped_mm`, or `F.linear` an expert. torchao calls a handler a layer; the first call
of a `quantize_` checks all layers that will follow, so that a model is converted whole or left as it was.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization.transform_module import register_quantize_module_handler

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import hugging_face, torch_fsdp
from torchao_blockwise._names import nearest_names
from torchao_blockwise.conversion.filters import Filter
from torchao_blockwise.conversion.model_index import ModelIndex, looked_up
from torchao_blockwise.conversion.recommended import warn_of_plain
from torchao_blockwise.conversion.state_dicts import keep_state_dicts_plain
from torchao_blockwise.conversion.weights import expert_weights, matrices, weights_of
from torchao_blockwise.formats import FP8_128X128, HIGH_PRECISION_DTYPES
from torchao_blockwise.nn.converted import KNOWN_FORWARDS, ConvertedLinear, convert_class, why_no_class
from torchao_blockwise.nn.grouped_layer import take_products_of_others
from torchao_blockwise.ops import Backend
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    QuantizedTensor,
    TrainingConfig,
)
from torchao_blockwise.tensors.config import ConfigClass, check_config
from torchao_blockwise.tensors.original import Original
from torchao_blockwise.tensors.rounding import RoundingKeys

# Packages whose subclasses of `nn.Linear` quantize by themselves.
_OTHER_QUANTIZERS = "torchao.", "torch.ao.", "bitsandbytes.", "transformers.integrations."

# Attributes of a converted weight that a new content has by itself.
_OF_THE_CONTENT = "original", "layer", "rounding_key", "rounding_keys", "_cast_of", "_is_param"


def why_not_convertible(
    module: nn.Module,
    config: TrainingConfig,
    model: nn.Module | None = None,
    parameter_name: str | None = None,
    index: ModelIndex | None = None,
) -> str | None:
    """Why `module`, a part of `model`, cannot be converted with `config`, with the remedy, or None if it can.

    parameter_name: of the one Parameter to convert; default all that `weights_of` the module are.
    index: `ModelIndex(model)`, where the caller asks for many modules.
    """
    is_linear = isinstance(module, nn.Linear)
    reason = _why_no_forward(module) if isinstance(module, nn.Linear) else None
    if reason is not None:
        return reason
    if (reason := why_no_class(module)) is not None:
        return reason
    weights = weights_of(module, parameter_name)
    if not weights:
        return f"a {type(module).__name__} is not an nn.Linear and holds no experts [E, N, K]; narrow filter_fn"
    for name, weight in weights.items():
        dims = 2 if is_linear or parameter_name in matrices(module) else 3
        reason = _why_no_weight(weight, config, model, dims, index)
        if reason is not None:
            return reason if is_linear else f"{name}: {reason}"
    return None


def _why_no_codes(weight: torch.Tensor | None) -> str | None:
    """Of a weight in FP8, as transformers' layers hold it: a cast would lose its scales."""
    if weight is None or not weight.dtype.is_floating_point or weight.dtype.itemsize > 1:
        return None
    return (
        f"its weight is {weight.dtype}, codes whose scales lie elsewhere; make the model in high precision "
        "(from_config in transformers), convert it, and read its files by checkpoint.load"
    )


def _why_no_forward(module: nn.Linear) -> str | None:
    if hugging_face.is_offloaded_by_accelerate(module):
        return "accelerate offloads its weight and puts a plain one in its place on every use; give it a device"
    cls: Any
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_OTHER_QUANTIZERS) and getattr(cls, "forward", None) not in KNOWN_FORWARDS:
            package = cls.__module__.rpartition(".")[0]
            itself = f"{cls.__name__} of {package} quantizes its weight by itself; make it an nn.Linear, or exclude it"
            return _why_no_codes(module.weight) or itself
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without calling it; exclude it"
    # accelerate's hooks keep the one that they call.
    own = vars(module).get("_old_forward", vars(module).get("forward"))
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "its forward pass is an attribute of the instance, not of its class; define it in a class, or exclude it"
    return None


def _why_no_weight(
    weight: nn.Parameter | None,
    config: TrainingConfig,
    model: nn.Module | None,
    dims: int,
    index: ModelIndex | None,
) -> str | None:
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized yet; run one forward pass first"
    if weight is None:
        return "its weight is not a Parameter (parametrized or pruned?); remove the parametrization first"
    if weight.dim() != dims:
        wanted = "[N, K]" if dims == 2 else "[E, N, K]"
        return f"a Parameter of shape {list(weight.shape)} is not a weight {wanted}; leave it out"
    if _trains_by(weight, config):
        return None
    if isinstance(weight, MasterWeightTensor) and not config.master_weights:
        return "it is converted with master weights already; convert a fresh model"
    if isinstance(weight, QuantizedTensor):
        return f"its weight is a {type(weight).__name__} already; convert it once"
    if type(weight) not in (nn.Parameter, MasterWeightTensor):
        return f"its weight is a {type(weight).__name__}; convert first, then shard or wrap"
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        cast = f"its weight is {weight.dtype}; cast it to bfloat16, float16 or float32, or exclude the layer"
        return _why_no_codes(weight) or cast
    if config.backend is Backend.CUBLAS and dims == 3:
        return "cuBLAS has no products of experts; take backend='auto' for them"
    if config.backend in (Backend.DEEP_GEMM, Backend.CUTLASS):
        library = "DeepGEMM computes" if config.backend is Backend.DEEP_GEMM else "CUTLASS's kernels compute"
        return f"{library} no weights' gradients; take backend='auto', which uses it for the other products"
    if (reason := why_not_swappable(weight)) is not None:
        wrapped = model is not None and any(isinstance(m, DistributedDataParallel) for m in model.modules())
        return "DistributedDataParallel holds its weight; convert the model first, then wrap it" if wrapped else reason
    if model is not None and not config.master_weights:
        holders = (ModelIndex(model) if index is None else index).holders_of(weight)
        others = [m for m in holders if not (isinstance(m, nn.Linear) or expert_weights(m) or matrices(m))]
        if others:
            return (
                f"its weight is shared with another module, {type(others[0]).__name__}, which cannot use a quantized "
                "tensor; take master_weights=True, or exclude the layer"
            )
    return None


def why_not_swappable(weight: torch.Tensor) -> str | None:
    """Why the content of the Parameter `weight` cannot be exchanged, with the remedy, or None."""
    if weakref.getweakrefs(weight):
        return "something holds a weak reference to its weight; convert before torch.compile and parallel wrappers run"
    if _compat.is_held(weight):
        return (
            "a view of its weight or the graph of a forward pass is alive; drop it (del output, loss) before, and "
            "convert before DistributedDataParallel wraps the model"
        )
    return None


def _trains_by(weight: torch.Tensor, config: TrainingConfig) -> bool:
    """Whether `weight` is converted with this very config already."""
    return isinstance(weight, (MasterWeightTensor, QuantizedTensor)) and weight.config == config


@register_quantize_module_handler(BlockwiseFP8TrainingConfig)
@register_quantize_module_handler(NVFP4TrainingConfig)
def convert_module(module: nn.Module, config: TrainingConfig, *, parameter_name: str | None = None) -> nn.Module:
    """Make `module`, an `nn.Linear` or one that holds experts, train as `config` says; in place, and returned.

    parameter_name: of the one Parameter to convert, as torchao passes it for a name in an `FqnToConfig`.
    Raises ValueError if it, or another layer of the same `quantize_` call, cannot be converted, before any change;
    RuntimeError where PyTorch or torchao is too old.
    """
    _versions.check()
    if hugging_face.transformers_quantizes():
        raise ValueError(
            f"from_pretrained: a TorchAoConfig of a {type(config).__name__} would freeze what it loads and save it "
            f"unconverted; take quantization_config={config.in_transformers}(...) from "
            "torchao_blockwise.integrations.transformers, or call quantize_ on the loaded model"
        )
    is_replaced = _take_plain_tensor(module)
    model, filter_fn = _compat.quantize_call()[:2]
    model = module if model is None else model
    if filter_fn is None:
        # Called by hand, or for one name of an FqnToConfig.
        targets = [(fqn, m) for fqn, m in model.named_modules() if m is module]
    else:
        targets = _targets_if_first(module, model, filter_fn)
    # The first layer of a call finds its targets; where others follow it, modules stay what they are.
    index = looked_up(model, anew=filter_fn is None or bool(targets) or is_replaced)
    # A filter leaves adapters out; their names do not.
    left_out = set() if filter_fn is None else index.adapters
    targets = [(fqn, m) for fqn, m in targets if id(m) not in left_out]
    _check(targets, config, model, parameter_name, index)
    if targets and isinstance(filter_fn, Filter):
        _warn_of_unused(filter_fn, model)
    if targets and filter_fn is _compat.default_filter():
        warn_of_plain(model, config, targets)
    torch_fsdp.install()
    hugging_face.tell_lora_how_to_merge(TrainingConfig)
    if not isinstance(module, nn.Linear):
        take_products_of_others()
    if id(module) in left_out:
        return module
    for name, weight in weights_of(module, parameter_name).items():
        assert weight is not None, "checked before"
        holders = index.holders_of(weight)
        fqn = f"{index.name_of(module)}.{name}".lstrip(".")
        if not _trains_by(weight, config):
            swap(weight, _converted(weight, config))
            if config.stochastic_rounding:
                RoundingKeys.of_weight(config.seed, index.number_of(weight)).attach(weight)
        weight.layer = fqn  # type: ignore[attr-defined]  # ours by now
        for holder in holders:
            keep_state_dicts_plain(holder)
            if isinstance(holder, nn.Linear) or holder is module:
                convert_class(holder, index.name_of(holder))
    return module


@register_quantize_module_handler(ConfigClass)
def refuse_config(module: nn.Module, config: object) -> None:
    """Raise TypeError: `config` is a class, or a config of a framework, with which `quantize_` was called."""
    check_config("quantize_", config)


def _take_plain_tensor(module: nn.Module) -> bool:
    """Make a frozen Parameter of a plain tensor that has taken the place of a converted layer's weight; whether it did.

    PEFT merges so: it adds to what `dequantize` gives, puts it there, and calls `quantize_`.
    """
    weight = vars(module).get("weight")
    if not isinstance(module, ConvertedLinear) or not isinstance(weight, torch.Tensor):
        return False
    del module.weight
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return True


def _targets_if_first(
    module: nn.Module, model: nn.Module, filter_fn: Callable[[nn.Module, str], bool]
) -> list[tuple[str, nn.Module]]:
    """All layers that the `quantize_` call will convert, if `module` is the first of them; else none."""
    first = next((m for fqn, m in model.named_modules() if filter_fn(m, fqn)), None)
    if first is not module:
        return []
    return [(fqn, m) for fqn, m in model.named_modules() if filter_fn(m, fqn)]


def _warn_of_unused(filter_fn: Filter, model: nn.Module) -> None:
    """Warn of patterns that match no layer, with the names that are nearest."""
    names = [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear) or expert_weights(m)]
    for pattern in filter_fn.unused(names):
        said = f"{pattern!r} of {filter_fn} matches no layer and leaves nothing out"
        warnings.warn(f"quantize_: {said}; the nearest names are {nearest_names(pattern, names)}", stacklevel=2)


def _check(
    targets: list[tuple[str, nn.Module]],
    config: TrainingConfig,
    model: nn.Module,
    parameter_name: str | None,
    index: ModelIndex,
) -> None:
    whys = (why_not_convertible(module, config, model, parameter_name, index) for _, module in targets)
    reasons = [(fqn, reason) for (fqn, _), reason in zip(targets, whys)]
    failures = [(fqn, reason) for fqn, reason in reasons if reason is not None]
    if failures:
        lines = "\n".join(f"  {fqn or 'the model itself'}: {reason}" for fqn, reason in failures)
        raise ValueError(
            f"quantize_: {len(failures)} of {len(targets)} layers cannot be converted, and nothing was changed; fix "
            f"them, or leave them out with filter_fn=skip_fqns(...):\n{lines}"
        )


def _converted(weight: nn.Parameter, config: TrainingConfig) -> torch.Tensor:
    hp = weight.hp if isinstance(weight, MasterWeightTensor) else weight.detach()
    if config.master_weights:
        return MasterWeightTensor(hp, config)
    if config.weight_format is FP8_128X128:
        return BlockwiseFP8Tensor.from_hp(hp, power_of_2_scales=config.power_of_2_scales, config=config)
    return NVFP4Tensor.from_hp(hp, block_size=config.weight_format.block, config=config)


def swap(weight: nn.Parameter, converted: torch.Tensor) -> None:
    """Give the Parameter object `weight` the content of `converted`, keeping its gradient, hooks and attributes."""
    if isinstance(converted, QuantizedTensor) and weight.requires_grad:
        converted.original = Original(weight.detach())
    new = nn.Parameter(converted, requires_grad=weight.requires_grad)
    _compat.carry_grad_dtype(weight, new)
    own = (
        {*itertools.chain(*weight.__tensor_flatten__()), *_OF_THE_CONTENT}
        if isinstance(weight, (MasterWeightTensor, QuantizedTensor))
        else ()
    )
    attributes = {k: v for k, v in vars(weight).items() if k not in vars(new) and k not in own}
    grad, weight.grad = weight.grad, None
    try:
        torch.utils.swap_tensors(weight, new)
    finally:
        weight.grad = grad
    vars(weight).update(attributes)
    # Hooks are listed in the Python object, which stays, and run by its content, which is new.
    weight._backward_hooks = weight._backward_hooks
    weight._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks
