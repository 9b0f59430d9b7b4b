"""Models of every layer here, converted or not, for tests of what PyTorch's tools see; and a count of their FLOPs."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, FP8_ROWS, NVFP4, converted, mlp, replace
from shared_inputs import attention
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchao_blockwise import linears_and_experts
from torchao_blockwise.nn import NormLinear, SwiGLUExperts, SwiGLUMLP, swiglu_linear
from torchao_blockwise.nn.fused_modules import fuse_class


class MLP(nn.Module):
    def __init__(self, act=nn.SiLU, dtype=torch.float32):
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 160, bias=False, dtype=dtype) for _ in range(2))
        self.down, self.act = nn.Linear(160, 64, dtype=dtype), act()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Experts that have 30 of 33 tokens, one of them none."""

    def __init__(self):
        super().__init__()
        self.experts = SwiGLUExperts(3, 64, 96)

    def forward(self, x):
        return self.experts(x, torch.tensor([3, 3, 30], dtype=torch.int32, device=x.device))


class Grouped(nn.Module):
    """A layer that calls PyTorch's grouped product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 48, 64))

    def forward(self, x):
        ends = torch.tensor([3, 3, 33], dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class Doubling(nn.Linear):
    """A layer with its own forward pass, in a class that pickle finds."""

    def forward(self, input: torch.Tensor, *, factor: float = 2.0):
        return factor * super().forward(input)


class Halves(nn.Module):
    """`swiglu_linear` of the halves of its input."""

    def __init__(self, width: int, out: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(width // 2, out, bias=bias)

    def forward(self, x):
        return swiglu_linear(*x.chunk(2, -1), self.linear.weight, self.linear.bias)


def fused(make, *readers: str, **options):
    def fuse(model: nn.Module) -> nn.Module:
        fuse_class(model, readers, **options)
        return model

    return make, fuse


# How to make a model, and what is done with it once it is converted.
MODELS = {
    "linear": (lambda: nn.Linear(64, 48), None),
    "two": (mlp, None),
    "norm_linear": (lambda: NormLinear(64, 48), None),
    "layer_norm_linear": (lambda: NormLinear(64, 48, norm="layer", bias=True), None),
    "swiglu_mlp": (lambda: SwiGLUMLP(64, 160), None),
    "fused_mlp": fused(MLP, "gate", "up", down="down", act="act"),
    "fused_attention": fused(lambda: attention(None, fused=False), "q", "k", "v"),
    "experts": (Mixture, None),
    "grouped": (Grouped, None),
}
every_model = pytest.mark.parametrize("model", MODELS)
CONFIGS = {
    "fp8": FP8,
    "rows": FP8_ROWS,
    "nvfp4": NVFP4,
    "high_precision": replace(FP8, save_activations="high_precision"),
    "saved_weight": replace(FP8, save_weights="quantized"),
    "quantized_weight": replace(FP8, master_weights=False),
    "nvfp4_weight": replace(NVFP4, master_weights=False),
}


def make(name: str, config=None, dtype=torch.float32) -> nn.Module:
    make, then = MODELS[name]
    torch.manual_seed(0)
    model = converted(make().to(dtype), config, linears_and_experts())
    if config is not None and then is not None:
        then(model)
    return model


def tokens(name: str, count: int = 33) -> torch.Tensor:
    return torch.randn(count, 160 if "attention" in name else 64)


def grouped_mm_flops(a, b, *args, out_shape, **options) -> int:
    """Of PyTorch's grouped product, which it does not count by itself: of tokens by experts, or along the tokens."""
    return 2 * a[0] * a[1] * b[-1]


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm_flops})


def flops(run) -> int:
    with counting() as counter:
        run()
    return counter.get_total_flops()
