"""Handlers: what `quantize_(model, config)` does to a linear layer.

A conversion swaps the layer's Parameter in place: the object stays, so optimizers and tied modules that hold it see the
converted weight. The layer gets a class, derived from its own, that calls `linear` by name. torchao calls a handler a
layer; the first call of a `quantize_` checks all layers that will follow, so that a model is converted whole or left as
it was.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torchao.quantization.transform_module import register_quantize_module_handler

from torchao_blockwise import _compat
from torchao_blockwise.conversion.state_dicts import keep_state_dicts_plain
from torchao_blockwise.formats import FP8_128X128, HIGH_PRECISION_DTYPES
from torchao_blockwise.nn.converted import ConvertedLinear, convert_class
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    QuantizedTensor,
    TrainingConfig,
)
from torchao_blockwise.tensors.original import Original


def why_not_convertible(module: nn.Module, config: TrainingConfig, model: nn.Module | None = None) -> str | None:
    """Why `module`, a part of `model`, cannot be converted with `config`, with the remedy, or None if it can."""
    if not isinstance(module, nn.Linear):
        return f"a {type(module).__name__} is not an nn.Linear; narrow filter_fn"
    if type(module).forward not in (nn.Linear.forward, ConvertedLinear.forward):
        return f"{type(module).__name__} overrides nn.Linear.forward, which a converted weight relies on; exclude it"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight without calling it; exclude it"
    weight = _compat.parameters_of(module).get("weight")
    if isinstance(weight, nn.UninitializedParameter):
        return "its weight is not initialised yet; run one forward pass first"
    if weight is None:
        return "its weight is not a Parameter (parametrised or pruned?); remove the parametrisation first"
    if _trains_by(weight, config):
        return None
    if isinstance(weight, MasterWeightTensor) and not config.master_weights:
        return "it is converted with master weights already; convert a fresh model"
    if isinstance(weight, QuantizedTensor):
        return f"its weight is a {type(weight).__name__} already; convert it once"
    if type(weight) not in (nn.Parameter, MasterWeightTensor):
        return f"its weight is a {type(weight).__name__}; convert first, then shard or wrap"
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        return f"its weight is {weight.dtype}; cast it to bfloat16, float16 or float32, or exclude the layer"
    if weakref.getweakrefs(weight):
        return "something holds a weak reference to its weight; convert before torch.compile and parallel wrappers run"
    if _compat.is_held(weight):
        return "a view of its weight or the graph of a forward pass is alive; drop it (del output, loss) before"
    if model is not None and not config.master_weights:
        others = [m for m in _holders(weight, model) if not isinstance(m, nn.Linear)]
        if others:
            return (
                f"its weight is shared with another module, {type(others[0]).__name__}, which cannot use a quantised "
                "tensor; take master_weights=True, or exclude the layer"
            )
    return None


def _trains_by(weight: torch.Tensor, config: TrainingConfig) -> bool:
    """Whether `weight` is converted with this very config already."""
    return isinstance(weight, (MasterWeightTensor, QuantizedTensor)) and weight.config == config


def _holders(weight: nn.Parameter, model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that hold this very Parameter."""
    return [m for m in model.modules() if any(p is weight for p in _compat.parameters_of(m).values())]


@register_quantize_module_handler(BlockwiseFP8TrainingConfig)
@register_quantize_module_handler(NVFP4TrainingConfig)
def convert_linear(module: nn.Module, config: TrainingConfig) -> nn.Module:
    """Make `module` train as `config` says; in place, and returned.

    Raises ValueError if it, or another layer of the same `quantize_` call, cannot be converted, before any change.
    """
    model, filter_fn = _compat.quantize_call()
    model = module if model is None else model
    if filter_fn is None:
        # Called by hand, or for one name of an FqnToConfig.
        targets = [(fqn, m) for fqn, m in model.named_modules() if m is module]
    else:
        targets = _targets_if_first(module, model, filter_fn)
    _check(targets, config, model)
    weight = module.weight
    holders, names = _holders(weight, model), {m: fqn for fqn, m in model.named_modules()}
    if not _trains_by(weight, config):
        _swap(weight, _converted(weight, config))
    for holder in holders:
        keep_state_dicts_plain(holder)
        if isinstance(holder, nn.Linear):
            convert_class(holder, names[holder])
    return module


def _targets_if_first(module, model, filter_fn) -> list[tuple[str, nn.Module]]:
    """All layers that the `quantize_` call will convert, if `module` is the first of them; else none."""
    first = next((m for fqn, m in model.named_modules() if filter_fn(m, fqn)), None)
    if first is not module:
        return []
    return [(fqn, m) for fqn, m in model.named_modules() if filter_fn(m, fqn)]


def _check(targets, config, model) -> None:
    reasons = [(fqn, why_not_convertible(module, config, model)) for fqn, module in targets]
    failures = [(fqn, reason) for fqn, reason in reasons if reason is not None]
    if failures:
        lines = "\n".join(f"  {fqn or 'the model itself'}: {reason}" for fqn, reason in failures)
        raise ValueError(
            f"quantize_: {len(failures)} of {len(targets)} layers cannot be converted, and nothing was changed; mend "
            f"them, or leave them out with filter_fn=skip_fqns(...):\n{lines}"
        )


def _converted(weight: nn.Parameter, config: TrainingConfig) -> torch.Tensor:
    hp = weight.hp if isinstance(weight, MasterWeightTensor) else weight.detach()
    if config.master_weights:
        return MasterWeightTensor(hp, config)
    if config.weight_format is FP8_128X128:
        return BlockwiseFP8Tensor.from_hp(hp, power_of_2_scales=config.power_of_2_scales, config=config)
    return NVFP4Tensor.from_hp(hp, block_size=config.weight_format.block, config=config)


def _swap(weight: nn.Parameter, converted: torch.Tensor) -> None:
    """Give the Parameter object `weight` the content of `converted`, keeping its gradient, hooks and attributes."""
    if isinstance(converted, QuantizedTensor) and weight.requires_grad:
        converted.original = Original(weight.detach())
    new = nn.Parameter(converted, requires_grad=weight.requires_grad)
    attributes = {k: v for k, v in vars(weight).items() if k not in vars(new)}
    grad, weight.grad = weight.grad, None
    try:
        torch.utils.swap_tensors(weight, new)
    finally:
        weight.grad = grad
    vars(weight).update(attributes)
    # Hooks are listed in the Python object, which stays, and run by its content, which is new.
    weight._backward_hooks = weight._backward_hooks
    weight._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks
