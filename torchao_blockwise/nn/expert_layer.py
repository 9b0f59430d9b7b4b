"""Experts with SwiGLU: the counterpart of `SwiGLUMLP` for tokens that are sorted by expert.

    x [M, K] ─quantize─▶ rowwise · gate_upᵀ = (gate | up) ─SwiGLU and quantize─▶ rowwise · downᵀ = out [M, K]
                     └─▶ columnwise, saved        saved                      └─▶ columnwise, saved

Backward computes the gradient of (gate | up) and quantizes it in the same pass. In copies along tokens, each expert
starts at a block boundary. The host never reads how many tokens an expert has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.nn.layer import cast_for_compute
from torchao_blockwise.nn.sharded_linear import local_experts
from torchao_blockwise.nn.swiglu_layer import run_mlp
from torchao_blockwise.nn.weights import WEIGHTS, are_plain, check_square_blocks, config_of, rounding_key_of
from torchao_blockwise.ops.groups.ends import check_group_ends, clamped_ends
from torchao_blockwise.ops.operands import check_dtype


def swiglu_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, group_ends: torch.Tensor
) -> torch.Tensor:
    """Compute (silu(gate) · up) @ down[g].T with (gate | up) = x @ gate_up[g].T, for the rows of each group g.

    x: [M, K] bf16 | f16 | f32, rows sorted by expert, as `permute` returns them. gate_up: [E, 2H, K]; the first H rows
        are the gate. down: [E, K, H]. For DTensors that are split by expert, the experts of this rank are used.
    group_ends: int32 [E], cumulative, on x's device; rows after the last group count as zeros.
    Returns [M, K], zeros after the last group, in the dtype that `grouped_linear` returns.
    If both weights train in low precision, this is one autograd function, bitwise identical to `grouped_linear`,
    `ops.swiglu` and `grouped_linear`. It saves the columnwise copies of x and h, and (gate | up). Other weights run
    F.grouped_mm and F.silu, for which PyTorch supports only bf16 when compiled or without host synchronization.
    Raises TypeError for dtypes, ValueError for shapes, devices, group ends, or DTensors that split experts themselves.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §2.1.2 and §3.3.
    """
    # Read the configs first: compilers do not know the config of a weight that a function returns.
    held = [_compat.local_of(weight) for weight in (gate_up, down)]
    configs, keys = [], []
    for weight in held:
        if isinstance(weight, WEIGHTS):
            configs.append(config_of(weight))
            keys.append(rounding_key_of(weight))
    gate_up, inner_groups = local_experts("gate_up", gate_up)
    down, outer_groups = local_experts("down", down)
    # Otherwise each access to a weight's shape, dtype or device runs Python code.
    with _compat.no_torch_function():
        _check(x, gate_up, down, group_ends)
        if len(configs) == 2 and are_plain(x):
            x, amax_groups = cast_for_compute(x), (inner_groups, outer_groups)
            return run_mlp("swiglu_experts", x, (gate_up, down), configs, None, amax_groups, keys, group_ends)
    return _high_precision(x, gate_up, down, group_ends)


class SwiGLUExperts(nn.Module):
    """`swiglu_experts` with its weights: `gate_up` [experts, 2 · hidden, dim] and `down` [experts, dim, hidden].

    forward(x [M, dim], group_ends int32 [experts]) -> [M, dim]. `quantize_` converts it with the filter `experts()`,
    and `distributed.ExpertParallel` distributes the experts over ranks. Before conversion, it runs in the precision of
    the weights, or of autocast. Each expert is initialized like an `nn.Linear`.
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize uniformly in ±1/√(inputs), like `nn.Linear`."""
        for weight in (self.gate_up, self.down):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, group_ends: torch.Tensor) -> torch.Tensor:
        return swiglu_experts(x, self.gate_up, self.down, group_ends)

    def extra_repr(self) -> str:
        experts, dim, hidden = self.down.shape
        return f"experts={experts}, dim={dim}, hidden={hidden}"


def _check(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, group_ends: torch.Tensor) -> None:
    op = "swiglu_experts"
    check_dtype(op, x)
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        got = f"{list(x.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        raise ValueError(f"{op}: x must be [M, K], gate_up [E, 2H, K] and down [E, K, H], got {got}")
    experts, width, hidden = down.shape
    if tuple(gate_up.shape) != (experts, 2 * hidden, width) or x.shape[1] != width:
        got = f"{list(x.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        raise ValueError(f"{op}: x [M, K], gate_up [E, 2H, K] and down [E, K, H] must agree, got {got}")
    if x.device != gate_up.device or x.device != down.device:
        devices = f"{x.device}, gate_up on {gate_up.device}, down on {down.device}"
        raise ValueError(f"{op}: all tensors must be on one device, got x on {devices}; move them")
    if tuple(group_ends.shape) != (experts,):
        raise ValueError(f"{op}: group_ends must be [E] = [{experts}], got shape {list(group_ends.shape)}")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_square_blocks(op, name, weight)


def _high_precision(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, group_ends: torch.Tensor
) -> torch.Tensor:
    """Compute in the precision of the weights. Rows after the last group, which F.grouped_mm leaves undefined, are set
    to zero in forward and backward."""
    x = cast_for_compute(x)
    check_group_ends("swiglu_experts", group_ends, x.shape[0], x.device)
    # On a GPU the values are not checked, and PyTorch's grouped GEMM would read out of bounds.
    group_ends = clamped_ends(group_ends, x.shape[0])
    in_groups = (torch.arange(x.shape[0], device=x.device) < group_ends[-1])[:, None]
    gate, up = _product(torch.where(in_groups, x, 0), gate_up, group_ends).chunk(2, 1)
    out = _product(F.silu(gate) * up, down, group_ends)
    return torch.where(in_groups, out, 0)


def _product(x: torch.Tensor, weight: torch.Tensor, group_ends: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, WEIGHTS):
        weight = weight.to(x.dtype)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=group_ends)
