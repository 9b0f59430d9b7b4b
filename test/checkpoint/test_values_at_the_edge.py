"""Weights of zeros, tiny and huge values, NaN and Inf: what files hold stands for them, or nothing is written."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import FP8, FP8_POW2, NVFP4
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint
from torchao_blockwise.cli import main

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import SMALL, digest, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")

FORMATS = {
    "fp8_block": FP8,
    "fp8_block_ue8m0": FP8_POW2,
    "nvfp4_compressed_tensors": NVFP4,
    "nvfp4_modelopt": NVFP4,
}
every_format = pytest.mark.parametrize("format", FORMATS)
# By which random values are multiplied, the largest of which becomes one that fp32 still holds.
FACTORS = (0.0, 1e-42, 1e-38, 1e-36, 8e-36, 1e-30, 1.0, 7e37)
# Where bytes differ: codes with a block scale of zero.
SAME_VALUES = {("nvfp4_compressed_tensors", 1e-42), ("nvfp4_modelopt", 1e-42)}
BOTH_NVFP4 = tuple(FORMATS)[2:]


def layer(values: torch.Tensor, format: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(*reversed(values.shape), bias=False))
    model[0].weight = nn.Parameter(values.clone())
    quantize_(model, FORMATS[format])
    return model


def values(factor: float) -> torch.Tensor:
    return torch.randn(144, 128, generator=torch.Generator().manual_seed(0)) * factor


@every_format
@pytest.mark.parametrize("factor", FACTORS)
def test_what_is_written_is_read_and_written_again(format, factor, tmp_path):
    """All scales are finite; the values that are read are close, or as good as zero."""
    x = values(factor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized anew.*")
        checkpoint.export(layer(x, format), tmp_path / "out", format)
        other = layer(torch.ones_like(x), format)
        checkpoint.load(other, tmp_path / "out")
        checkpoint.export(other, tmp_path / "again", format)
    found, again = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "again")
    for name, tensor in found.items():
        assert "scale" not in name or tensor.float().isfinite().all(), name
        assert (format, factor) in SAME_VALUES or digest(tensor) == digest(again[name]), name
    plain = nn.Sequential(nn.Linear(128, 144, bias=False))
    checkpoint.load(plain, tmp_path / "out")
    # FP8's scales are of an amax of 1e-12 at least, NVFP4's least value is 2^-126 / 512 / 2.
    least = 1e-14 if format.startswith("fp8") else 1e-40
    assert ((plain[0].weight.double() - x.double()).norm() <= 0.13 * x.double().norm() + 144 * least).item()


@pytest.mark.parametrize("format", BOTH_NVFP4)
def test_a_tensor_scale_is_a_normal_number(format, tmp_path):
    """Kernels may take others for zero; the reciprocal of some is infinite."""
    with pytest.warns(UserWarning, match=r"1 weights .* too small for one, and are quantized anew: 0\.weight"):
        checkpoint.export(layer(values(1e-36), format), tmp_path / "out", format)
    found = tensors_in(tmp_path / "out")
    scale = found["0.weight_scale_2"] if "0.weight_scale_2" in found else 1 / found["0.weight_global_scale"]
    assert scale.item() == 2.0**-126
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.export(layer(values(1e-34), format), tmp_path / "other", format)


@every_format
@pytest.mark.parametrize("bad", ("nan", "inf", "-inf"))
def test_what_is_no_number_is_not_written(format, bad, tmp_path):
    x = values(1.0)
    x[130, 7] = float(bad)
    with pytest.raises(ValueError, match=r"export: 0\.weight has NaN or Inf among its values"):
        checkpoint.export(layer(x, format), tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("bad", "code"), ((float("nan"), 2), (1e-36, 0)), ids=("nan", "tiny"))
@pytest.mark.parametrize("format", ("fp8_block", *BOTH_NVFP4))
def test_convert_does_as_export(format, bad, code, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", "5.0")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(bad)
    model.save_pretrained(tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", format]) == code
    if code:
        assert "model.layers.1.mlp.down_proj.weight has NaN or Inf" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        return
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert all(x.float().isfinite().all() for x in safetensors.load_file(file).values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
