"""Handlers that `quantize_(model, config)` calls for each linear layer and each module with expert weights, and
`unconvert`.

A conversion swaps the content of Parameters but keeps the objects, so optimizers and tied modules that hold them see
the converted weights, and derives the classes of modules (nn/converted.py). torchao calls a handler for each layer. The
first call within a `quantize_` checks all layers that the filter accepts and then converts all of them, so that either
all or none are converted. Later calls find their layer converted.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchao.quantization.transform_module import register_quantize_module_handler

from torchao_blockwise import _compat, _versions
from torchao_blockwise._compat import hugging_face, torch_fsdp
from torchao_blockwise.conversion.default_filter import warn_of_plain
from torchao_blockwise.conversion.filters import SKIP_REASON, FilterFn
from torchao_blockwise.conversion.state_dicts import keep_state_dicts_no_longer, keep_state_dicts_plain
from torchao_blockwise.conversion.weights import Held, expert_weights, held_parameters, matrices, weights_of
from torchao_blockwise.formats import FP8_128X128, HIGH_PRECISION_DTYPES, StochasticRounding
from torchao_blockwise.nn.converted import (
    KNOWN_FORWARDS,
    ConvertedModule,
    DerivedModule,
    convert_class,
    restore_class,
    why_no_class,
)
from torchao_blockwise.nn.grouped_layer import take_grouped_gemms
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    QuantizedTensor,
    TrainingConfig,
)
from torchao_blockwise.tensors.base import WeightTensor
from torchao_blockwise.tensors.config import ConfigClass, check_config, name_in_transformers
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.rounding import STREAMS_A_WEIGHT, start_key
from torchao_blockwise.tensors.state_values import plain_values

# Packages whose subclasses of `nn.Linear` quantize their weights themselves.
_OTHER_QUANTIZERS = "torchao.", "torch.ao.", "bitsandbytes.", "transformers.integrations."

_SHARDED = "it is sharded; load model.state_dict() into an unconverted model that is sharded in the same way"
# Attributes of a converted weight that belong to its content and are not kept when the content is swapped.
_OF_THE_CONTENT = "pending_master", "saved_values", "layer", "rounding_key", "rounding_keys", "cast_of", "_is_param"


def why_not_convertible(
    module: nn.Module, config: TrainingConfig, held: Held | None = None, parameter_name: str | None = None
) -> str | None:
    """Return why `module` cannot be converted with `config`, with the remedy, or None if it can.

    held: `held_parameters` of the model that contains it; None for a module by itself.
    parameter_name: the only Parameter to convert; by default all of `weights_of(module)`.
    """
    weights = weights_of(module, parameter_name)
    for weight in weights.values():
        # Such as a weight of transformers' FP8Linear.
        if weight is not None and weight.is_floating_point() and weight.dtype.itemsize == 1:
            return (
                f"its weight is {weight.dtype}, and its scales are stored in another tensor and would be lost; load "
                "the checkpoint with torchao_blockwise.integrations.transformers.from_pretrained, or create the model "
                "in high precision (from_config in transformers), convert it, and load the checkpoint with "
                "checkpoint.load"
            )
    is_linear = isinstance(module, nn.Linear)
    reason = (_why_no_forward(module) if isinstance(module, nn.Linear) else None) or why_no_class(module)
    if reason is not None:
        return reason
    if not weights:
        return f"a {type(module).__name__} is not an nn.Linear and has no expert weights [E, N, K]; exclude it"
    for name, weight in weights.items():
        dims = 2 if is_linear or parameter_name in matrices(module) else 3
        holders = [holder for _, holder in (held or {}).get(weight, [])] if weight is not None else []
        if (reason := _why_no_weight(weight, config, dims, holders)) is not None:
            return reason if is_linear else f"{name}: {reason}"
    return None


def _why_no_forward(module: nn.Linear) -> str | None:
    if hugging_face.is_offloaded_by_accelerate(module):
        return "accelerate offloads its weight and replaces it with a plain one on every use; put it on a device"
    cls: Any
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_OTHER_QUANTIZERS) and getattr(cls, "forward", None) not in KNOWN_FORWARDS:
            package = cls.__module__.rpartition(".")[0]
            return f"{cls.__name__} of {package} quantizes its weight itself; use an nn.Linear instead, or exclude it"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling the layer; exclude it"
    # accelerate's hooks store the original forward here.
    own = vars(module).get("_old_forward", vars(module).get("forward"))
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "its forward pass was replaced on the instance; define forward in a class, or exclude it"
    return None


def _why_no_weight(
    weight: nn.Parameter | None, config: TrainingConfig, dims: int, holders: list[nn.Module]
) -> str | None:
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialized yet; run one forward pass first"
    if weight is None:
        return "its weight is not a Parameter (parametrized or pruned?); convert it before that, or exclude it"
    if hasattr(weight, "ds_shape"):
        return (
            "DeepSpeed shards its weight; convert before deepspeed.initialize, and make the model outside of "
            "deepspeed.zero.Init"
        )
    if weight.dim() != dims:
        wanted = "[N, K]" if dims == 2 else "[E, N, K]"
        return f"a Parameter of shape {list(weight.shape)} is not a weight {wanted}; exclude it"
    if _trains_by(weight, config):
        return None
    if isinstance(weight, QuantizedTensor) or (isinstance(weight, MasterWeightTensor) and not config.master_weights):
        return f"its weight is already a {type(weight).__name__}; call unconvert(model) first"
    if type(weight) not in (nn.Parameter, MasterWeightTensor):
        kind = type(weight).__name__
        return f"its weight is not a plain Parameter but a {kind}; convert before sharding, wrapping or quantizing it"
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        return f"its weight is {weight.dtype}; cast it to bfloat16, float16 or float32, or exclude the layer"
    if (reason := why_not_swappable(weight)) is not None:
        return reason
    others = [m for m in holders if not (isinstance(m, nn.Linear) or expert_weights(m) or matrices(m))]
    if others and not config.master_weights:
        return (
            f"its weight is shared with another module, {type(others[0]).__name__}, which cannot use a quantized "
            "tensor; use master_weights=True, or exclude the layer"
        )
    return None


def why_not_swappable(weight: torch.Tensor) -> str | None:
    """Return why the content of the Parameter `weight` cannot be swapped, with the remedy, or None if it can."""
    if weakref.getweakrefs(weight):
        return "something holds a weak reference to its weight; convert before torch.compile and parallel wrappers run"
    if _compat.is_held(weight):
        return (
            "a view, the autograd graph of a forward pass or DistributedDataParallel refers to its weight; free it "
            "first (del output), and convert before DDP wraps the model"
        )
    return None


def _trains_by(weight: torch.Tensor | None, config: TrainingConfig) -> bool:
    """Whether `weight` is already converted with this config."""
    return isinstance(weight, (MasterWeightTensor, QuantizedTensor)) and weight.config == config


@register_quantize_module_handler(BlockwiseFP8TrainingConfig)
@register_quantize_module_handler(NVFP4TrainingConfig)
def convert_module(module: nn.Module, config: TrainingConfig, *, parameter_name: str | None = None) -> nn.Module:
    """Convert `module`, an `nn.Linear` or a module with expert weights, in place to train with `config`; return it.

    parameter_name: the only Parameter to convert; torchao passes it for a name in an `FqnToConfig`.
    Raises ValueError, before any change, if it or another layer of the same `quantize_` call cannot be converted, and
    RuntimeError if PyTorch or torchao is too old.
    """
    _versions.check()
    model, filter_fn, caller = _compat.quantize_call()
    if caller == "transformers.integrations.torchao":
        raise ValueError(
            f"from_pretrained: a TorchAoConfig with a {type(config).__name__} would freeze the loaded weights and save "
            f"them unconverted; use quantization_config={name_in_transformers(type(config))}(...) from "
            "torchao_blockwise.integrations.transformers, or call quantize_ on the loaded model"
        )
    if (caller or "").startswith("diffusers."):
        raise ValueError(
            f"from_pretrained: a TorchAoConfig with a {type(config).__name__} would also convert the output layer, and "
            "diffusers would load the saved model unconverted; load the model without it, and call quantize_(model, "
            "config, filter_fn=recommended_layers(model, config))"
        )
    weights = weights_of(module, parameter_name).values()
    if weights and all(_trains_by(weight, config) for weight in weights):
        return module
    model = module if model is None else model
    if module in hugging_face.adapters_in(model):
        return module
    held = held_parameters(model)
    # A direct call has none, and neither has a name in an FqnToConfig. A filter has left out the model itself.
    chosen = lambda m, fqn: m is module or (filter_fn is not None and m is not model and filter_fn(m, fqn))  # noqa: E731
    reasons = planned_layers(model, config, chosen, held, parameter_name)
    if failures := _failures(reasons):
        raise ValueError(
            f"quantize_: {len(failures)} of {len(reasons)} layers cannot be converted, so nothing was changed; fix "
            "them, or exclude them with filter_fn=skip_fqns(...):\n" + "\n".join(failures)
        )
    if filter_fn is _compat.default_filter():
        warn_of_plain(model, config, reasons)
    hugging_face.tell_peft_how_to_merge(WeightTensor)
    numbers = {weight: number for number, weight in enumerate(held)}
    for fqn in reasons:
        target = model.get_submodule(fqn)
        if not isinstance(target, nn.Linear):
            # Otherwise transformers, whose operation serves compiled float32 weights, computes in high precision.
            take_grouped_gemms(_compat.grouped_products_of_others())
            hugging_face.run_batched_experts_grouped(ConvertedModule)
        for name, weight in weights_of(target, parameter_name).items():
            assert weight is not None, "checked before"
            if not _trains_by(weight, config):
                swap(weight, _converted(weight, config))
                if config.stochastic_rounding:
                    stream = STREAMS_A_WEIGHT * numbers[weight]
                    start_key(weight, StochasticRounding(config.seed, stream))
            weight.layer = f"{fqn}.{name}".lstrip(".")  # type: ignore[attr-defined]  # ours by now
            for held_name, holder in held[weight]:
                keep_state_dicts_plain(holder)
                if isinstance(holder, nn.Linear) or holder is target:
                    convert_class(holder, held_name.rpartition(".")[0])
    return module


def planned_layers(
    model: nn.Module, config: TrainingConfig, filter_fn: FilterFn, held: Held, parameter_name: str | None = None
) -> dict[str, str | None]:
    """Return {name: why it cannot be converted, or None} for the layers that `filter_fn` accepts."""
    adapters = hugging_face.adapters_in(model)
    chosen = {fqn: m for fqn, m in model.named_modules() if filter_fn(m, fqn) and m not in adapters}
    return {fqn: why_not_convertible(m, config, held, parameter_name) for fqn, m in chosen.items()}


def _failures(reasons: Mapping[str, str | None]) -> list[str]:
    """Return a line for each layer that has a reason not to be changed."""
    return [f"  {fqn or 'the model itself'}: {why}" for fqn, why in reasons.items() if why is not None]


@register_quantize_module_handler(ConfigClass)
def refuse_config(module: nn.Module, config: object) -> None:
    """Raise TypeError: `quantize_` was called with a class or with the config of a framework."""
    check_config("quantize_", config)


def _converted(weight: nn.Parameter, config: TrainingConfig) -> torch.Tensor:
    hp = weight.hp if isinstance(weight, MasterWeightTensor) else weight.detach()
    if config.master_weights:
        return MasterWeightTensor(hp, config)
    if config.weight_format is FP8_128X128:
        return BlockwiseFP8Tensor.from_hp(hp, power_of_2_scales=config.power_of_2_scales, config=config)
    return NVFP4Tensor.from_hp(hp, block_size=config.weight_format.block, config=config)


def swap(weight: Any, converted: torch.Tensor) -> None:
    """Swap the content of `converted` into the Parameter `weight`, which keeps its gradient, hooks and attributes."""
    if isinstance(converted, QuantizedTensor) and weight.requires_grad:
        converted.pending_master = PendingMaster(weight.detach())
    new = nn.Parameter(converted, requires_grad=weight.requires_grad)
    if (dtype := getattr(weight, "grad_dtype", weight.dtype)) != weight.dtype:
        new.grad_dtype = dtype
    is_ours = isinstance(weight, (MasterWeightTensor, QuantizedTensor))
    own = {*itertools.chain(*weight.__tensor_flatten__()), *_OF_THE_CONTENT} if is_ours else ()
    attributes = {k: v for k, v in vars(weight).items() if k not in vars(new) and k not in own}
    grad, weight.grad = weight.grad, None
    try:
        torch.utils.swap_tensors(weight, new)
    finally:
        weight.grad = grad
    vars(weight).update(attributes)
    # The Python object keeps the hooks, but the new content must run them: the assignment registers them again.
    weight._backward_hooks = weight._backward_hooks
    weight._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks


@torch.no_grad()
def unconvert(model: nn.Module) -> nn.Module:
    """Turn all converted layers and fused modules of `model` back into plain ones, in place; return `model`.

    Parameters stay the same objects, with their gradients, hooks and attributes, so an existing optimizer still trains
    them. A master weight keeps its values. A quantized Parameter gets the values of its master weight, in the dtype of
    the Parameter, if a `MasterWeightOptimizer` has one, and its decoded values otherwise. (Create a new optimizer
    instead of that `MasterWeightOptimizer`.) The model can be converted again.
    Raises ValueError, before any change, for weights that are sharded or that a view, a graph or DDP refers to.
    """
    weights = {
        p: held[0][0]
        for p, held in held_parameters(model).items()
        if isinstance(_compat.local_of(p), (MasterWeightTensor, QuantizedTensor))
    }
    is_sharded = bool(torch_fsdp.states_of(model.modules()))
    reasons = {
        fqn: _SHARDED if is_sharded or _compat.local_of(p) is not p else why_not_swappable(p)
        for p, fqn in weights.items()
    }
    if failures := _failures(reasons):
        raise ValueError(
            f"unconvert: {len(failures)} of {len(reasons)} weights cannot be restored, so nothing was changed:\n"
            + "\n".join(failures)
        )
    for p in weights:
        swap(p, _plain(p))
    for module in model.modules():
        vars(module).pop(SKIP_REASON, None)
        keep_state_dicts_no_longer(module)
        while isinstance(module, DerivedModule) and restore_class(module):
            pass
    return model


def _plain(weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, MasterWeightTensor):
        return weight.hp
    assert isinstance(weight, QuantizedTensor)
    master = None if weight.pending_master is None else weight.pending_master.master(weight)
    return plain_values(weight) if master is None else master.to(weight.dtype, copy=True)
