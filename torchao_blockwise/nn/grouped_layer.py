"""The grouped linear layer of experts: three GEMMs in low precision for all experts, in one autograd function.

Tokens are sorted by expert, and only the device knows where the tokens of each expert end. Blocks of columnwise copies
run along tokens and start with an expert's first token. Tokens after the last group count as zeros. Experts stored as
[E, K, N] need no further copies: blocks are square, so rowwise and columnwise are exchanged. In NVFP4, all experts of a
weight share one tensor scale: one amax, and one reduction if the experts are split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import HIGH_PRECISION_DTYPES
from torchao_blockwise.nn.activations import Input
from torchao_blockwise.nn.derivatives import warn_in_backward
from torchao_blockwise.nn.gemms import GemmSpec
from torchao_blockwise.nn.layer import Layer, cast_for_compute
from torchao_blockwise.nn.weights import WEIGHTS, check_square_blocks, config_of, in_layer, rounding_key_of
from torchao_blockwise.ops.operands import check_dtype
from torchao_blockwise.tensors import BlockwiseFP8Tensor, MasterWeightTensor, NVFP4Tensor, TransposedWeight


def grouped_linear(
    x: torch.Tensor, weight: MasterWeightTensor | BlockwiseFP8Tensor | NVFP4Tensor, group_ends: torch.Tensor
) -> torch.Tensor:
    """Compute out[m] = x[m] @ weight[g].T for the rows m of each group g, with all three GEMMs in low precision.

    x: [M, K] bf16 | f16 | f32, sorted by expert. weight: [E, N, K], a master weight or quantized tensor.
    group_ends: [E] int32, cumulative, on the device of x: group g is rows [group_ends[g-1], group_ends[g]). Sizes are
        arbitrary, and the host never reads them; see `ops.grouped_matmul`.
    Returns [M, N] in config.out_dtype, or else autocast's dtype, or else the dtype of x. Rows after the last group are
    zeros, and so are their gradients and those of experts without tokens. Gradients have the dtypes of x and weight.
    `F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)` calls this function for converted weights, also for a
    weight stored as [E, K, N]. The caller adds a bias to each row. In eager mode, the gradient of a weight with an
    attribute `main_grad` [E, N, K] f32 is added to `main_grad` instead of `.grad`.
    Raises TypeError for a dtype or another weight, ValueError for shapes, devices, group ends, or a weight whose blocks
    cannot be transposed.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3.
    """
    if not isinstance(weight, WEIGHTS):
        raise TypeError(
            f"grouped_linear: weight must be a MasterWeightTensor or a quantized tensor, got {type(weight).__name__}; "
            "wrap or quantize it, or call torch.nn.functional.grouped_mm"
        )
    return _grouped_linear(x, weight, group_ends, True, None)


def _grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_ends: torch.Tensor,
    contracts_columns: bool,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """contracts_columns: whether K, which `output` contracts, is the last dim of the stored weight."""
    with _compat.no_torch_function():
        x, stored = cast_for_compute(x), _stored(weight)
        _check(x, weight, stored, contracts_columns and stored is weight)
        config = config_of(stored)
        out_dtype = out_dtype or config.out_dtype or x.dtype
        rounded_to = stored.source[1] if isinstance(stored, MasterWeightTensor) else None
        spec = GemmSpec(None, config, x.dtype, out_dtype, rounded_to, transposed=not contracts_columns)
        key = rounding_key_of(stored)
        steps, saves = [(Input, spec)], torch.is_grad_enabled()
        return Layer.apply("grouped_linear", steps, group_ends, None, saves, x, weight, None, key)


def _check(x: torch.Tensor, weight: torch.Tensor, stored: torch.Tensor, contracts_columns: bool) -> None:
    """contracts_columns: whether K is the last dim of the shape that `weight` reports."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        check_dtype("grouped_linear", x, f"x{in_layer(stored)}")
    if weight.dim() != 3:
        got = f"{list(weight.shape)}{in_layer(stored)}"
        raise ValueError(f"grouped_linear: weight must be [E, N, K], got shape {got}")
    if x.dim() != 2 or x.shape[1] != weight.shape[2 if contracts_columns else 1]:
        named = "[E, N, K]" if contracts_columns else "[E, K, N]"
        got = f"{list(x.shape)} and {list(weight.shape)}{in_layer(stored)}"
        raise ValueError(f"grouped_linear: x [M, K] and weight {named} must agree in K, got {got}")
    if x.device != weight.device:
        devices = f"x is on {x.device}, but weight is on {weight.device}{in_layer(stored)}"
        raise ValueError(f"grouped_linear: {devices}; move one of them")
    check_square_blocks("grouped_linear", "a weight", stored)


def _stored(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in its stored layout."""
    return weight.weight if isinstance(weight, TransposedWeight) else weight


def _grouped_mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`F.grouped_mm` of tokens [M, K] and converted experts [E, K, N], transposed or stored in that layout."""
    if not isinstance(mat2, (*WEIGHTS, TransposedWeight)):
        raise TypeError(
            f"grouped_mm: x must be a plain tensor, got a {type(input).__name__} with a plain weight; only a weight "
            "can be a quantized tensor"
        )
    if input.dim() != 2 or mat2.dim() != 3 or offs is None:
        got = f"{list(input.shape)}, {list(mat2.shape)} {'without' if offs is None else 'and'} offs"
        raise NotImplementedError(
            f"grouped_mm: low precision needs tokens [M, K], experts [E, K, N] and offs [E], got {got}; flatten tokens "
            "that are batched by expert, and pass offs, the end of each expert's tokens"
        )
    if bias is not None:
        raise NotImplementedError("grouped_mm: bias is not supported, as in PyTorch; add it to the output row by row")
    warn_in_backward(_stored(mat2))
    return _grouped_linear(input, mat2, offs, isinstance(mat2, TransposedWeight), out_dtype)


def _bmm(
    input: torch.Tensor, mat2: torch.Tensor, out_dtype: torch.dtype | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.bmm` of tokens batched by expert [E, m, K] and converted experts [E, K, N]: groups of m tokens."""
    kinds = (*WEIGHTS, TransposedWeight)
    if out is not None or isinstance(input, kinds) or not isinstance(mat2, kinds):
        # It raises.
        with _compat.no_torch_function():
            return torch.bmm(input, mat2, out=out)
    if not (input.dim() == mat2.dim() == 3 and input.shape[::2] == mat2.shape[:2]):
        got = f"{list(input.shape)} and {list(mat2.shape)}{in_layer(_stored(mat2))}"
        raise ValueError(f"bmm: x [E, m, K] and weight [E, K, N] must agree in E and K, got {got}")
    warn_in_backward(_stored(mat2))
    experts, tokens, _ = input.shape
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=input.device) * tokens
    y = _grouped_linear(input.flatten(0, 1), mat2, ends, isinstance(mat2, TransposedWeight), out_dtype)
    return y.unflatten(0, (experts, tokens))


def take_grouped_gemms(functions: list[Any], run: Callable[..., torch.Tensor] = _grouped_mm) -> None:
    """Let these functions, which have the arguments of `run`, call it for converted weights."""
    for kind in (*WEIGHTS, TransposedWeight):
        kind.implements_torch_function(functions)(lambda func, types, args, kwargs: run(*args, **(kwargs or {})))


take_grouped_gemms([_compat.grouped_mm])
take_grouped_gemms([torch.bmm, torch.Tensor.bmm], _bmm)
