"""Steps that every layer here takes, fused or not, around its GEMMs."""

from __future__ import annotations

import torch

from torchao_blockwise import _compat
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of what a layer computes of `x`: autocast's, else that of `x`."""
    device = x.device.type
    # There is no autocast for meta tensors, and asking for its state raises.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def save_for_backward(ctx, weights: tuple, *tensors: torch.Tensor | None) -> None:
    """Keep `weights` and what else backward reads, so that a weight which changes before is refused there.

    A compiled graph reads the plain tensors that hold a weight, so there these are saved beside it: PyTorch checks
    those that were saved by name, and not what a graph reads besides.
    """
    held = [values for weight in weights for values in _held_by(weight)] if torch.compiler.is_compiling() else []
    ctx.save_for_backward(*weights, *tensors, *held)
    ctx.read_in_backward = len(weights) + len(tensors)


def _held_by(weight) -> tuple:
    if isinstance(weight, MasterWeightTensor):
        return (weight.hp,)
    if isinstance(weight, QuantizedTensor):
        return weight.qdata, weight.scale, weight.global_scale
    return ()


def take_saved(ctx, config=None) -> tuple:
    """What `save_for_backward` was given, which lives on in the caller alone; see `_compat.take_saved`.

    config: of a layer's one weight, where that may be the local part of a DTensor. A compiler reads the values of such
    a weight anew wherever they are asked for, so there it is made again of the values that were saved.
    """
    saved = _compat.take_saved(ctx)
    weight, *tensors = saved[: ctx.read_in_backward]
    if config is not None and torch.compiler.is_compiling() and isinstance(weight, MasterWeightTensor):
        weight = MasterWeightTensor(saved[-1], config)
    return weight, *tensors


def grad_bias(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Σ of dy [T, N] over tokens, in fp32, rounded to `dtype`."""
    return dy.sum(0, dtype=torch.float32).to(dtype)


def refuse_second_order(layer: str) -> None:
    """Raise NotImplementedError in a backward that is itself to be differentiated."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{layer}: backward through backward (create_graph=True) is not defined in low precision; "
            "keep the layers that need it in high precision (filter_fn)"
        )


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` [.., K] as [T, K]; K may be 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def as_shape_of(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`out` [T, N] with the leading dims of `x` [.., K]."""
    # No view: hooks of FSDP2 hang on outputs, and an in-place operation on a view of one would leave them behind.
    if x.dim() == 2:
        return out
    return torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], out.shape[-1]])
