"""State dicts of converted modules: plain high-precision tensors under the original names, in both directions."""

from __future__ import annotations

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedShard, QuantizedTensor
from torchao_blockwise.tensors.original import Original


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Make `module` save its master weights as plain tensors, and load plain tensors into them; once a module.

    What is saved shares the memory of the master weights; of a sharded one it is a DTensor, placed as the parameter.
    FSDP2 moves shards of uneven rows in the first forward pass and with every load: take a new state dict after those.
    A quantised weight whose whole master an optimizer has is saved as that master, else as it is; what FSDP2 shards of
    one without a master as the values that it stands for, in float32.
    """
    if not is_converted(module):
        module.register_state_dict_post_hook(_save_plain)
        module.register_load_state_dict_pre_hook(_load_assigned)


def is_converted(module: nn.Module) -> bool:
    """Whether a weight of `module` was converted, whatever has become of it."""
    return any(hook is _save_plain for hook in _compat.state_dict_hooks_of(module))


def _save_plain(module: nn.Module, state_dict, prefix: str, local_metadata) -> None:
    for name, param in _compat.parameters_of(module).items():
        saved = state_dict.get(prefix + name)
        # With keep_vars=True the caller asks for the Parameter itself.
        if saved is not param and isinstance(local := _compat.local_of(saved), MasterWeightTensor):
            state_dict[prefix + name] = _compat.with_local(saved, local.hp)
        elif saved is not param and isinstance(quantized := _compat.local_of(param), QuantizedTensor):
            master = None if quantized.original is None else quantized.original.master(param)
            if master is None and isinstance(quantized, QuantizedShard):
                master = _compat.with_local(param, quantized.values())
            state_dict[prefix + name] = saved if master is None else master


def _load_assigned(module: nn.Module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
    """`load_state_dict(assign=True)` puts what it loads in the Parameter's place: wrap it, or the layer unconverts."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in _compat.parameters_of(module).items():
        loaded = state_dict.get(prefix + name)
        if loaded is None or isinstance(values := _compat.local_of(loaded), (MasterWeightTensor, QuantizedTensor)):
            continue
        local, values = _compat.local_of(param), values.detach()
        # What FSDP2 gathered of a master weight is quantised too.
        if isinstance(local, (MasterWeightTensor, QuantizedTensor)) and local.config and local.config.master_weights:
            state_dict[prefix + name] = _compat.with_local(loaded, MasterWeightTensor(values, local.config))
        elif isinstance(local, QuantizedShard):
            state_dict[prefix + name] = _compat.with_local(param, local.with_values(values))
        elif isinstance(param, QuantizedTensor):
            quantized = param._requantize(values)
            quantized.original = param.original and Original(values)
            state_dict[prefix + name] = quantized
