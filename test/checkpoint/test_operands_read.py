"""The operand that a product reads has the bytes that files hold, by SHA-256; of ranks in test_export_over_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import FP8, FP8_POW2, NVFP4, mlp, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, experts
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

from exported_models import tensors_in
from operands_read import OperandsRead, assert_files_hold

pytestmark = pytest.mark.usefixtures("no_interpreter")

FORMATS = {"fp8_block": FP8, "nvfp4_compressed_tensors": NVFP4}
every_format = pytest.mark.parametrize("format", FORMATS)
FEATURES = (208, 304, 144)


def check(model: nn.Module, format: str, folder: Path, *inputs) -> None:
    with OperandsRead() as products, torch.no_grad():
        model(*inputs)
    checkpoint.export(model, folder, format)
    assert_files_hold(products.operands, tensors_in(folder))


def experts_of(config, device: str) -> SwiGLUExperts:
    torch.manual_seed(0)
    model = SwiGLUExperts(3, 192, 128)
    quantize_(model, config, filter_fn=experts())
    return model.to(device)


def tokens(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 192, device=device), torch.tensor([2, 4, 6], dtype=torch.int32, device=device)


@every_format
@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_of_linear_layers(format, masters, dtype, device, tmp_path):
    model = mlp(replace(FORMATS[format], master_weights=masters), features=FEATURES, dtype=dtype).to(device)
    check(model, format, tmp_path / "out", torch.randn(4, FEATURES[0], dtype=dtype, device=device))


@every_format
def test_after_steps_of_masters_of_an_optimizer(format, device, tmp_path):
    model = mlp(replace(FORMATS[format], master_weights=False), features=FEATURES).to(device)
    optimizer = MasterWeightOptimizer(torch.optim.AdamW, model, lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, FEATURES[0], device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check(model, format, tmp_path / "out", torch.randn(4, FEATURES[0], device=device))


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
@pytest.mark.parametrize("config", (FP8, FP8_POW2), ids=("fp32_scales", "powers_of_2"))
def test_of_experts(config, masters, device, tmp_path):
    model = experts_of(replace(config, master_weights=masters), device)
    check(model, "fp8_block", tmp_path / "out", *tokens(device))


def test_other_bytes_are_seen(device, tmp_path):
    model = mlp(FP8, features=FEATURES).to(device)
    with OperandsRead() as products, torch.no_grad():
        model(torch.randn(4, FEATURES[0], device=device))
    with torch.no_grad():
        model[0].weight[0, 0] *= 2
    checkpoint.export(model, tmp_path / "out")
    with pytest.raises(AssertionError):
        assert_files_hold(products.operands, tensors_in(tmp_path / "out"))
