"""Which Parameters of a module a conversion is about: a linear layer's weight, experts' weights, or a named one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from torchao_blockwise import _compat

# Their weights have three dims too, and are no experts'.
_NOT_EXPERTS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.ConvTranspose1d)
# Their weights have two, and are a layer's that reports show, or not operands of a GEMM.
_NO_MATRICES = nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.RMSNorm, nn.LayerNorm, ParametrizationList


def is_expert_weight(weight: object) -> bool:
    """Whether `weight` is a float tensor [E, N, K] with more than one expert, row and column.

    So that position embeddings [1, T, D] and biases [E, 1, N] are none.
    """
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and _has_dims(weight, 3)


def _has_dims(weight: torch.Tensor, dims: int) -> bool:
    return not nn.parameter.is_lazy(weight) and weight.dim() == dims and min(weight.shape) > 1


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' weights [E, N, K] that `module` itself holds, by name; convolutions and the like hold none."""
    if isinstance(module, _NOT_EXPERTS):
        return {}
    return {name: p for name, p in _compat.parameters_of(module).items() if p is not None and is_expert_weight(p)}


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """The float Parameters [N, K] that `module` itself holds, by name, as models have that call `F.linear` themselves.

    None of linear layers, embeddings and norms, and no biases [E, N] of experts. `quantize_` converts those that a
    `FqnToConfig` names.
    """
    if isinstance(module, _NO_MATRICES):
        return {}
    own = {name: p for name, p in _compat.parameters_of(module).items() if p is not None and p.is_floating_point()}
    numbers = {len(p) for p in expert_weights(module).values()}
    return {name: p for name, p in own.items() if _has_dims(p, 2) and len(p) not in numbers}


def weights_of(module: nn.Module, parameter_name: str | None = None) -> dict[str, nn.Parameter | None]:
    """Return the Parameters of `module` to convert, by name: all, or that of one name, None where there is none."""
    own = _compat.parameters_of(module)
    if parameter_name is not None:
        return {parameter_name: own.get(parameter_name)}
    return {"weight": own.get("weight")} if isinstance(module, nn.Linear) else dict(expert_weights(module))


def held_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """(name, module) of each place that holds a Parameter of `model`, in the order of `model.parameters()`."""
    held: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for fqn, module in model.named_modules():
        for name, p in _compat.parameters_of(module).items():
            if p is not None:
                held.setdefault(p, []).append((f"{fqn}.{name}".lstrip("."), module))
    return held
