"""Import torchao without its messages about kernels and enums that this package does not use."""

from __future__ import annotations

import logging

# Compiled kernels that do not match this PyTorch, and an enum registered in a way that PyTorch 2.13 deprecates.
logging.getLogger("torchao").addFilter(lambda record: "Failed to load" not in record.getMessage())
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in record.getMessage())

import torchao  # noqa: E402, F401
