"""SwiGLU followed by a linear layer, and the SwiGLU MLP: the kernel that computes an activation quantizes it.

swiglu_linear   gate, up → h = silu(gate) · up, never stored: rowwise (· wᵀ = output), and columnwise, saved
SwiGLUMLP       x → gate_up → h → down; backward computes and quantizes the gradient of gate_up in one pass, and its
                two GEMMs read the copies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.nn.activations import Input, SwiGLUInput
from torchao_blockwise.nn.gemms import AmaxGroups, GemmSpec
from torchao_blockwise.nn.layer import Layer, cast_for_compute, linear
from torchao_blockwise.nn.weights import are_plain, check_linear, config_of, is_fp8_weight, is_low_precision
from torchao_blockwise.tensors import TrainingConfig


def swiglu_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute (silu(gate) · up) @ weight.T + bias; silu(gate) · up is quantized in the kernel that computes it.

    gate, up: [.., H] bf16 | f16 | f32, with the same shape and dtype and any strides, such as the halves of one
        projection.
    weight: [N, H]. bias: [N] or None. Returns [.., N], like `linear`.
    If the weight trains in blockwise FP8, gate and up are cast to the dtype of autocast, if enabled, and
    h = silu(gate) · up is computed in fp32 and rounded once to that dtype. Saves gate, up and one byte per element of
    h. Any other weight, NVFP4 or plain, runs F.linear(F.silu(gate) * up, ..).
    Raises TypeError for dtypes, ValueError for shapes.
    Source: GLU Variants Improve Transformer (arXiv 2002.05202); DeepSeek-V3 report (arXiv 2412.19437), §3.2.3.
    """
    if not (is_fp8_weight(weight) and are_plain(gate, up, bias)):
        # For a DTensor, `F.linear` would decompose the layer.
        run: Any = linear if is_low_precision(weight) else F.linear
        return run(F.silu(gate) * up, weight, bias)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        got = f"{gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}"
        raise ValueError(f"swiglu_linear: gate and up must agree in shape and dtype, got {got}")
    with _compat.no_torch_function():
        gate, up = cast_for_compute(gate), cast_for_compute(up)
        check_linear(gate, weight, bias)
        config = config_of(weight)
        spec = GemmSpec(None, config, gate.dtype, config.out_dtype or gate.dtype)
        steps, saves = [(SwiGLUInput, spec)], torch.is_grad_enabled()
        return Layer.apply("swiglu_linear", steps, None, None, saves, gate, up, weight, bias, None)


class SwiGLUMLP(nn.Module):
    """down(silu(gate) · up) with (gate | up) = gate_up(x): the MLP of Llama and DeepSeek with one merged projection.

    gate_up: `nn.Linear(dim, 2 · hidden)`; the first `hidden` rows are the gate. down: `nn.Linear(hidden, dim)`.
    x: [.., dim] bf16 | f16 | f32 -> [.., dim]. State dict names: `gate_up.weight`, `down.weight` (and biases).
    If both linears train in blockwise FP8 and gate_up has no bias, the MLP is one autograd function: every operand is
    quantized in the kernel that computes it, in forward and backward, and FP8 copies of x and h are saved, and
    gate_up(x). Otherwise, gate_up and `swiglu_linear` run. Register hooks on the SwiGLUMLP itself.
    Raises ValueError or TypeError like `linear`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_modules(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> SwiGLUMLP:
        """Create the MLP from three linears that are not converted; gate and up are copied into one layer.

        Raises ValueError unless their features match, TypeError for a converted gate or up.
        """
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
            raise ValueError(f"SwiGLUMLP: gate and up must agree in features and bias, got {gate} and {up}")
        if down.in_features != gate.out_features:
            raise ValueError(f"SwiGLUMLP: down must have in_features={gate.out_features}, got {down}")
        parameters = [p for m in (gate, up) for p in m.parameters(recurse=False)]
        if not are_plain(*parameters):
            kinds = sorted({type(p).__name__ for p in parameters})
            raise TypeError(
                f"SwiGLUMLP: gate and up must hold plain Parameters, got {kinds}; convert the SwiGLUMLP instead"
            )
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        made = {"device": gate.weight.device, "dtype": gate.weight.dtype}
        self.gate_up = nn.Linear(gate.in_features, 2 * gate.out_features, bias=gate.bias is not None, **made)
        self.down = down
        with torch.no_grad():
            for name, merged in self.gate_up.named_parameters():
                merged.copy_(torch.cat((getattr(gate, name), getattr(up, name))))
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up, self.down
        converted = is_fp8_weight(gate_up.weight) and is_fp8_weight(down.weight)
        if not converted or gate_up.bias is not None or not are_plain(x, down.bias):
            gate, up = gate_up(x).chunk(2, -1)
            return swiglu_linear(gate, up, down.weight, down.bias)
        with _compat.no_torch_function():
            x = cast_for_compute(x)
            check_linear(x, gate_up.weight, None)
            configs = config_of(gate_up.weight), config_of(down.weight)
            return run_mlp("SwiGLUMLP", x, (gate_up.weight, down.weight), configs, down.bias)


def run_mlp(
    name: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    configs: Sequence[TrainingConfig],
    bias: torch.Tensor | None = None,
    amax_groups: Sequence[str] = ("", ""),
    rounding_keys: Sequence[torch.Tensor | None] = (None, None),
    group_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute down(silu(gate) · up) + bias with (gate | up) = gate_up(x); for experts if `group_ends` is given.

    name: the layer's name in errors and profiles. weights: of gate_up and down. bias: of down.
    configs, amax_groups, rounding_keys: of each weight. amax_groups are the process groups over which it is split.
    """
    inner, outer = configs
    inner_groups, outer_groups = (AmaxGroups(weight=over) for over in amax_groups)
    dtype = inner.out_dtype or x.dtype
    steps = [
        (Input, GemmSpec(None, inner, x.dtype, dtype, amax_groups=inner_groups)),
        (SwiGLUInput, GemmSpec(None, outer, dtype, outer.out_dtype or x.dtype, amax_groups=outer_groups)),
    ]
    (gate_up, down), (inner_key, outer_key) = weights, rounding_keys
    tensors = gate_up, None, inner_key, down, bias, outer_key
    return Layer.apply(name, steps, group_ends, None, torch.is_grad_enabled(), x, *tensors)
