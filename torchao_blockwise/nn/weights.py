"""The weights that layers train, their configs, and checks of a layer's operands."""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat.modes import FakeTensor
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES, StochasticRounding
from torchao_blockwise.ops.operands import check_dtype
from torchao_blockwise.tensors import (
    BlockwiseFP8Tensor,
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4Tensor,
    NVFP4TrainingConfig,
    TrainingConfig,
)
from torchao_blockwise.tensors.base import layers_of
from torchao_blockwise.tensors.rounding import start_key, streams_by_hand

# The types of weights that layers accept.
WEIGHTS = (MasterWeightTensor, BlockwiseFP8Tensor, NVFP4Tensor)
_DEFAULT_CONFIGS: dict[type, TrainingConfig] = {
    BlockwiseFP8Tensor: BlockwiseFP8TrainingConfig(master_weights=False),
    # Not created by `quantize_`, which assigns random bits.
    NVFP4Tensor: NVFP4TrainingConfig(master_weights=False, hadamard=False, stochastic_rounding=False),
}


def is_low_precision(weight: torch.Tensor) -> bool:
    """Whether layers compute with this weight in low precision; it may be a DTensor."""
    return isinstance(weight, WEIGHTS) or isinstance(_compat.local_of(weight), WEIGHTS)


def config_of(weight: Any) -> TrainingConfig:
    """Return the training config of a layer with this weight."""
    return weight.config if weight.config is not None else _DEFAULT_CONFIGS[type(weight)]


def rounding_key_of(weight: Any) -> torch.Tensor | None:
    """Return the key of the random bits for this weight's gradients; None if they are rounded to nearest."""
    config = config_of(weight)
    if not config.stochastic_rounding:
        return None
    if weight.rounding_key is None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "stochastic rounding: cannot compile a layer whose weight was not created by quantize_ and has no key "
                "for random bits yet; run one forward pass before torch.compile, or convert the model with quantize_"
            )
        start_key(weight, StochasticRounding(config.seed, next(streams_by_hand)))
    return weight.rounding_key


def is_fp8_weight(weight: torch.Tensor) -> bool:
    """Whether `weight` trains in blockwise FP8. (NVFP4 needs the amax of the whole tensor before it can quantize.)"""
    if not isinstance(weight, (MasterWeightTensor, BlockwiseFP8Tensor)):
        return False
    return isinstance(config_of(weight), BlockwiseFP8TrainingConfig)


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether none of them is a tensor subclass, such as a DTensor, which operations do not support."""
    # Fake tensors represent plain ones. In compiled code, they have the type of the tensor they represent.
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return all(t is None or type(t) in plain for t in tensors)


def check_square_blocks(op: str, name: str, weight: torch.Tensor) -> None:
    """Raise ValueError for a quantized weight whose blocks are not square: `grad_input` needs its transpose."""
    # Not `weight.fmt`: compilers know only the attributes of a weight that a function returns.
    if isinstance(weight, NVFP4Tensor) and weight.block_size[0] != weight.block_size[1]:
        raise ValueError(
            f"{op}: {name} with blocks of {weight.block_size} cannot be transposed for grad_input; "
            "create it with block_size=(16, 16)"
        )


def in_layer(weight: torch.Tensor) -> str:
    """Return the name of the weight for an error, or nothing if it has none."""
    name = layers_of([weight], unnamed="")
    return f" ({name})" if name else ""


def check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError for operands that a linear layer on one device does not support."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        check_dtype("linear", x, f"x{in_layer(weight)}")
    if x.layout is not torch.strided or x.is_nested:
        kind, fix = ("a nested tensor in ", "use layout=torch.jagged") if x.is_nested else ("", "call x.to_dense()")
        raise TypeError(f"linear: x must be dense, got {kind}{x.layout}{in_layer(weight)}; {fix}")
    if weight.dim() != 2:
        raise ValueError(f"linear: weight must be [N, K], got shape {list(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        got = f"{list(x.shape)} and {list(weight.shape)}"
        raise ValueError(f"linear: x [.., K] and weight [N, K] must agree in K, got {got}{in_layer(weight)}")
    if x.device != weight.device:
        devices = f"x is on {x.device}, weight on {weight.device}"
        raise ValueError(f"linear: {devices}{in_layer(weight)}; move one of them")
    if isinstance(weight, NVFP4Tensor):
        check_square_blocks("linear", "a weight", weight)
    if bias is not None and bias.dtype not in HIGH_PRECISION_DTYPES:
        check_dtype("linear", bias, f"bias{in_layer(weight)}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: bias must be [N] = [{weight.shape[0]}], got shape {list(bias.shape)}")
