"""PEFT's LoRA on converted layers: it merges by `quantize_`, and asks how; the weight knows."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torchao_blockwise._compat import hugging_face
from torchao_blockwise.tensors import TrainingConfig


def tell_lora_how_to_merge() -> None:
    """Let LoRA on a converted layer quantize what it merges by the config of the layer's weight.

    Called by conversions, where PEFT is imported. PEFT itself knows a config only of models that transformers has
    loaded quantized.
    """
    lora = hugging_face.lora_of_tensor_subclasses()
    if lora is None or hasattr(lora.__init__, "__wrapped__"):
        return
    own = lora.__init__

    @functools.wraps(own)
    def init(self: Any, base_layer: Any, *args: Any, **options: Any) -> None:
        inner = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        config = getattr(inner.weight, "config", None)
        if isinstance(config, TrainingConfig):
            # To be pickled with the layer.
            options.setdefault("get_apply_tensor_subclass", functools.partial(copy.copy, config))
        own(self, base_layer, *args, **options)

    lora.__init__ = init
