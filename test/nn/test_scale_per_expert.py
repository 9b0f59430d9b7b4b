"""Experts with separate tensor scales: what one computes does not depend on the others, and what cannot be."""

import pytest
import torch
from helpers import PER_EXPERT, converted, replace

from torchao_blockwise import NVFP4Tensor, checkpoint, experts
from torchao_blockwise.diagnostics import NumericsMonitor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal

CONFIG = replace(PER_EXPERT, stochastic_rounding=False)
ENDS = torch.tensor([20, 20, 55, 64], dtype=torch.int32)


def module(device: str = "cpu", **changes) -> SwiGLUExperts:
    torch.manual_seed(0)
    return converted(SwiGLUExperts(4, 48, 32), replace(CONFIG, **changes), experts()).to(device)


def results(made, x) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = made(x, ENDS.to(x.device))
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in made.parameters())]


def test_parts_of_a_weight():
    w = torch.randn(4, 32, 48) * torch.tensor([1.0, 10, 100, 1000])[:, None, None]
    whole = NVFP4Tensor.from_hp(w, scale_per_expert=True)
    assert "scale_per_expert=True" in repr(whole) and whole.global_scale.shape == (4,)
    for part, of in ((whole[2], w[2]), (whole[1:3], w[1:3]), (whole.view(2, 2, 32, 48), w.view(2, 2, 32, 48))):
        assert_bitwise_equal(part.dequantize(), NVFP4Tensor.from_hp(of, scale_per_expert=True).dequantize())
    target = torch.empty_like(whole)
    target.copy_(w)
    assert_bitwise_equal(target.dequantize(), whole.dequantize())
    with pytest.raises(ValueError, match=r"copy_: the target has tensor scales of shape \[4\], the source \[\]"):
        target.copy_(NVFP4Tensor.from_hp(w))
    with pytest.raises(ValueError, match="would join matrices with separate tensor scales"):
        whole.view(128, 48)


@pytest.mark.parametrize("master_weights", (True, False))
def test_engines_get_no_file(master_weights, tmp_path):
    with pytest.raises(ValueError, match="export: each expert of gate_up trains with a separate tensor scale"):
        checkpoint.export(module(master_weights=master_weights), tmp_path / "made", format="nvfp4_modelopt")


def test_the_monitor_sees_them():
    monitor = NumericsMonitor(made := module(), every=1)
    results(made, torch.randn(70, 48))
    monitor.step()
    monitor.close()
    assert "gate_up" in str(monitor.report)


def test_an_optimizer_casts_masters_with_a_scale_an_expert(device):
    """Quantized Parameters train as master weights do, which are quantized where products read them."""
    quantized, masters = module(device, master_weights=False), module(device)
    optimizers = [
        MasterWeightOptimizer(torch.optim.SGD, quantized, lr=1.0, foreach=False),
        torch.optim.SGD(masters.parameters(), lr=1.0, foreach=False),
    ]
    for step in range(2):
        for p, w in zip(quantized.parameters(), masters.parameters(), strict=True):
            p.grad = (torch.randn(p.shape) * 4.0 ** torch.arange(4)[:, None, None] * 8**step).to(device)
            w.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for p, w in zip(quantized.parameters(), masters.parameters(), strict=True):
            assert p.global_scale.shape == (4,) and p.global_scale.unique().numel() == 4
            assert_operands_equal(p.operand(), w.quantized())
