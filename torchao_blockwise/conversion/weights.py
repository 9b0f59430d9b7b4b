"""The Parameters that a conversion replaces: the weight of a linear layer, expert weights, or a named one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from torchao_blockwise import _compat

# Modules whose weights may have three dims but are not expert weights.
_NOT_EXPERTS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.ConvTranspose1d)
# Modules whose weights with two dims are reported as a layer, or are not used in a GEMM.
_NO_MATRICES = nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.RMSNorm, nn.LayerNorm, ParametrizationList


def is_expert_weight(weight: object) -> bool:
    """Whether `weight` is a floating-point tensor [E, N, K] with more than one expert, row and column.

    This excludes position embeddings [1, T, D] and biases [E, 1, N].
    """
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and _has_dims(weight, 3)


def _has_dims(weight: torch.Tensor, dims: int) -> bool:
    return not nn.parameter.is_lazy(weight) and weight.dim() == dims and min(weight.shape) > 1


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the expert weights [E, N, K] that `module` directly holds, by name; none for convolutions."""
    if isinstance(module, _NOT_EXPERTS):
        return {}
    return {name: p for name, p in _compat.parameters_of(module).items() if p is not None and is_expert_weight(p)}


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point Parameters [N, K] that `module` directly holds, by name.

    Models that call `F.linear` themselves have such Parameters; `quantize_` converts those that an `FqnToConfig` names.
    Linear layers, embeddings and norms have none. Biases [E, N] of experts are left out.
    """
    if isinstance(module, _NO_MATRICES):
        return {}
    own = {name: p for name, p in _compat.parameters_of(module).items() if p is not None and p.is_floating_point()}
    numbers = {len(p) for p in expert_weights(module).values()}
    return {name: p for name, p in own.items() if _has_dims(p, 2) and len(p) not in numbers}


def weights_of(module: nn.Module, parameter_name: str | None = None) -> dict[str, nn.Parameter | None]:
    """Return the Parameters of `module` to convert, by name: all of them, or the named one (None if it is missing)."""
    own = _compat.parameters_of(module)
    if parameter_name is not None:
        return {parameter_name: own.get(parameter_name)}
    return {"weight": own.get("weight")} if isinstance(module, nn.Linear) else dict(expert_weights(module))


def held_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Return {Parameter: [(name, module that holds it), ...]}, in the order of `model.parameters()`."""
    held: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for fqn, module in model.named_modules():
        for name, p in _compat.parameters_of(module).items():
            if p is not None:
                held.setdefault(p, []).append((f"{fqn}.{name}".lstrip("."), module))
    return held
