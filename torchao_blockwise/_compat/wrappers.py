"""Modules that hold another one, run it and add a part to the names of its Parameters."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import nn

# What torch.compile and checkpoint_wrapper add, around a model or around a part of it.
_ADDED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")


def own_name(name: str) -> str:
    """The name of a Parameter without the parts that wrappers add."""
    return _ADDED.sub("", name)


def wrapped_in(model: nn.Module) -> nn.Module:
    """The model that torch.compile, checkpoint_wrapper and DistributedDataParallel have wrapped; else itself."""
    while True:
        inner: Any = next((m for name, m in model.named_children() if not own_name(name)), None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def model_of_transformers_in(model: nn.Module) -> nn.Module | None:
    """The outermost model of transformers in `model`, which may be itself."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return None
    return next((m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)), None)
