"""State dicts of converted modules: plain high-precision tensors under the original names, in both directions."""

from __future__ import annotations

from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Make `module` save its master weights as plain tensors, and load plain tensors into them; once a module."""
    if not any(hook is _save_plain for hook in _compat.state_dict_hooks_of(module)):
        module.register_state_dict_post_hook(_save_plain)
        module.register_load_state_dict_pre_hook(_load_assigned)


def _save_plain(module: nn.Module, state_dict, prefix: str, local_metadata) -> None:
    for name, param in _compat.parameters_of(module).items():
        saved = state_dict.get(prefix + name)
        # With keep_vars=True the caller asks for the Parameter itself.
        if isinstance(saved, MasterWeightTensor) and saved is not param:
            state_dict[prefix + name] = saved.hp


def _load_assigned(module: nn.Module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
    """`load_state_dict(assign=True)` puts what it loads in the Parameter's place: wrap it, or the layer unconverts."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in _compat.parameters_of(module).items():
        loaded = state_dict.get(prefix + name)
        if loaded is None or isinstance(loaded, (MasterWeightTensor, QuantizedTensor)):
            continue
        if isinstance(param, MasterWeightTensor):
            state_dict[prefix + name] = MasterWeightTensor(loaded.detach(), param.config)
        elif isinstance(param, QuantizedTensor):
            state_dict[prefix + name] = param._requantize(loaded.detach())
