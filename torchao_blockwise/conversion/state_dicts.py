"""State dicts of converted modules: plain high-precision tensors under the original names, in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.original import Original
from torchao_blockwise.tensors.state_values import GivenOut, plain_values, same_bits


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Make `module` save its master weights as plain tensors, and load plain tensors into them; once a module.

    What is saved shares the memory of the master weights; of a sharded one it is a DTensor, placed as the parameter.
    FSDP2 moves shards of uneven rows in the first forward pass and with every load: take a new state dict after those.
    A quantized weight whose whole master an optimizer has is saved as that master, else as the values that it stands
    for, in its dtype (`plain_values`). What is written there before the weight is used next is cast into it.
    """
    if not is_converted(module):
        module.register_state_dict_post_hook(_save_plain)
        module.register_load_state_dict_pre_hook(_load_assigned)


def keep_state_dicts_no_longer(module: nn.Module) -> None:
    """Take back what `keep_state_dicts_plain` did to `module`."""
    _compat.remove_state_dict_hooks(module, (_save_plain, _load_assigned))


def is_converted(module: nn.Module) -> bool:
    """Whether a weight of `module` was converted, whatever has become of it."""
    return any(hook is _save_plain for hook in _compat.state_dict_hooks_of(module))


def _save_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    for name, param in _compat.parameters_of(module).items():
        if param is None:
            continue
        saved: Any = state_dict.get(prefix + name)
        # With keep_vars=True the caller asks for the Parameter itself.
        if saved is not param and isinstance(local := _compat.local_of(saved), MasterWeightTensor):
            state_dict[prefix + name] = _compat.with_local(saved, local.hp)
        elif saved is not param and isinstance(quantized := _compat.local_of(param), QuantizedTensor):
            state_dict[prefix + name] = _plain(param, quantized)


def _plain(param: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    """The master of a quantized weight, or values that it stands for, noted as given out."""
    original = quantized.original = quantized.original or Original()
    master = original.master(param)
    if master is not None:
        values = _compat.local_of(master)
    elif original.awaits_cast:
        assert original.hp is not None, "what is to be cast"
        return _compat.with_local(param, original.hp)
    else:
        # What a rank has of a weight cannot be quantized again by itself.
        values = plain_values(quantized) if param is quantized else quantized.dequantize()
        # A tied weight has several names for one tensor.
        last = None if original.last_given is None else original.last_given()
        values = last if last is not None and same_bits(last, values) else values
    original.give(GivenOut(values, is_master=master is not None))
    return _compat.with_local(param, values)


def _load_assigned(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """`load_state_dict(assign=True)` puts what it loads in the Parameter's place: wrap it, or the layer unconverts."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in _compat.parameters_of(module).items():
        loaded = state_dict.get(prefix + name)
        if param is None or loaded is None:
            continue
        if isinstance(values := _compat.local_of(loaded), (MasterWeightTensor, QuantizedTensor)):
            continue
        local, values = _compat.local_of(param), values.detach()
        # What FSDP2 gathered of a master weight is quantized too.
        if isinstance(local, (MasterWeightTensor, QuantizedTensor)) and local.config and local.config.master_weights:
            state_dict[prefix + name] = _compat.with_local(loaded, MasterWeightTensor(values, local.config))
        elif isinstance(local, QuantizedShard):
            state_dict[prefix + name] = _compat.with_local(param, local.with_values(values))
        elif isinstance(param, QuantizedTensor):
            quantized = param._requantize(values)
            quantized.original = param.original and Original(values)
            state_dict[prefix + name] = quantized
