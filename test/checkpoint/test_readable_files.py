"""Files of other tools that hold our blocks under other names, and our own with plain weights, are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import FP8, FP8_POW2, NVFP4, mlp, replace

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import layouts
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.checkpoint.plain_layers import PlainLayers
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import decoded_fp8, digest, language_model, logits, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")

FEATURES = (200, 300, 130)
masters_or_not = pytest.mark.parametrize("masters", (True, False, None), ids=("masters", "quantized", "plain"))


def values_of(model) -> list[torch.Tensor]:
    weights = (model[i].weight.detach() for i in (0, 2))
    return [w.hp if hasattr(w, "hp") else w.dequantize() if hasattr(w, "qdata") else w for w in weights]


def saved(folder: Path, tensors: dict, settings: object = None) -> None:
    folder.mkdir(exist_ok=True)
    safetensors.save_file(tensors, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))


def compressed(block: object = [128, 128], format: str = "float-quantized") -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


@masters_or_not
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_fp8_blocks_of_compressed_tensors(dtype, masters, tmp_path):
    checkpoint.export(mlp(FP8, FEATURES, seed=1), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    for i in (0, 2):
        scale = found.pop(f"{i}.weight_scale_inv").to(dtype)
        found |= {f"{i}.weight_scale": scale, f"{i}.q_scale": torch.ones(()), f"{i}.prob_scale": torch.ones(1)}
    saved(tmp_path / "other", found, {"text_config": {"quantization_config": compressed()}})
    model = mlp(None if masters is None else replace(FP8, master_weights=masters), FEATURES)
    checkpoint.load(model, tmp_path / "other")
    for i, got in zip((0, 2), values_of(model)):
        expected = decoded_fp8(found[f"{i}.weight"], found[f"{i}.weight_scale"])
        torch.testing.assert_close(got, expected, rtol=2**-22, atol=0)
    assert main(["verify", str(tmp_path / "other"), str(tmp_path / "other")]) == 0


@masters_or_not
def test_scales_of_zero_of_blocks_of_zeros(masters, tmp_path):
    """Minus zeros too; the block next to it is not disturbed."""
    features = (256, 300, 130)
    checkpoint.export(mlp(FP8, features, seed=1), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    found["0.weight"].view(torch.uint8)[128:256, :128] = 0x80
    found["0.weight_scale_inv"][1, 0] = 0
    saved(tmp_path / "other", found)
    model = mlp(None if masters is None else replace(FP8, master_weights=masters), features)
    checkpoint.load(model, tmp_path / "other")
    scale = found["0.weight_scale_inv"]
    assert_bitwise_equal(values_of(model)[0].abs(), decoded_fp8(found["0.weight"], scale).abs())
    assert model(torch.ones(1, 256)).isfinite().all()


@pytest.mark.parametrize("code", (1, 0x7F))
def test_scales_of_zero_of_other_blocks_are_refused(code, tmp_path):
    checkpoint.export(mlp(FP8, FEATURES, seed=1), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    found["0.weight"].view(torch.uint8)[128:256, :128] = 0
    found["0.weight"].view(torch.uint8)[255, 127] = code
    found["0.weight_scale_inv"][1, 0] = 0
    saved(tmp_path / "other", found)
    with pytest.raises(ValueError, match=r"0\.weight_scale_inv in .* has scales that are no positive numbers; copy"):
        checkpoint.load(mlp(FP8, FEATURES), tmp_path / "other")


@pytest.mark.parametrize("dtype", (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
@pytest.mark.parametrize("scaled", (True, False), ids=("scaled", "bare"))
def test_other_elements_are_refused_for_what_they_are(scaled, dtype, tmp_path):
    checkpoint.export(mlp(FP8, FEATURES, seed=1), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    found["0.weight"] = found["0.weight"].float().to(dtype)
    if not scaled:
        del found["0.weight_scale_inv"]
    saved(tmp_path / "other", found)
    name = {torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ"}.get(dtype, "F8_E5M2FNUZ")
    with pytest.raises(ValueError, match=rf"0\.weight in .* is in {name}, which is not read; take plain ones"):
        checkpoint.load(mlp(FP8, FEATURES), tmp_path / "other")


SETTINGS = {
    "channels": (compressed(None), r"block_structure is None; files with \[128, 128\] are read"),
    "blocks of 64": (compressed([64, 64]), r"block_structure is \[64, 64\]"),
    "integers": (
        compressed(format="pack-quantized"),
        r"format is 'pack-quantized'; .*'nvfp4-pack-quantized' are read",
    ),
    "no groups": (
        compressed() | {"config_groups": None},
        r"quantization_config of .* cannot be read",
    ),
    "a number": ({"quant_method": "fp8", "weight_block_size": 128}, r"quantization_config of 'fp8' cannot be read"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_not_read(settings, message, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out")
    saved(tmp_path / "other", tensors_in(tmp_path / "out"), {"quantization_config": settings})
    with pytest.raises(ValueError, match=message):
        checkpoint.load(mlp(FP8), tmp_path / "other")


@pytest.mark.parametrize("method", ("blockwise_fp8", "blockwise_nvfp4"))
def test_our_own_plain_checkpoints_are_read(method, tmp_path):
    transformers = pytest.importorskip("transformers", "5.0")
    from torchao_blockwise.integrations.transformers import BlockwiseFP8Config, NVFP4Config

    language_model("Llama", None).save_pretrained(tmp_path / "plain")
    config = {"blockwise_fp8": BlockwiseFP8Config, "blockwise_nvfp4": NVFP4Config}[method]()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == method
    other = language_model("Llama", None, initializer_range=0.5)
    checkpoint.load(other, tmp_path / "ours")
    assert_bitwise_equal(logits(other), logits(language_model("Llama", None)))
    assert main(["verify", str(tmp_path / "ours"), str(tmp_path / "plain")]) == 0
    for source in ("ours", "plain"):
        assert main(["convert", str(tmp_path / source), str(tmp_path / f"{source}-fp8")]) == 0
    got, expected = (tensors_in(tmp_path / f"{source}-fp8") for source in ("ours", "plain"))
    assert got.keys() == expected.keys() and all(digest(got[n]) == digest(x) for n, x in expected.items())


# --- scales that are powers of two ------------------------------------------------------------------------------------

WIDE = (384, 640, 256)


def with_halves(config, dtype=torch.float32):
    """A model whose blocks' largest values lie around halves and wholes of what a code holds, in all magnitudes."""
    model = mlp(replace(config, master_weights=True), WIDE, seed=1, dtype=dtype)
    peaks = [224 + 8 * i / 6 for i in range(7)] + [448, 464, 231.99, 224.001]
    n = 0
    for i in (0, 2):
        weight = model[i].weight.hp.data
        for row in range(0, weight.shape[0], 128):
            for column in range(0, weight.shape[1], 128):
                block = weight[row : row + 128, column : column + 128]
                block *= peaks[n % len(peaks)] * 2.0 ** (n % 40 - 25) / block.abs().amax()
                n += 1
        weight[:128, :128] = 0
    return model


@pytest.mark.parametrize("loaded", ("fp32", "bf16", "quantized"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("of_fp32", "of_bf16"))
@pytest.mark.parametrize("config", (FP8, FP8_POW2), ids=("fp32_scales", "powers_of_2"))
def test_load_and_export_repeat_every_byte(config, dtype, loaded, tmp_path, recwarn):
    if (config, loaded) == (FP8, "bf16") and dtype == torch.float32:
        pytest.skip("scales in fp32 of values in fp32 are not made of values in bf16")
    checkpoint.export(with_halves(config, dtype), tmp_path / "out")
    before = tensors_in(tmp_path / "out")
    model = mlp(replace(config, master_weights=loaded != "quantized"), WIDE, dtype=dtype)
    if loaded == "bf16":
        model = mlp(config, WIDE, dtype=torch.bfloat16)
    checkpoint.load(model, tmp_path / "out")
    checkpoint.export(model, tmp_path / "again")
    after = tensors_in(tmp_path / "again")
    for name in before:
        if not name.endswith("bias"):
            assert_bitwise_equal(after[name].view(torch.uint8), before[name].view(torch.uint8), name)
    assert not [w for w in recwarn if "power_of_2_scales" in str(w.message)]


@pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))
@pytest.mark.parametrize(("of_files", "of_model"), ((FP8_POW2, FP8), (FP8, FP8_POW2)), ids=("to_fp32", "to_powers"))
@pytest.mark.parametrize("has_config", (True, False), ids=("config", "no_config"))
def test_other_scales_than_the_models_are_named(of_files, of_model, masters, has_config, tmp_path):
    """Whether or not config.json says `scale_fmt`."""
    checkpoint.export(with_halves(of_files), tmp_path / "out")
    if has_config:
        settings = layouts.FP8.settings(PlainLayers([], []))
        settings |= layouts.SCALE_FMT if of_files is FP8_POW2 else {}
        (tmp_path / "out" / "config.json").write_text(json.dumps({"quantization_config": settings}))
    model = mlp(replace(of_model, master_weights=masters), WIDE)
    if not masters and of_files is FP8_POW2:
        # The bytes are taken over.
        checkpoint.load(model, tmp_path / "out")
        checkpoint.export(model, tmp_path / "again")
        before, after = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "again")
        assert all(digest(after[name]) == digest(x) for name, x in before.items())
        return
    fits = (
        rf"to keep them convert the model with BlockwiseFP8TrainingConfig\(power_of_2_scales={of_files is FP8_POW2}\)"
    )
    with pytest.warns(UserWarning, match=rf"load: scales of 0\.weight in .* are .*; {fits}") as said:
        checkpoint.load(model, tmp_path / "out")
    assert len(said) == 1


# --- groups of compressed-tensors with a format each ------------------------------------------------------------------


def mixed(**formats: str) -> dict:
    groups = {name: compressed()["config_groups"]["group_0"] | {"format": x} for name, x in formats.items()}
    return compressed(format="mixed-precision") | {"config_groups": groups}


@pytest.mark.parametrize("key", ("quantization_config", "compression_config"))
@pytest.mark.parametrize("nested", (False, True), ids=("", "text_config"))
def test_layers_of_two_formats_are_read(nested, key, tmp_path):
    """The first in NVFP4, the other in blocks of FP8."""
    features = (64, 160, 32)
    checkpoint.export(mlp(FP8, features, seed=1), tmp_path / "fp8")
    checkpoint.export(mlp(NVFP4, features, seed=1), tmp_path / "nvfp4", "nvfp4_compressed_tensors")
    found = tensors_in(tmp_path / "fp8")
    found = {name: x for name, x in found.items() if name.startswith("2.")}
    found["2.weight_scale"] = found.pop("2.weight_scale_inv")
    found |= {name: x for name, x in tensors_in(tmp_path / "nvfp4").items() if name.startswith("0.")}
    settings = {key: mixed(first="nvfp4-pack-quantized", second="float-quantized")}
    saved(tmp_path / "other", found, {"text_config": settings} if nested else settings)
    model, alike = mlp(None, features), {"fp8": mlp(None, features), "nvfp4": mlp(None, features)}
    checkpoint.load(model, tmp_path / "other")
    for name, other in alike.items():
        checkpoint.load(other, tmp_path / name)
    assert_bitwise_equal(model[0].weight, alike["nvfp4"][0].weight)
    assert_bitwise_equal(model[2].weight, alike["fp8"][2].weight)
    plain = Files(tmp_path / "other").plain_config()
    assert plain == ({"text_config": {}} if nested else {})


MIXED = {
    "one is of integers": (
        mixed(first="float-quantized", second="pack-quantized"),
        r"second of 'mixed-precision': format is 'pack-quantized'; of compressed-tensors's files those of ",
    ),
    "one has no format": (mixed(first="float-quantized", second=None), r"second of 'mixed-precision': format is None"),
    "one is mixed": (mixed(first="mixed-precision"), r"first of 'mixed-precision': format is 'mixed-precision'"),
}


@pytest.mark.parametrize("key", ("quantization_config", "compression_config"))
@pytest.mark.parametrize(("settings", "message"), MIXED.values(), ids=MIXED)
def test_a_group_of_another_format_is_refused_by_name(settings, message, key, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out")
    saved(tmp_path / "other", tensors_in(tmp_path / "out"), {key: settings})
    with pytest.raises(ValueError, match=message):
        checkpoint.load(mlp(FP8), tmp_path / "other")
