"""State dicts of converted modules, which save and load plain high-precision tensors under the original names."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.pending_master import PendingMaster
from torchao_blockwise.tensors.state_values import plain_values


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Make `module` save its weights as plain tensors and load plain tensors into them. Repeated calls do nothing.

    A saved tensor shares memory with its master weight. For a sharded weight, it is a DTensor with the same placement.
    FSDP2 reallocates shards with uneven rows in the first forward pass and in every load; call `state_dict()` again
    afterwards. A quantized weight is saved as its decoded values, in its dtype (`plain_values`). A loaded shard is
    saved as the loaded values until all ranks cast it.
    """
    if not is_converted(module):
        module.register_state_dict_post_hook(_save_plain)
        module.register_load_state_dict_pre_hook(_load_assigned)


def keep_state_dicts_no_longer(module: nn.Module) -> None:
    """Undo `keep_state_dicts_plain`."""
    _compat.remove_state_dict_hooks(module, (_save_plain, _load_assigned))


def is_converted(module: nn.Module) -> bool:
    """Whether a weight of `module` was converted, even if it has been replaced since."""
    return any(hook is _save_plain for hook in _compat.state_dict_hooks_of(module))


def _save_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, param in _named_parameters(module, prefix):
        saved: Any = state_dict.get(name)
        # With keep_vars=True the state dict holds the Parameter itself.
        if param is None or saved is param:
            continue
        if isinstance(local := _compat.local_of(saved), MasterWeightTensor):
            state_dict[name] = _compat.with_local(saved, local.hp)
        elif isinstance(quantized := _compat.local_of(param), QuantizedTensor):
            state_dict[name] = _compat.with_local(param, _values(quantized, state_dict))


def _named_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter | None]]:
    """Yield (name in the state dict, Parameter) of `module` and of the parametrizations of its weights."""
    for name, param in _compat.parameters_of(module).items():
        yield prefix + name, param
    if is_parametrized(module):
        held = module.get_submodule("parametrizations")
        yield from held.named_parameters(f"{prefix}parametrizations", remove_duplicate=False)


def _values(weight: QuantizedTensor, state_dict: dict[str, Any]) -> torch.Tensor:
    # A tied weight is saved as the same tensor under several names.
    saved = None if weight.saved_values is None else weight.saved_values()
    if saved is not None and any(_compat.local_of(x) is saved for x in state_dict.values()):
        return saved
    # One rank by itself cannot quantize its shard of a weight again.
    values = weight.values(weight.dtype) if isinstance(weight, QuantizedShard) else plain_values(weight)
    weight.saved_values = weakref.ref(values)
    return values


def _load_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_others: Any
) -> None:
    """Wrap the tensors with which `load_state_dict(assign=True)` replaces converted Parameters."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in _named_parameters(module, prefix):
        loaded = state_dict.get(name)
        if param is None or loaded is None:
            continue
        if isinstance(values := _compat.local_of(loaded), (MasterWeightTensor, QuantizedTensor)):
            continue
        local, values = _compat.local_of(param), values.detach()
        # While FSDP2 has gathered a master weight, the Parameter is a quantized tensor.
        if isinstance(local, (MasterWeightTensor, QuantizedTensor)) and local.config and local.config.master_weights:
            made: Any = MasterWeightTensor(values, local.config).inherit(local)
            state_dict[name] = _compat.with_local(loaded, made)
        elif isinstance(local, QuantizedShard):
            state_dict[name] = _compat.with_local(param, local.with_values(values).inherit(local))
        elif isinstance(param, QuantizedTensor):
            quantized = param._requantize(values).inherit(param)
            quantized.pending_master = param.pending_master and PendingMaster(values)
            state_dict[name] = quantized
