"""Checkpoints whose scales are powers of two in a byte each, as DeepSeek-V4's: out, and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from helpers import FP8, FP8_POW2, mlp, replace
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, is_linear, recommended_layers, skip_fqns, skip_lm_head
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

from exported_models import decoded_fp8, digest, language_model, tensors_in, tiny_mixture

pytestmark = pytest.mark.usefixtures("no_interpreter")
FORMAT = "fp8_block_ue8m0"
FEATURES = (200, 300, 130)


def deepseek_v4(config, *skipped):
    model = tiny_mixture("deepseek_v4", "cpu")
    if config is not None:
        quantize_(model, config, filter_fn=recommended_layers(model) & skip_fqns(*skipped))
    return model


masters_or_not = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))


@masters_or_not
def test_files_have_the_bytes_that_products_read(masters, tmp_path):
    """A scale's byte is its exponent, 127 above that of one."""
    model = mlp(replace(FP8_POW2, master_weights=masters), features=FEATURES)
    weights = checkpoint.quantized_weights(model, FORMAT)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in weights}
    checkpoint.export(model, tmp_path / "out", FORMAT)
    found = tensors_in(tmp_path / "out")
    assert found.keys() == {f"{i}.{n}" for i in (0, 2) for n in ("weight", "scale", "bias")}
    for i in (0, 2):
        operand = model[i].weight.quantized() if masters else model[i].weight.operand()
        assert digest(found[f"{i}.weight"]) == digest(operand.qdata)
        exponents = operand.scale.log2()
        assert torch.equal(exponents, exponents.round())
        assert_bitwise_equal(found[f"{i}.scale"].view(torch.uint8), (exponents + 127).to(torch.uint8))


@masters_or_not
def test_a_whole_model_is_loaded(masters, tmp_path):
    """The values come back; into quantized Parameters the very bytes do."""
    config = replace(FP8_POW2, master_weights=masters)
    model, other, plain = (deepseek_v4(c) for c in (config, config, None))
    with torch.no_grad():
        for p in (*other.parameters(), *plain.parameters()):
            p.copy_(torch.ones(p.shape))
    checkpoint.export(model, tmp_path / "out", FORMAT)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["scale_fmt"] == "ue8m0" and settings["quant_method"] == "fp8"
    for loaded in (other, plain):
        checkpoint.load(loaded, tmp_path / "out")
    for n, p in model.named_parameters():
        values = lambda x: x.quantized() if hasattr(x, "quantized") else x  # noqa: E731
        got, wanted = (values(x) for x in (other.get_parameter(n), p))
        if hasattr(wanted, "qdata"):
            decoded = decoded_fp8(wanted.qdata, wanted.scale)
            assert_bitwise_equal(decoded_fp8(got.qdata, got.scale), decoded, n)
            assert_bitwise_equal(plain.get_parameter(n).detach(), decoded, n)
            if not masters:
                assert digest(got.qdata) == digest(wanted.qdata) and digest(got.scale) == digest(wanted.scale)


def quantized_again(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values of a weight that vLLM has quantized in front of DeepGEMM: blocks 128×128, scales that are powers of two.

    Source: vLLM 0.33, fp8_utils.py (`requant_weight_ue8m0_inplace`), utils/deep_gemm.py (`per_block_cast_to_fp8`).
    """
    values, again = decoded_fp8(codes, scale), torch.empty(codes.shape)
    for i in range(0, codes.shape[0], 128):
        for j in range(0, codes.shape[1], 128):
            block = values[i : i + 128, j : j + 128]
            factor = torch.exp2((block.abs().amax().clamp(1e-4) / 448).log2().ceil())
            again[i : i + 128, j : j + 128] = (block * (1 / factor)).to(torch.float8_e4m3fn).float() * factor
    return again


def test_engines_that_quantize_weights_again_keep_their_values(tmp_path):
    """Also where the largest value of a block rounds down to half of what its scale is made for; fp32 scales do not."""
    changed = {}
    for config, format, name in ((FP8_POW2, FORMAT, "scale"), (FP8, "fp8_block", "weight_scale_inv")):
        model = mlp(config, features=FEATURES)
        block = model[2].weight.hp.data[:128, :128]
        block *= 224.4 * 2**-9 / block.abs().amax()
        checkpoint.export(model, tmp_path / format, format)
        found = tensors_in(tmp_path / format)
        for i in (0, 2):
            codes, scale = found[f"{i}.weight"], found[f"{i}.{name}"]
            values = decoded_fp8(codes, scale)
            changed[format, i] = (quantized_again(codes, scale) != values).float().mean().item()
    assert changed["fp8_block_ue8m0", 0] == changed["fp8_block_ue8m0", 2] == 0
    assert min(changed["fp8_block", 0], changed["fp8_block", 2]) > 0.5


@masters_or_not
@pytest.mark.parametrize("kind", ("all", "some", "none"))
def test_files_in_fp32_say_that_scales_are_powers_of_two(kind, masters, tmp_path):
    """Where all are. They are loaded and exported to the same bytes."""
    config = replace(FP8_POW2 if kind == "all" else FP8, master_weights=masters)

    def made():
        model = language_model("Llama", None)
        if kind == "some":
            quantize_(model, replace(FP8_POW2, master_weights=masters), filter_fn=skip_fqns("*.mlp.*") & skip_lm_head())
        others = is_linear() & (lambda m, fqn: ".mlp." in fqn) if kind == "some" else skip_lm_head()
        quantize_(model, config, filter_fn=others)
        return model

    checkpoint.export(made(), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings.get("scale_fmt") == ("ue8m0" if kind == "all" else None)
    assert {name for name in tensors_in(tmp_path / "out") if name.endswith("scale")} == set()
    again = made()
    with torch.no_grad():
        for p in again.parameters():
            p.copy_(torch.ones(p.shape))
    checkpoint.load(again, tmp_path / "out")
    checkpoint.export(again, tmp_path / "again")
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_other_scales_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"0\.weight trains with scales that are no powers of two, .* as fp8_block"):
        checkpoint.export(mlp(FP8, features=FEATURES), tmp_path / "out", FORMAT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ("Llama", "Mixtral", "DeepseekV3"))
def test_models_whose_engines_do_not_read_it_are_refused(name, tmp_path, capsys):
    """Before anything is written; the format that is named takes them."""
    plain = language_model(name, None)
    plain.save_pretrained(tmp_path / "plain")
    model = language_model(name, FP8_POW2)
    for call in (checkpoint.quantized_weights, lambda *x: checkpoint.export(x[0], tmp_path / "out", x[1])):
        with pytest.raises(
            ValueError, match=rf"has model_type {model.config.model_type}; choose fp8_block, "
        ) as refused:
            call(model, FORMAT)
    command = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to"]
    assert main([*command, FORMAT]) == 2
    assert "choose fp8_block and --power-of-2-scales, " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if name == "Llama":
        assert_expected_inline(
            str(refused.value).replace("; ", ";\n").replace(", and", ",\nand"),
            """\
export: fp8_block_ue8m0 is for models whose engines read scales called `scale` (model_type deepseek_v4),
and LlamaForCausalLM has model_type llama;
choose fp8_block, which writes scale_fmt: "ue8m0" for scales that are powers of two""",
        )
    assert main([*command, "fp8_block", "--power-of-2-scales"]) == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["scale_fmt"] == "ue8m0"


def test_a_norm_called_scale_is_no_scale(tmp_path):
    """`scale` beside a weight in high precision is a tensor of its own."""
    model = mlp(FP8_POW2, features=FEATURES)
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    model.register_parameter("weight", torch.nn.Parameter(torch.ones(3)))
    checkpoint.export(model, tmp_path / "out", FORMAT)
    with torch.no_grad():
        model.scale.zero_()
    checkpoint.load(model, tmp_path / "out")
    assert torch.equal(model.scale, torch.ones(3))


def test_convert_writes_what_export_writes(tmp_path):
    deepseek_v4(None).save_pretrained(tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", FORMAT]) == 0
    checkpoint.export(deepseek_v4(FP8_POW2), tmp_path / "exported", FORMAT)
    got, expected = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "exported")
    assert got.keys() == expected.keys() and all(digest(got[name]) == digest(x) for name, x in expected.items())
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "plain")]) == 0


def test_transformers_loads_it(tmp_path):
    """Dequantized on the CPU: the values of our decoding. It takes whole blocks alone."""
    transformers = pytest.importorskip("transformers", "5.20")
    model = deepseek_v4(FP8_POW2, "*.q_a_proj", "*.q_b_proj", "*.kv_proj")
    checkpoint.export(model, tmp_path / "out", FORMAT)
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=settings, dtype=torch.float32
    )
    for n, p in model.named_parameters():
        if hasattr(p, "quantized"):
            operand = p.quantized()
            decoded = decoded_fp8(operand.qdata, operand.scale)
            torch.testing.assert_close(loaded.get_parameter(n).detach(), decoded, rtol=0.01, atol=1e-4)
