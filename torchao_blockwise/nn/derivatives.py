"""What layers refuse or warn of when derivatives are computed in other ways than by one backward pass."""

from __future__ import annotations

import warnings

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat import modes
from torchao_blockwise.tensors.base import layers_of


def refuse_transforms() -> None:
    """Raise NotImplementedError inside a transform of `torch.func`."""
    if not torch.compiler.is_compiling() and modes.has_transforms():
        raise NotImplementedError(
            "layers in low precision do not support transforms of torch.func, such as vmap and grad; apply them to a "
            "plain copy, unconvert(copy.deepcopy(model))"
        )


def refuse_second_order(layer: str) -> None:
    """Raise NotImplementedError in a backward pass that is itself differentiated, or of a batch of gradients.

    Kernels cannot read batched tensors.
    """
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{layer}: double backward (create_graph=True) is not supported in low precision; keep the layers that "
            "need it in high precision (filter_fn)"
        )
    if modes.has_batched_gradients():
        raise NotImplementedError(
            f"{layer}: a batch of gradients (is_grads_batched=True, vectorize=True) is not supported; compute one "
            "gradient at a time"
        )


def warn_in_backward(weight: torch.Tensor) -> None:
    """Warn if PyTorch's functions multiply by `weight` in the backward pass of another autograd function.

    It runs without recording gradients there, so that grad_weight is not computed by this package. Layers do not call
    this: reversible networks run them again in backward.
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and _compat.in_backward():
        warnings.warn(
            f"the backward pass of another autograd function multiplies by {layers_of([weight])}; if this weight is "
            "trained, its gradient is computed there, in high precision; call the layer instead (in "
            "flash-linear-attention, set fuse_swiglu=False), or exclude it (filter_fn=skip_fqns(...))",
            stacklevel=3,
        )
