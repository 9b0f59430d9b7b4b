"""Hooks of modules, which PyTorch lists under private names."""

from __future__ import annotations

import torch


def runs_alone(module: torch.nn.Module) -> bool:
    """Whether no hook sees what goes into `module` or comes out, and its forward pass is that of its class."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return not ("forward" in module.__dict__ or any(hooks))
