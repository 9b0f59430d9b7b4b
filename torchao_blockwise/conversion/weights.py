"""Which Parameters of a module a conversion is about: a linear layer's weight, or the weights of experts."""

from __future__ import annotations

import torch
from torch import nn

from torchao_blockwise import _compat

# Their weights have three dims too, and are no experts'.
_NOT_EXPERTS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.ConvTranspose1d)


def is_expert_weight(weight: object) -> bool:
    """Whether `weight` is a float tensor [E, N, K] with more than one expert, row and column.

    So that position embeddings [1, T, D] and biases [E, 1, N] are none.
    """
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and _is_stack(weight)


def _is_stack(weight: torch.Tensor) -> bool:
    return not nn.parameter.is_lazy(weight) and weight.dim() == 3 and min(weight.shape) > 1


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' weights [E, N, K] that `module` itself holds, by name; convolutions and the like hold none."""
    if isinstance(module, _NOT_EXPERTS):
        return {}
    return {name: p for name, p in _compat.parameters_of(module).items() if p is not None and is_expert_weight(p)}


def weights_of(module: nn.Module, parameter_name: str | None = None) -> dict[str, nn.Parameter | None]:
    """What a conversion of `module` converts, by name; of one name that Parameter alone, None where it is none."""
    own = _compat.parameters_of(module)
    if parameter_name is not None:
        return {parameter_name: own.get(parameter_name)}
    return {"weight": own.get("weight")} if isinstance(module, nn.Linear) else dict(expert_weights(module))
