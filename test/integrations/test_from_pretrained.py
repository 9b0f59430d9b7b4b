"""`integrations.transformers.from_pretrained`: quantized and plain files of ten families give models that train."""

import functools
import itertools
import json
import warnings

import pytest
import torch
from exported_models import export, logits, losses, save, tensors_in, tiny_mixture
from helpers import FP8, assert_same_tensors, replace
from torchao.quantization import quantize_

from torchao_blockwise import (
    BlockwiseFP8TrainingConfig,
    MasterWeightTensor,
    NVFP4TrainingConfig,
    recommended_layers,
    skip_fqns,
)
from torchao_blockwise.tensors import BlockwiseFP8Tensor, NVFP4Tensor, QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal

transformers = pytest.importorskip("transformers", "5.0")

from pretrained_models import FAMILIES, expected_values, loaded_by_transformers, model_of, write  # noqa: E402

from torchao_blockwise.integrations.transformers import (  # noqa: E402
    BlockwiseFP8Config,
    NVFP4Config,
    from_pretrained,
)

RECIPE_OF = {"fp8_block": "fp8", "nvfp4_compressed_tensors": "nvfp4", "nvfp4_modelopt": "nvfp4", "plain": "fp8"}
# Pairs in the default tier: every format, and families whose names or layouts differ between files and model.
QUICK = {
    ("Qwen3", "fp8_block"),
    ("DeepseekV3", "fp8_block"),
    ("GptOss", "fp8_block"),
    ("Qwen3Moe", "nvfp4_compressed_tensors"),
    ("Phi3", "nvfp4_modelopt"),
    ("Mixtral", "plain"),
}
# One argument: the default tier takes these pairs, and does not choose others.
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(FAMILIES, RECIPE_OF)
    ],
    ids="-".join,
)


@pytest.fixture
def qwen(tmp_path):
    """(folder, tensors) of a Qwen3 in FP8."""
    return tmp_path / "qwen", write("Qwen3", "fp8_block", tmp_path / "qwen")[1]


def converted(model) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, (MasterWeightTensor, QuantizedTensor))}


def quiet(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return from_pretrained(*arguments, **options)


def dequantized() -> dict:
    """Options for transformers to decode FP8 files."""
    pytest.importorskip("transformers", "5.20")
    return {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}


def assert_same_model(model, expected):
    """Values, dtypes, buffers that no file has, ties, and logits."""
    for named in ("named_parameters", "named_buffers"):
        assert_same_tensors(dict(getattr(model, named)()), dict(getattr(expected, named)()))
    assert_bitwise_equal(logits(model), logits(expected))


@every_case
def test_decoded_values_are_those_of_other_packages(case, tmp_path):
    """Without a recipe: transformers' own model of FP8 and plain files, compressed-tensors' values of NVFP4 files.

    For all others the values by the rules of the formats.
    """
    family, format = case
    _, found = write(family, format, tmp_path / "x")
    dtype = torch.bfloat16 if format == "nvfp4_compressed_tensors" else torch.float32
    model = quiet(tmp_path / "x", None, dtype=dtype)
    assert not converted(model) and all(p.requires_grad for p in model.parameters()) and not model.training
    if format == "plain" or (format == "fp8_block" and family != "GptOss"):
        how = {} if format == "plain" else dequantized()
        assert_same_model(model, loaded_by_transformers(tmp_path / "x", dtype, **how))
        return
    checked = 0
    for name, got, expected in expected_values(model, found, format):
        # By the rules of Model Optimizer scales are multiplied in another order.
        close = 3e-7 if format == "nvfp4_modelopt" else 0
        where = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(got, expected.to(got.dtype), rtol=close, atol=0, msg=where)
        checked += name.endswith("weight")
    assert checked > 9


@every_case
def test_converted_layers_hold_the_payload_of_the_files(case, tmp_path):
    """As master weights and as quantized Parameters: both export every byte, and compute what the exported model does.

    Except in NVFP4, whose tensor scales the files unify: logits are then those of the decoded values with an error.
    """
    family, format = case
    written, found = write(family, format, tmp_path / "x")
    recipe = RECIPE_OF[format]
    if format == "plain":
        quantize_(written, FP8, filter_fn=recommended_layers(written))
    expected = converted(written).keys()
    for trainable in ("full", "adapters"):
        model = quiet(tmp_path / "x", recipe, trainable, dtype=torch.float32)
        masters = trainable == "full"
        kinds = MasterWeightTensor if masters else (BlockwiseFP8Tensor, NVFP4Tensor)
        assert converted(model).keys() == expected and all(isinstance(p, kinds) for p in converted(model).values())
        assert all(p.requires_grad is masters for p in model.parameters())
        if found:
            assert_same_tensors(export(model, tmp_path / trainable, format), found)
        if recipe == "fp8":
            assert_bitwise_equal(logits(model), logits(written))
        else:
            decoded = logits(from_pretrained(tmp_path / "x", None, dtype=torch.float32))
            assert 0 < (logits(model) - decoded).norm() < 0.5 * decoded.norm()


def test_e8m0_files(tmp_path):
    """DeepSeek-V4's names; the config has power-of-two scales by itself."""
    model = tiny_mixture("deepseek_v4", "cpu")
    # Other layers are not made of whole blocks, which transformers' decoder needs.
    chosen = recommended_layers(model) & skip_fqns("*.q_a_proj", "*.q_b_proj", "*.kv_proj")
    quantize_(model, BlockwiseFP8TrainingConfig(power_of_2_scales=True), filter_fn=chosen)
    found = export(model, tmp_path / "x", "fp8_block_ue8m0")
    assert_same_model(
        quiet(tmp_path / "x", None, dtype=torch.float32),
        loaded_by_transformers(tmp_path / "x", torch.float32, **dequantized()),
    )
    for trainable in ("full", "adapters"):
        got = quiet(tmp_path / "x", "fp8", trainable, dtype=torch.bfloat16 if trainable == "full" else torch.float32)
        assert all(p.config.power_of_2_scales for p in converted(got).values())
        assert_codes_and_scales(export(got, tmp_path / trainable, "fp8_block_ue8m0"), found)


def assert_codes_and_scales(got, found, scales: float = 0.0):
    """Payloads are bitwise identical, and scales differ by at most the factor 1 ± `scales`."""
    is_one_byte = [name for name, x in found.items() if x.dtype.itemsize == 1]
    assert is_one_byte
    for name in is_one_byte:
        assert_bitwise_equal(got[name].view(torch.uint8), found[name].view(torch.uint8), name)
    for name in (name for name in found if "scale" in name and name not in is_one_byte):
        torch.testing.assert_close(got[name], found[name], rtol=scales, atol=0)


@pytest.mark.parametrize("powers_of_2", (False, True), ids=("fp32", "powers_of_2"))
def test_masters_in_bf16_keep_the_codes(powers_of_2, tmp_path):
    """And scales, if they are powers of two; other scales follow a largest value that is rounded to 8 bits."""
    model = model_of("Qwen3")
    config = replace(FP8, power_of_2_scales=powers_of_2)
    quantize_(model, config, filter_fn=recommended_layers(model))
    found = export(model, tmp_path / "x")
    loaded = quiet(tmp_path / "x", "fp8", dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {p.config for p in converted(loaded).values()} == {config}
    assert_codes_and_scales(export(loaded, tmp_path / "again"), found, 0 if powers_of_2 else 2**-8)


def test_dtypes(qwen, tmp_path):
    """By default that of config.json; parts that transformers keeps in fp32 stay in fp32."""
    folder, _ = qwen
    for named, expected in ((torch.bfloat16, torch.bfloat16), (None, torch.bfloat16), (torch.float16, torch.float16)):
        content = json.loads((folder / "config.json").read_text())
        content["dtype"] = None if named is None else str(named).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(content))
        assert {x.dtype for x in from_pretrained(folder, "fp8").parameters()} == {expected}
    write("DeepseekV3", "fp8_block", tmp_path / "x")
    model = from_pretrained(tmp_path / "x", "fp8", dtype=torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype is torch.float32


def test_layers_to_leave_out(qwen):
    """They hold decoded values; so do all in another recipe's last blocks."""
    folder, _ = qwen
    decoded = from_pretrained(folder, None, dtype=torch.float32)
    model = from_pretrained(folder, "fp8", "adapters", dtype=torch.float32, filter_fn=skip_fqns("*.q_proj"))
    plain = model.model.layers[1].self_attn.q_proj.weight
    assert type(plain) is torch.nn.Parameter and not plain.requires_grad
    assert_bitwise_equal(plain.detach(), decoded.model.layers[1].self_attn.q_proj.weight.detach())
    assert len(converted(model)) == 12
    with pytest.warns(UserWarning, match="is stored in fp8_128x128, but the weight has blocks of nvfp4_16x16"):
        other = from_pretrained(folder, "nvfp4", dtype=torch.float32)
    assert {fqn.split(".")[2] for fqn in converted(other)} == {"0"}
    weight = other.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, MasterWeightTensor) and isinstance(weight.config, NVFP4TrainingConfig)
    expected = decoded.model.layers[0].mlp.up_proj.weight.detach()
    torch.testing.assert_close(weight.hp, expected, rtol=2**-22, atol=0)


def test_adapters_train_and_leave_every_payload(qwen, tmp_path):
    peft = pytest.importorskip("peft")
    folder, found = qwen
    base = from_pretrained(folder, "fp8", "adapters", dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    first, *_, last = losses(adapted, 4, 2e-3)
    assert last < first - 0.05
    assert_same_tensors(export(adapted.unload(), tmp_path / "unloaded"), found)


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4", None))
def test_full_fine_tuning_learns(recipe, qwen, tmp_path):
    """Every weight moves, and what is saved is plain."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="from_pretrained: ")
        model = from_pretrained(qwen[0], recipe, dtype=torch.float32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    first, *_, last = losses(model, 6, 2e-3)
    assert last < first - 0.5
    assert all(not torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    assert_same_tensors(loaded_by_transformers(tmp_path / "saved", torch.float32).state_dict(), model.state_dict())


THREE = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
OF_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
POWERS = BlockwiseFP8TrainingConfig(power_of_2_scales=True)
# {what: (path from the folder, options, what changes in config.json, error, message)}
REFUSED = {
    "a name of the Hub": ("../Qwen/Qwen3-8B-FP8", {}, {}, FileNotFoundError, r"is not a folder; .*snapshot_download\("),
    "no checkpoint": ("..", {}, {}, FileNotFoundError, r"has no \*\.safetensors; give the folder of a checkpoint"),
    "a recipe": (".", {"recipe": "fp9"}, {}, ValueError, r"one of \['fp8', 'nvfp4', 'None'\], got 'fp9'; did you mean"),
    "what trains": (".", {"trainable": "adapter"}, {}, ValueError,
                    r"trainable must be one of \['full', 'adapters'\], got 'adapter'; did you mean"),
    "a dtype": (".", {"dtype": torch.int8}, {}, ValueError, "must be bfloat16, float16 or float32, got torch.int8"),
    "another recipe than the files'": (
        ".", {"recipe": "nvfp4", "trainable": "adapters"}, {}, ValueError,
        r"weights in fp8_128x128, but trainable='adapters' .* is in nvfp4_16x16; choose the recipe of the"),
    "scales that the config does not have": (
        ".", {"recipe": POWERS, "trainable": "adapters"}, {}, ValueError,
        r"are not powers of two, so quantized Parameters cannot represent .*; choose trainable='full'"),
    "a format without a recipe": (".", {}, {"quantization_config": {"quant_method": "mxfp4"}}, ValueError,
                                  r"quant_method is 'mxfp4', but only .* are supported; use a plain checkpoint in"),
    "code in the folder": (".", {}, OF_CODE, ValueError,
                           r"the installed transformers has no model for config\.json of "),
    "another size, before it has memory": (".", {}, {"intermediate_size": 1 << 40}, ValueError,
                                           r"\], but the model needs \[.*1099511627776.*\]; use files of this model"),
    "files that miss a layer": (".", {}, THREE, KeyError, r"has no model\.layers\.2\."),
}  # fmt: skip


@pytest.mark.parametrize(("path", "options", "changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(path, options, changes, error, message, qwen):
    file = qwen[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(error, match=message):
        from_pretrained(qwen[0] / path, **({"recipe": "fp8"} | options))


def with_scales_for_each_row(found):
    """Experts in NVFP4 as other tools write them."""
    for name in (name for name in found if name.endswith("weight_scale") and "experts" in name):
        found[name].view(torch.uint8)[1::2] //= 2


def with_a_tensor_scale_for_each_expert(found):
    for name in (name for name in found if name.endswith("weight_scale_2") and ".experts.1." in name):
        found[name] *= 2


# {what: (family, format, what happens to its tensors, sizes, why)}
UNHELD = {
    "scales of rows": ("Mixtral", "nvfp4_modelopt", with_scales_for_each_row, {},
                       "is stored in nvfp4_1x16, but the weight has blocks of nvfp4_16x16"),
    "scales of experts": ("Qwen3Moe", "nvfp4_modelopt", with_a_tensor_scale_for_each_expert, {},
                          r"experts\.1\..* and .*experts\.0\..* have different tensor scales, but are one weight"),
    "experts that share a block": ("Qwen3Moe", "fp8_block", lambda found: None, {"moe_intermediate_size": 96},
                                   "up_proj.weight begins inside a block of 128 rows"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "format", "change", "sizes", "reason"), UNHELD.values(), ids=UNHELD)
def test_payloads_that_no_parameter_can_hold(family, format, change, sizes, reason, tmp_path):
    """Adapters on such experts are refused; master weights get the decoded values, with a warning."""
    _, found = write(family, format, tmp_path / "x", **sizes)
    change(found)
    save(found, tmp_path / "x")
    recipe = RECIPE_OF[format]
    with pytest.raises(ValueError, match=reason + r".*model\.layers\.\*\.mlp\.experts.*; choose trainable='full'"):
        from_pretrained(tmp_path / "x", recipe, "adapters")
    with pytest.warns(UserWarning, match=reason + ".*are the decoded values .* quantize to different codes") as warned:
        model = from_pretrained(tmp_path / "x", recipe, dtype=torch.float32)
    assert warned[0].filename == __file__
    decoded = from_pretrained(tmp_path / "x", None, dtype=torch.float32)
    for name, p in converted(model).items():
        torch.testing.assert_close(p.hp, decoded.get_parameter(name).detach(), rtol=2**-22, atol=0)
    assert converted(quiet(tmp_path / "x", recipe, "adapters", filter_fn=skip_fqns("*.experts")))


@pytest.mark.parametrize("format", ("fp8_block", "nvfp4_compressed_tensors", "nvfp4_modelopt"))
def test_errors_of_transformers_lead_here(format, tmp_path):
    """Its own `from_pretrained` reads none of these files with our configs."""
    if format == "nvfp4_compressed_tensors":
        pytest.importorskip("compressed_tensors")
    write("Llama", format, tmp_path)
    for cls in (BlockwiseFP8Config, NVFP4Config):
        with pytest.raises(ValueError, match=r"from_pretrained\(path, recipe\) of torchao_blockwise\.integrations"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=cls())


@pytest.mark.parametrize("trainable", ("full", "adapters"))
def test_it_streams(trainable, tmp_path):
    """In addition to the model, memory holds some copies of one weight, however many layers there are."""
    from live_memory import peak_of

    extra = []
    for layers in (2, 6):
        folder = tmp_path / f"{layers}"
        write("Llama", "fp8_block", folder, num_hidden_layers=layers, intermediate_size=256)
        held = []
        peak = peak_of(lambda folder=folder, held=held: held.append(from_pretrained(folder, "fp8", trainable)))
        extra.append(peak - sum(x.nbytes for x in held[0].parameters()))
    assert max(extra) < 256 * 256 * 40 and extra[1] < extra[0] + 256 * 256 * 4


def test_generation_config_and_folder_come_along(qwen, tmp_path):
    folder, _ = qwen
    transformers.GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=3).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    model = from_pretrained(folder, "fp8")
    assert model.generation_config.temperature == 0.6
    export(model, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert "model.norm.weight" in tensors_in(tmp_path / "out")
