"""Steps that every layer here takes, fused or not, around its GEMMs."""

from __future__ import annotations

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import Operand
from torchao_blockwise.tensors import QuantizedTensor


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of what a layer computes of `x`: autocast's, else that of `x`."""
    device = x.device.type
    # There is no autocast for meta tensors, and asking for its state raises.
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def save_for_backward(ctx, weights: tuple, *tensors: torch.Tensor | None) -> None:
    """Keep `weights` and what else backward reads, so that a weight which changes before is refused there.

    A compiled graph reads the payload of a quantized weight, so there its tensors are saved beside it: PyTorch checks
    those that were saved by name, and not what a graph reads besides.
    """
    held: list[torch.Tensor | None] = []
    if torch.compiler.is_compiling():
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        held = [x for weight in quantized for x in (weight.qdata, weight.scale, weight.global_scale)]
    ctx.save_for_backward(*weights, *tensors, *held)
    ctx.read_in_backward = len(weights) + len(tensors)


def take_saved(ctx) -> tuple:
    """What `save_for_backward` was given, which lives on in the caller alone; see `_compat.take_saved`."""
    return _compat.take_saved(ctx)[: ctx.read_in_backward]


def fields(copy: Operand | None) -> tuple:
    """An operand as tensors to save for backward; nothing in the place of each where there is none."""
    return (None, None, None) if copy is None else copy.tensors


def operand_of(saved, config) -> Operand:
    """The operand of an activation that `fields` took apart."""
    qdata, scale, global_scale = saved
    return Operand(qdata, scale, global_scale, config.activation_format.name)


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
