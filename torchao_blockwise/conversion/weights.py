"""The Parameters that a conversion replaces: the weight of a linear layer, expert weights, or a named one."""

from __future__ import annotations

from typing import TypeAlias

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from torchao_blockwise import _compat

# {Parameter: [(name, module that holds it), ...]}
Held: TypeAlias = dict[nn.Parameter, list[tuple[str, nn.Module]]]
# Modules whose weights may have three dims but are not expert weights.
_NOT_EXPERTS = (nn.Linear, nn.Bilinear, nn.Conv1d, nn.ConvTranspose1d)
# Modules whose weights with two dims are reported as a layer, or are not used in a GEMM.
_NO_MATRICES = nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.RMSNorm, nn.LayerNorm, ParametrizationList


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the expert weights [E, N, K] that `module` directly holds, by name; none for convolutions.

    Each has more than one expert, row and column; position embeddings [1, T, D] and biases [E, 1, N] have not.
    """
    return {} if isinstance(module, _NOT_EXPERTS) else _with_dims(module, 3)


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point Parameters [N, K] that `module` directly holds, by name.

    Models that call `F.linear` themselves have such Parameters; `quantize_` converts those that an `FqnToConfig` names.
    Linear layers, embeddings and norms have none. Biases [E, N] of experts are left out.
    """
    numbers = {len(p) for p in expert_weights(module).values()}
    found = {} if isinstance(module, _NO_MATRICES) else _with_dims(module, 2)
    return {name: p for name, p in found.items() if len(p) not in numbers}


def _with_dims(module: nn.Module, dims: int) -> dict[str, nn.Parameter]:
    own = {
        name: p for name, p in _compat.parameters_of(module).items() if p is not None and not nn.parameter.is_lazy(p)
    }
    return {n: p for n, p in own.items() if p.is_floating_point() and p.dim() == dims and min(p.shape) > 1}


def weights_of(module: nn.Module, parameter_name: str | None = None) -> dict[str, nn.Parameter | None]:
    """Return the Parameters of `module` to convert, by name: all of them, or the named one (None if it is missing)."""
    own = _compat.parameters_of(module)
    if parameter_name is not None:
        return {parameter_name: own.get(parameter_name)}
    return {"weight": own.get("weight")} if isinstance(module, nn.Linear) else dict(expert_weights(module))


def held_parameters(model: nn.Module) -> Held:
    """Return the names and holders of each Parameter, in the order of `model.parameters()`."""
    held: Held = {}
    for fqn, module in model.named_modules():
        for name, p in _compat.parameters_of(module).items():
            if p is not None:
                held.setdefault(p, []).append((f"{fqn}.{name}".lstrip("."), module))
    return held
