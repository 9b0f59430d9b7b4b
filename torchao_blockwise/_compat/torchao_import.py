"""Import torchao without its messages about kernels and enums that this package does not use."""

from __future__ import annotations

import logging
from collections.abc import Callable

# {logger: text of the messages to drop}: compiled kernels that do not match this PyTorch, and an enum that torchao
# registers in a way that PyTorch 2.13 deprecates.
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "register_constant"}


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()


for _name, _text in _NOISE.items():
    logging.getLogger(_name).addFilter(_without(_text))

import torchao  # noqa: E402, F401
