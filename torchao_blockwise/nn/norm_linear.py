"""A norm followed by a linear layer: the output of the norm is quantized in the kernel that computes it.

    forward    x → statistics [T]; x → y = norm(x), never stored: rowwise (· wᵀ = output), and columnwise, saved
    backward   dy → rowwise (· w = gradient of y → PyTorch's backward of the norm), columnwise (· columnwise y)

Saved for backward: x, the statistics and one byte per element of y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.nn.activations import NormInput
from torchao_blockwise.nn.converted import ConvertedLinear
from torchao_blockwise.nn.gemms import GemmSpec
from torchao_blockwise.nn.layer import Layer, compute_dtype
from torchao_blockwise.nn.weights import are_plain, check_linear, config_of, is_fp8_weight

_KINDS = {nn.RMSNorm: "rms", nn.LayerNorm: "layer"}


class NormLinear(nn.Module):
    """linear(norm(x)): an `nn.RMSNorm` or `nn.LayerNorm` followed by an `nn.Linear`, fused if the linear trains in FP8.

    norm: "rms" or "layer". eps, bias, device, dtype: as in the modules. `bias` is that of the linear; a LayerNorm
        always has a bias.

    x: [.., in_features] bf16 | f16 | f32 -> [.., out_features]; any number of tokens, including 0.
    The modules are children named `norm` and `linear`, and keep their names in state dicts (`norm.weight`,
    `linear.weight`, ..). `quantize_` converts the linear like any other. The layer calls the two modules if the linear
    is not converted or trains in NVFP4, or if a parameter is a shard (FSDP2 on a child, tensor parallelism). When it is
    fused, it calls neither, so register hooks on the NormLinear itself.

    For the same statistics, the output is bitwise identical to that of the two modules: y is computed in fp32 and
    rounded once, to the dtype of x or autocast. Gradients are those of the two modules; PyTorch computes that of the
    norm.
    Raises ValueError for an unknown norm, TypeError for an unsupported dtype.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.2.3 and §3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: str = "rms",
        eps: float | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if norm == "rms":
            self.norm: nn.Module = nn.RMSNorm(in_features, eps=eps, **made)
        elif norm == "layer":
            self.norm = nn.LayerNorm(in_features, eps=1e-5 if eps is None else eps, **made)
        else:
            raise ValueError(f"NormLinear: norm must be 'rms' or 'layer', got {norm!r}")
        self.linear = nn.Linear(in_features, out_features, bias=bias, **made)

    @classmethod
    def from_modules(cls, norm: nn.RMSNorm | nn.LayerNorm, linear: nn.Linear) -> NormLinear:
        """Create the layer from existing modules, converted or not, without copying them.

        Raises TypeError for modules of other kinds, ValueError unless the norm is over the linear's in_features.
        """
        if type(norm) not in _KINDS or not isinstance(linear, nn.Linear):
            got = f"{type(norm).__name__} and {type(linear).__name__}"
            raise TypeError(f"NormLinear: modules must be an nn.RMSNorm or nn.LayerNorm and an nn.Linear, got {got}")
        if tuple(norm.normalized_shape) != (linear.in_features,):
            raise ValueError(
                f"NormLinear: the norm must be over in_features={linear.in_features}, "
                f"got normalized_shape={tuple(norm.normalized_shape)}"
            )
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.norm, self.linear = norm, linear
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self.norm
        linear = self.linear
        norm_bias = getattr(norm, "bias", None)
        is_plain_linear = type(linear).forward in (nn.Linear.forward, ConvertedLinear.forward)
        if not (is_plain_linear and is_fp8_weight(linear.weight) and are_plain(x, norm.weight, norm_bias, linear.bias)):
            return linear(norm(x))
        # PyTorch's default for an RMSNorm without eps.
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        with _compat.no_torch_function():
            check_linear(x, linear.weight, linear.bias)
            config, dtype = config_of(linear.weight), compute_dtype(x)
            spec = GemmSpec(None, config, dtype, config.out_dtype or dtype)
            inputs, saves = (x, norm.weight, norm_bias, _KINDS[type(norm)], eps), torch.is_grad_enabled()
            tensors = *inputs, linear.weight, linear.bias, None
            return Layer.apply("NormLinear", [(NormInput, spec)], None, None, saves, *tensors)
