"""Models of quantized Parameters, their training and comparisons, for `primary_weight_checks.py`."""

from __future__ import annotations

import torch
from fsdp_models import config_of
from helpers import replace
from ranks import device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal


class Net(nn.Module):
    """Odd widths, so that shards cut rows, blocks and bytes; a tied layer, a frozen one, and one without gradient."""

    def __init__(self, width: int = 37, hidden: int = 75):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mid = nn.Linear(hidden, hidden, bias=False)
        self.again = nn.Linear(hidden, hidden)
        self.again.weight = self.mid.weight
        self.frozen = nn.Linear(hidden, hidden, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.idle = nn.Linear(width, 3)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        x = nn.functional.gelu(self.norm(self.up(x)))
        return self.down(self.frozen(self.again(self.mid(x))))


def net(config: str, master_weights: bool, seed: int = 0, make=Net, dtype=torch.float32, where=None) -> nn.Module:
    torch.manual_seed(seed)
    model = make().to(where or device(), dtype)
    if config == "mixed":
        configs = {"up": "fp8", "mid": "nvfp4", "again": "nvfp4", "frozen": "fp8", "idle": "nvfp4", "down": "fp8_pow2"}
        each = {name: replace(config_of(c), master_weights=master_weights) for name, c in configs.items()}
        quantize_(model, FqnToConfig(each), filter_fn=None)
    else:
        quantize_(model, replace(config_of(config), master_weights=master_weights))
    return model


def primary(config: str = "mixed", seed: int = 0, dtype=torch.float32):
    values = net(config, master_weights=True, seed=seed, dtype=dtype).state_dict()
    return net(config, master_weights=False, seed=seed, dtype=dtype), values


def batch(step: int, rank: int = 0, width: int = 37) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device())


def train(model, optimizer, steps: int, rank: int = 0, first: int = 0, clip: bool = True) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        weight = next(model.parameters())
        x = batch(step, rank).to(weight.device)
        loss = (model(x.to(weight.dtype)) - x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        if clip:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def parallel(model, group, **options):
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True, **options)


def with_exact_means(model, ranks: int):
    """Gradients of `model` become multiples of ranks²/2^22 below 2.

    The mean over ranks is then exact in fp32 in any order, and so is a mean of that mean with other gradients, which
    is what DDP makes of accumulated ones.
    """
    unit = ranks**2 * 2.0**-22

    def to_fixed_point(gradient):
        assert gradient.abs().max() < 2
        return (gradient / unit).round() * unit

    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(to_fixed_point)
    return model


def quantized(master: torch.Tensor, weight: QuantizedTensor) -> QuantizedTensor:
    return weight._requantize(master.to(weight.dtype))


def assert_holds_masters(optimizer, model) -> None:
    """Every weight with a master is that master, in the weight's dtype and quantized whole."""
    state = optimizer.model_state_dict()
    weights = {name: weight for name, weight in model.named_parameters() if is_trained(weight)}
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight, quantized(state[name], weight)), name


def assert_masters(optimizer, values: dict[str, torch.Tensor]) -> None:
    """What `model_state_dict` has are these values, except of the frozen weight, which has no master."""
    state = optimizer.model_state_dict()
    assert list(state) == list(values)
    for name, value in values.items():
        if name != "frozen.weight":
            assert_bitwise_equal(state[name], value, name)


def is_trained(p: torch.Tensor) -> bool:
    return isinstance(p, QuantizedTensor) and p.requires_grad
