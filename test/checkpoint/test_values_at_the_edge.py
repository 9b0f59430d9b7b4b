"""Weights of zeros, tiny and huge values, NaN and Inf: what files hold stands for them, or nothing is written."""

import pytest
import torch
from exported_models import FORMATS, decoded, every_format, export, filled, language_model, tensors_in
from helpers import FP8, FP8_POW2, assert_same_tensors, converted, mlp
from torch import nn

from torchao_blockwise import checkpoint
from torchao_blockwise.cli import main

# By which random values are multiplied, the largest of which becomes one that fp32 still holds.
FACTORS = (0.0, 1e-42, 1e-38, 8e-36, 1.0, 7e37)
BOTH_NVFP4 = tuple(FORMATS)[2:]


def layer(values: torch.Tensor, format: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(*reversed(values.shape), bias=False))
    model[0].weight = nn.Parameter(values.clone())
    return converted(model, FORMATS[format])


def values(factor: float) -> torch.Tensor:
    return torch.randn(144, 128, generator=torch.Generator().manual_seed(0)) * factor


@every_format
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_what_is_written_is_read_and_written_again(format, factor, dtype, tmp_path):
    """All scales are finite; the values that are read are close, or as good as zero."""
    x = values(factor).to(dtype)
    found, other = export(layer(x, format), tmp_path / "out", format), layer(torch.ones_like(x), format)
    checkpoint.load(other, tmp_path / "out")
    again = export(other, tmp_path / "again", format)
    assert all(tensor.float().isfinite().all() for name, tensor in found.items() if "scale" in name)
    # Codes with a block scale of zero may differ.
    if format not in BOTH_NVFP4 or factor != 1e-42:
        assert_same_tensors(again, found)
    plain = nn.Sequential(nn.Linear(128, 144, bias=False))
    checkpoint.load(plain, tmp_path / "out")
    # FP8's scales are of an amax of 1e-12 at least, NVFP4's least value is 2^-126 / 512 / 2.
    least = 1e-14 if format.startswith("fp8") else 1e-40
    assert ((plain[0].weight.double() - x.double()).norm() <= 0.13 * x.double().norm() + 144 * least).item()


@pytest.mark.parametrize("format", BOTH_NVFP4)
def test_a_tensor_scale_is_a_normal_number(format, tmp_path, recwarn):
    """Kernels may take others for zero; the reciprocal of some is infinite."""
    checkpoint.export(layer(values(1e-34), format), tmp_path / "other", format)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"1 weights are quantized again, .* too small for a tensor scale: 0\.weight"):
        checkpoint.export(layer(values(1e-36), format), tmp_path / "out", format)
    found = tensors_in(tmp_path / "out")
    scale = found["0.weight_scale_2"] if "0.weight_scale_2" in found else 1 / found["0.weight_global_scale"]
    assert scale.item() == 2.0**-126


@every_format
@pytest.mark.parametrize("bad", ("nan", "inf", "-inf"))
def test_what_is_no_number_is_not_written(format, bad, tmp_path):
    x = values(1.0)
    x[130, 7] = float(bad)
    with pytest.raises(ValueError, match=r"export: 0\.weight has NaN or Inf, so its quantized values"):
        checkpoint.export(layer(x, format), tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ("fp8_block", *BOTH_NVFP4))
def test_convert_does_as_export(format, tmp_path, capsys):
    """A tiny weight gets scales that are finite; one with NaN is named."""
    model = language_model("Llama", None)
    for bad, code in ((1e-36, 0), (float("nan"), 2)):
        filled(model.model.layers[1].mlp.down_proj, bad)
        model.save_pretrained(tmp_path / f"plain{code}")
        assert main(["convert", str(tmp_path / f"plain{code}"), str(tmp_path / f"out{code}"), "--to", format]) == code
    assert "model.layers.1.mlp.down_proj.weight has NaN or Inf" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
    assert all(x.float().isfinite().all() for x in tensors_in(tmp_path / "out0").values())


def test_engines_that_quantize_weights_again_keep_their_values(tmp_path):
    """Also where the largest value of a block rounds down to half of what its scale is made for; fp32 scales do not."""
    changed = {}
    for config, scale in ((FP8_POW2, "scale"), (FP8, "weight_scale_inv")):
        model = mlp(config, features=(208, 304, 130))
        block = model[2].weight.hp.data[:128, :128]
        block *= 224.4 * 2**-9 / block.abs().amax()
        found = export(model, tmp_path / scale, "fp8_block_ue8m0" if config is FP8_POW2 else "fp8_block")
        for i in (0, 2):
            held = decoded(found, f"{i}.weight", f"{i}.{scale}")
            changed[scale, i] = (quantized_by_vllm(held) != held).float().mean().item()
    assert changed["scale", 0] == changed["scale", 2] == 0
    assert min(changed["weight_scale_inv", 0], changed["weight_scale_inv", 2]) > 0.5


def quantized_by_vllm(held: torch.Tensor) -> torch.Tensor:
    """Values of a weight that vLLM has quantized in front of DeepGEMM: blocks 128×128, scales that are powers of two.

    Source: vLLM 0.33, fp8_utils.py (`requant_weight_ue8m0_inplace`), utils/deep_gemm.py (`per_block_cast_to_fp8`).
    """
    again = torch.empty(held.shape)
    for i in range(0, held.shape[0], 128):
        for j in range(0, held.shape[1], 128):
            block = held[i : i + 128, j : j + 128]
            factor = torch.exp2((block.abs().amax().clamp(1e-4) / 448).log2().ceil())
            again[i : i + 128, j : j + 128] = (block * (1 / factor)).to(torch.float8_e4m3fn).float() * factor
    return again
