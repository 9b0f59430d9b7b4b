"""Modules that wrap another one and add a part to the names of its Parameters."""

from __future__ import annotations

import re
import sys
from typing import Any

from torch import nn

# The parts that torch.compile and checkpoint_wrapper add to names.
_ADDED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)(\.|$)")


def own_name(name: str) -> str:
    """Return the name of a Parameter without the parts that wrappers add."""
    return _ADDED.sub("", name)


def wrapped_in(model: nn.Module) -> nn.Module:
    """Return the model inside of torch.compile, checkpoint_wrapper and DistributedDataParallel, or `model` itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return wrapped_in(model.module)
    inner = next((m for name, m in model.named_children() if not own_name(name)), None)
    return model if inner is None else wrapped_in(inner)


def model_of_transformers_in(model: nn.Module) -> nn.Module | None:
    """Return the outermost transformers model in `model`, which may be `model` itself."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return None
    return next((m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)), None)
