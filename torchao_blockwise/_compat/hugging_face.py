"""Names that transformers and accelerate do not promise to keep; an import of this file imports neither."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from contextvars import ContextVar
from typing import Any

import torch

from torchao_blockwise import _compat


def adapters_in(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules of `model` that PEFT's tuners have added, and all that lie in them."""
    peft: Any = sys.modules.get("peft")
    found: set[torch.nn.Module] = set()
    for module in () if peft is None else model.modules():
        names: tuple[str, ...] = ()
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            names = module.adapter_layer_names
        elif isinstance(module, peft.PeftModel):
            names = ("prompt_encoder",)
        for added in (getattr(module, name, None) for name in names):
            found.update(added.modules() if isinstance(added, torch.nn.Module) else ())
    return found


def tell_lora_how_to_merge(kind: type) -> None:
    """Let PEFT's LoRA on a converted layer quantize what it merges by the config, of class `kind`, of the weight.

    Called by conversions, where PEFT is imported. It merges by `quantize_`, and knows a config only of models that
    transformers has loaded quantized.
    """
    lora = getattr(sys.modules.get("peft.tuners.lora.torchao"), "TorchaoLoraLinear", None)
    if lora is None or hasattr(lora.__init__, "__wrapped__"):
        return
    own = lora.__init__

    @functools.wraps(own)
    def init(self: Any, base_layer: Any, *args: Any, **options: Any) -> None:
        inner = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        config = getattr(inner.weight, "config", None)
        if isinstance(config, kind):
            # To be pickled with the layer.
            options.setdefault("get_apply_tensor_subclass", functools.partial(copy.copy, config))
        own(self, base_layer, *args, **options)

    lora.__init__ = init


def is_offloaded_by_accelerate(module: torch.nn.Module) -> bool:
    """Whether accelerate puts plain values in the place of the module's weights on every use."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def transformers_quantizes() -> bool:
    """Whether transformers has called `quantize_` while it loads a model, as a `TorchAoConfig` makes it do."""
    return _compat.quantize_call()[2] == "transformers.integrations.torchao"


def is_silu(activation: torch.nn.Module) -> bool:
    """Whether `activation` computes x · sigmoid(x): PyTorch's module, or the one that transformers wrote."""
    cls = type(activation)
    return cls is torch.nn.SiLU or (cls.__module__, cls.__name__) == ("transformers.activations", "SiLUActivation")


def kept_in_fp32(model: torch.nn.Module) -> list[str] | None:
    """Names of modules that transformers keeps in fp32 whatever dtype the model is loaded in."""
    return getattr(model, "_keep_in_fp32_modules", None)


def passed_over(model: torch.nn.Module) -> set[str]:
    """Patterns of what files may have beside what `model` has; empty for models that are not of transformers.

    Layers that predict further tokens, of DeepSeek-V3 and GLM-4.5 for instance; positions that old files hold.
    """
    named = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    is_theirs = hasattr(model, "_tied_weights_keys")
    return {*(named or ()), *[r"rotary_emb\.inv_freq$"] * is_theirs}


_given_state_dict: ContextVar[dict[str, Any] | None] = ContextVar("given_state_dict", default=None)


def remember_given_state_dicts() -> None:
    """Have `PreTrainedModel.save_pretrained` remember its `state_dict` while it runs, for `given_state_dict`.

    transformers passes a quantizer only the model, and drops the state dict, which Trainer has gathered from all ranks.
    """
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    signature = inspect.signature(save)

    @functools.wraps(save)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        token = _given_state_dict.set(signature.bind(*args, **kwargs).arguments.get("state_dict"))
        try:
            return save(*args, **kwargs)
        finally:
            _given_state_dict.reset(token)

    PreTrainedModel.save_pretrained = remembering  # type: ignore[method-assign]


def given_state_dict() -> dict[str, Any] | None:
    """The state dict that the `save_pretrained` which is running was given; None if it was given none."""
    return _given_state_dict.get()


def reverted(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A part of a state dict as transformers writes it: other names, and experts one by one. Of other models itself."""
    if "transformers" not in sys.modules or not hasattr(model, "_tied_weights_keys"):
        return state
    from transformers import core_model_loading

    model_of_theirs: Any = model
    return core_model_loading.revert_weight_conversion(model_of_theirs, state)
