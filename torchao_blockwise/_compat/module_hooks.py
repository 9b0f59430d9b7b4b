"""Hooks of modules, which are private attributes in PyTorch."""

from __future__ import annotations

import torch


def runs_alone(module: torch.nn.Module) -> bool:
    """Whether `module` has no hooks and uses the forward pass of its class."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return not ("forward" in module.__dict__ or any(hooks))
