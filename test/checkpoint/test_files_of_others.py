"""Files of other tools, which hold our blocks under other names, or what ours never do: NaN, zero scales, MXFP4."""

from __future__ import annotations

import json

import pytest
import torch
from exported_models import (
    compressed_tensors,
    decoded,
    export,
    filled,
    language_model,
    logits,
    operand_of,
    save,
    tensors_in,
    values_of,
)
from helpers import FP8, NVFP4, assert_same_tensors, both_masters, mlp, replace

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.files import config_and_settings
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("no_interpreter")
FEATURES = (208, 304, 130)
masters_quantized_or_plain = pytest.mark.parametrize(
    "masters", (True, False, None), ids=("masters", "quantized", "plain")
)


def converted(masters: bool | None, features):
    return mlp(None if masters is None else replace(FP8, master_weights=masters), features)


@masters_quantized_or_plain
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_fp8_blocks_of_compressed_tensors(dtype, masters, tmp_path):
    found = export(mlp(FP8, FEATURES, seed=1), tmp_path / "out")
    for i in (0, 2):
        found[f"{i}.weight_scale"] = found.pop(f"{i}.weight_scale_inv").to(dtype)
        found |= {f"{i}.q_scale": torch.ones(()), f"{i}.prob_scale": torch.ones(1)}
    save(found, tmp_path / "out")
    content = {"text_config": {"quantization_config": compressed_tensors()}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(content))
    model = converted(masters, FEATURES)
    checkpoint.load(model, tmp_path / "out")
    for i in (0, 2):
        expected = decoded(found, f"{i}.weight", f"{i}.weight_scale")
        torch.testing.assert_close(values_of(model[i].weight), expected, rtol=2**-22, atol=0)
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("nested", (False, True), ids=("", "text_config"))
def test_layers_of_two_formats_are_read(nested, tmp_path):
    """compressed-tensors has groups of layers: the first in NVFP4, the other in blocks of FP8."""
    fp8 = export(mlp(FP8, seed=1), tmp_path / "fp8")
    nvfp4 = export(mlp(NVFP4, seed=1), tmp_path / "nvfp4", "nvfp4_compressed_tensors")
    found = {name: x for name, x in fp8.items() if name.startswith("2.")}
    found["2.weight_scale"] = found.pop("2.weight_scale_inv")
    save(found | {name: x for name, x in nvfp4.items() if name.startswith("0.")}, tmp_path / "other")
    groups = {x: x for x in (layouts.PACKED, layouts.FLOAT)}
    settings = {"quantization_config": compressed_tensors("mixed-precision", **groups)}
    (tmp_path / "other" / "config.json").write_text(json.dumps({"text_config": settings} if nested else settings))
    model, alike = mlp(), {"fp8": mlp(), "nvfp4": mlp()}
    checkpoint.load(model, tmp_path / "other")
    for name, other in alike.items():
        checkpoint.load(other, tmp_path / name)
    assert_bitwise_equal(model[0].weight, alike["nvfp4"][0].weight)
    assert_bitwise_equal(model[2].weight, alike["fp8"][2].weight)
    assert config_and_settings(tmp_path / "other")[0] == ({"text_config": {}} if nested else {})


@masters_quantized_or_plain
def test_scales_of_zero_of_blocks_of_zeros(masters, tmp_path):
    """Minus zeros too; the block next to it is not disturbed."""
    features = (256, 300, 130)
    found = export(mlp(FP8, features, seed=1), tmp_path / "out")
    found["0.weight"].view(torch.uint8)[128:256, :128] = 0x80
    found["0.weight_scale_inv"][1, 0] = 0
    save(found, tmp_path / "out")
    model = converted(masters, features)
    checkpoint.load(model, tmp_path / "out")
    assert_bitwise_equal(values_of(model[0].weight).abs(), decoded(found, "0.weight").abs())
    # Payload and scales are those of a block of zeros.
    assert masters is not False or model[0].weight.scale.min() > 0
    assert model(torch.ones(1, 256)).isfinite().all()


@masters_quantized_or_plain
@pytest.mark.parametrize("code", (0x7F, 0xFF))
def test_codes_that_are_nan_stay_so(code, masters, tmp_path):
    """No finite number comes of them, neither in the model nor in what it computes; an export names the weight."""
    found, places = export(mlp(FP8, FEATURES, seed=1), tmp_path / "out"), [(3, 5), (140, 199), (303, 0)]
    for place in places:
        found["0.weight"].view(torch.uint8)[place] = code
    save(found, tmp_path / "out")
    model = converted(masters, FEATURES)
    checkpoint.load(model, tmp_path / "out")
    assert values_of(model[0].weight).isnan().nonzero().tolist() == [list(place) for place in places]
    assert model[0](torch.ones(1, FEATURES[0]))[0, [3, 140, 303]].isnan().all()
    if masters is not None:
        with pytest.raises(ValueError, match=r"export: 0\.weight has NaN or Inf, so its quantized values"):
            checkpoint.export(model, tmp_path / "again")
        assert not (tmp_path / "again").exists()


@both_masters
@pytest.mark.parametrize("name", ("Qwen3Moe", "Mixtral"))
def test_experts_in_one_tensor_are_read(name, masters, tmp_path):
    """`gate_up_proj` and `gate_up_proj_scale_inv`, as a model has them, and not one by one as transformers writes."""
    config = replace(FP8, master_weights=masters)
    model = language_model(name, config)
    first = export(model, tmp_path / "first")
    found = {n: x for n, x in first.items() if ".experts." not in n}
    for n, p in model.named_parameters():
        if ".experts." in n:
            found |= {n: operand_of(p).qdata.clone(), f"{n}_scale_inv": operand_of(p).scale.clone()}
    save(found, tmp_path / "out")
    other = filled(language_model(name, config))
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    assert_same_tensors(export(other, tmp_path / "again"), first)


def test_gpt_oss_in_fp8_is_read(tmp_path):
    """`gate_up_proj_scale_inv` of experts [E, H, 2I]."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 256}
    language_model("GptOss", None, **sizes).save_pretrained(tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    names = [name for name in found if name.endswith("_proj") and ".experts." in name]
    for name in names:
        experts, rows, columns = found[name].shape
        found[name] = torch.randn(experts, rows, columns).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.rand(experts, -(-rows // 128), -(-columns // 128)) + 0.5
    assert len(names) == 4
    save(found, tmp_path / "out")
    model = language_model("GptOss", None, **sizes)
    checkpoint.load(model, tmp_path / "out")
    for name in names:
        assert_bitwise_equal(model.get_parameter(name).detach(), decoded(found, name), name)
