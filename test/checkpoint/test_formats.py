"""Files of each format: they hold the bytes that GEMMs read, and config.json has the settings of engines."""

import json
import re

import pytest
import torch
from expecttest import assert_expected_inline
from exported_models import (
    FORMATS,
    SMALL,
    OperandsRead,
    assert_files_hold,
    decoded,
    digest,
    every_format,
    export,
    filled,
    language_model,
    logits,
    operand_of,
    tensors_in,
    tiny_mixture,
)
from helpers import FP8, FP8_POW2, NVFP4, assert_same_tensors, both_masters, converted, mlp, replace
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    MasterWeightTensor,
    NVFP4Tensor,
    checkpoint,
    experts,
    is_linear,
    linears_and_experts,
    ops,
    skip_fqns,
    skip_lm_head,
)
from torchao_blockwise.checkpoint.engine_layers import fused_layers
from torchao_blockwise.formats import NVFP4_16X16
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import assert_bitwise_equal

# Ragged blocks; NVFP4 wants columns of whole ones.
FEATURES = (208, 304, 130)


def rows_of(scale: torch.Tensor, qdata: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8).repeat_interleave(16, 0)[: len(qdata)].view(scale.dtype)


def exponents_of(scale: torch.Tensor) -> torch.Tensor:
    exponents = scale.log2()
    assert torch.equal(exponents, exponents.round())
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


# {format: the tensors of a weight, of its payload, scale and tensor scale}
HELD = {
    "fp8_block": lambda q, s, g: {"weight": q, "weight_scale_inv": s},
    "fp8_block_ue8m0": lambda q, s, g: {"weight": q, "scale": exponents_of(s)},
    "nvfp4_compressed_tensors": lambda q, s, g: {
        "weight_packed": q, "weight_scale": rows_of(s, q), "weight_global_scale": g.reciprocal().reshape(1)
    },
    "nvfp4_modelopt": lambda q, s, g: {"weight": q, "weight_scale": rows_of(s, q), "weight_scale_2": g.reshape(())},
}  # fmt: skip


@both_masters
@pytest.mark.parametrize(("format", "config"), (*FORMATS.items(), ("fp8_block", FP8_POW2)))
def test_files_have_the_bytes_of_the_weights(format, config, masters, tmp_path):
    model = mlp(replace(config, master_weights=masters), features=FEATURES)
    weights = checkpoint.quantized_weights(model, format)
    expected = {}
    for i in (0, 2):
        held = HELD[format](*operand_of(model[i].weight).tensors)
        expected |= {f"{i}.{name}": x for name, x in held.items()} | {f"{i}.bias": model[i].bias.detach()}
    assert_same_tensors(export(model, tmp_path / "out", format), expected)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in weights}
    assert_same_tensors(dict(weights), expected)


@every_format
def test_an_engine_gets_the_settings_of_the_files(format, tmp_path):
    """Layers in high precision are listed, and scales that are powers of two are marked."""
    config = FP8_POW2 if format == "fp8_block" else FORMATS[format]
    model = language_model("Llama", config)
    if format == "fp8_block_ue8m0":
        model.config.model_type = "deepseek_v4"
    export(model, tmp_path / "out", format)
    settings = checkpoint.quantized_weights(model, format).quantization_config()
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings == content["quantization_config"]
    assert (content["architectures"], content["dtype"]) == (["LlamaForCausalLM"], str(model.dtype)[6:])
    assert "lm_head" in settings.get("modules_to_not_convert", settings.get("ignore"))
    assert ("scale_fmt" in settings) == (config is FP8_POW2)
    if format == "nvfp4_modelopt":
        other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert settings["quant_method"] == "modelopt"
        assert settings["quant_algo"] == other["quant_algo"] == "W4A16_NVFP4"
        assert settings["ignore"] == other["exclude_modules"] == ["lm_head", "model.embed_tokens"]
        assert other["group_size"] == 16 and other["kv_cache_quant_algo"] is None


@both_masters
@pytest.mark.parametrize("others", (FP8_POW2, FP8), ids=("all", "some"))
def test_files_in_fp32_say_that_scales_are_powers_of_two(others, masters, tmp_path):
    """Where all are."""
    model = language_model("Llama", None)
    quantize_(model, replace(FP8_POW2, master_weights=masters), filter_fn=skip_fqns("*.mlp.*") & skip_lm_head())
    mlps = is_linear() & (lambda m, fqn: ".mlp." in fqn)
    export(converted(model, replace(others, master_weights=masters), mlps), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings.get("scale_fmt") == ("ue8m0" if others is FP8_POW2 else None)


def test_a_cut_block_is_quantized_again(tmp_path):
    """gate and up of experts of 192 rows share the block of rows 128 to 255."""
    model = language_model("Qwen3Moe", moe_intermediate_size=192)
    with pytest.warns(UserWarning, match=r"6 weights are quantized again, because they begin inside a block .*up_proj"):
        checkpoint.export(model, tmp_path / "out")
    found, up = tensors_in(tmp_path / "out"), "model.layers.0.mlp.experts.1.up_proj.weight"
    expected = model.model.layers[0].mlp.experts.gate_up_proj.hp[1, 192:]
    assert found[f"{up}_scale_inv"].shape == (2, 2)
    assert (decoded(found, up) - expected).norm() < 0.04 * expected.norm()


def assert_one_tensor_scale_a_group(found: dict[str, torch.Tensor], suffix: str) -> set[str]:
    """The layers that engines join, by their groups, have the same tensor scale; returns the groups."""
    scales: dict[str, torch.Tensor] = {}
    for n, group in fused_layers(n.removesuffix(suffix) for n in found if n.endswith(suffix)).items():
        assert_bitwise_equal(found[n + suffix], scales.setdefault(group, found[n + suffix]), n)
    return set(scales)


@both_masters
@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe", "DeepseekV3"))
def test_layers_that_engines_join_have_one_tensor_scale(name, masters, tmp_path):
    """That of the largest amax; the payload is what quantizing with it gives: masters, or what Parameters decode to."""
    model = language_model(name, replace(NVFP4, master_weights=masters))
    with pytest.warns(UserWarning, match="again, .* fused by engines with weights of another tensor scale") as warned:
        checkpoint.export(model, tmp_path / "out", "nvfp4_compressed_tensors")
    found = tensors_in(tmp_path / "out")
    (message,) = (str(w.message) for w in warned if "quantized again" in str(w.message))
    kind = MasterWeightTensor if masters else NVFP4Tensor
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, kind)}
    own = {n: p.hp.detach().abs().amax() if masters else p.global_scale * 2688 for n, p in weights.items()}
    fused, amaxes = fused_layers(own), {}
    for n, amax in own.items():
        amaxes[fused[n]] = torch.maximum(amaxes.get(fused[n], torch.zeros(())), amax)
    assert len(amaxes) < len(weights)
    # Experts of one Parameter aside.
    checked = [n for n in weights if f"{n}_packed" in found]
    for n in checked:
        amax, p = amaxes[fused[n]], weights[n]
        wanted = p.operand() if not masters and amax == own[n] else None
        if wanted is None:
            values = p.hp.detach() if masters else p.dequantize()
            wanted = ops.quantize(values, NVFP4_16X16, tensor_amax=amax).rowwise
        assert digest(found[f"{n}_packed"]) == digest(wanted.qdata)
        assert_bitwise_equal(found[f"{n}_global_scale"], wanted.global_scale.reciprocal().reshape(1))
        assert amax == own[n] or re.sub(r"\.\d+\b", ".*", n) in message
    assert checked
    assert_one_tensor_scale_a_group(found, "_global_scale")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["format"] == "nvfp4-pack-quantized" and "lm_head" in settings["ignore"]
    # Model Optimizer's files hold the same under other names, and the reciprocal of the tensor scale.
    other = export(model, tmp_path / "other", "nvfp4_modelopt")
    for n in [n for n in other if n.endswith("_scale_2")]:
        factor = other.pop(n).reciprocal().reshape(1)
        assert_bitwise_equal(factor, found.pop(n.replace("_scale_2", "_global_scale")))
    assert_same_tensors(other, {n.removesuffix("_packed"): x for n, x in found.items()})


def test_layers_are_joined_by_their_names_in_files(tmp_path):
    """vLLM joins wq_a and wkv of DeepSeek-V4, which are q_a_proj and kv_proj in transformers."""
    options = {"head_dim": 16, "num_key_value_heads": 4, "moe_intermediate_size": 48, "n_routed_experts": 4}
    options |= {"num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 128, "q_lora_rank": 32}
    found = export(language_model("DeepseekV4", NVFP4, **options), tmp_path / "out", "nvfp4_modelopt")
    assert "model.layers.0.attn.wq_a+wkv" in assert_one_tensor_scale_a_group(found, "_scale_2")


def test_equal_tensor_scales_are_left_alone(tmp_path, recwarn):
    """Where training gave joined layers one tensor scale, the bytes that trained go out."""
    model = language_model("Llama", None)
    for layer in model.model.layers:
        for joined in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, *layer.mlp.children()):
            if isinstance(joined, nn.Linear):
                joined.weight.data[0, 0] = 1.0
    quantize_(model, NVFP4, filter_fn=linears_and_experts() & skip_lm_head())
    checkpoint.export(model, tmp_path / "out", "nvfp4_compressed_tensors")
    assert not [w for w in recwarn if "quantized again" in str(w.message)]
    weight, name = model.model.layers[0].self_attn.k_proj.weight.quantized(), "model.layers.0.self_attn.k_proj.weight"
    assert digest(tensors_in(tmp_path / "out")[f"{name}_packed"]) == digest(weight.qdata)


def test_an_embedding_is_written_in_high_precision(tmp_path):
    """A head that shares it has been converted: engines would take its codes for values."""
    transformers = pytest.importorskip("transformers", "5.0")

    def made():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
        return converted(model, FP8, linears_and_experts())

    model, name = made(), "model.embed_tokens.weight"
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight is also the weight of an embedding"):
        checkpoint.export(model, tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert_bitwise_equal(found[name], model.get_parameter(name).hp.detach())
    assert f"{name}_scale_inv" not in found and found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    weights = checkpoint.quantized_weights(model)
    assert weights.metadata() == {n: (x.dtype, tuple(x.shape)) for n, x in weights}
    other = filled(made())
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))


# --- what products read, as kernels get it, by SHA-256; of ranks in export_checks.py --------------------------------


def check_products(model: nn.Module, format: str, folder, *inputs) -> None:
    with OperandsRead() as products, torch.no_grad():
        model(*inputs)
    assert_files_hold(products.operands, export(model, folder, format))


def test_autocast_does_not_change_what_products_read(tmp_path):
    """fp32 masters are quantized as they are."""
    with torch.autocast("cpu", torch.bfloat16):
        check_products(mlp(FP8, features=FEATURES), "fp8_block", tmp_path / "out", torch.randn(4, FEATURES[0]))


@both_masters
@pytest.mark.parametrize("config", (FP8, FP8_POW2), ids=("fp32_scales", "powers_of_2"))
def test_products_of_experts_read_what_files_hold(config, masters, device, tmp_path):
    torch.manual_seed(0)
    model = converted(SwiGLUExperts(3, 192, 128), replace(config, master_weights=masters), experts())
    ends = torch.tensor([2, 4, 6], dtype=torch.int32, device=device)
    check_products(model.to(device), "fp8_block", tmp_path / "out", torch.randn(6, 192, device=device), ends)


REFUSED = {
    "another name": (lambda: mlp(FP8), "fp8_blok", r"got 'fp8_blok'; did you mean 'fp8_block'"),
    "no weight": (mlp, "fp8_block", "no weight of Sequential is converted; call quantize_ first"),
    "another format": (lambda: mlp(NVFP4), "fp8_block", r"0\.weight trains in nvfp4_16x16, but fp8_block stores fp8_1"),
    "other scales": (lambda: mlp(FP8), "fp8_block_ue8m0", r"0\.weight trains with .* not powers of .* as fp8_block"),
    "cut blocks": (lambda: mlp(NVFP4, features=(200, 304, 144)), "nvfp4_compressed_tensors",
                   r"the number of columns of 0\.weight must be a multiple of 16 for NVFP4 files; leave .*--skip"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "format", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(model, format, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        checkpoint.export(model(), tmp_path / "out", format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ("Llama", "Mixtral"))
def test_models_whose_engines_do_not_read_bytes_of_scales_are_refused(name, tmp_path):
    model = language_model(name, FP8_POW2)
    for call in (checkpoint.quantized_weights, lambda *x: checkpoint.export(x[0], tmp_path / "out", x[1])):
        with pytest.raises(ValueError, match=rf"model_type {name.lower()}; choose fp8_block ") as refused:
            call(model, "fp8_block_ue8m0")
    assert not (tmp_path / "out").exists()
    if name == "Llama":
        assert_expected_inline(
            str(refused.value).replace("; ", ";\n").replace(", and", ",\nand").replace(", which", ",\nwhich"),
            """\
export: fp8_block_ue8m0 is for models whose engines read scales called `scale` (model_type deepseek_v4),
and LlamaForCausalLM has model_type llama;
choose fp8_block (convert: with --power-of-2-scales),
which writes scale_fmt: "ue8m0" for scales that are powers of two""",
        )


def test_a_convolution_that_files_have_in_parts(tmp_path):
    """transformers joins those of q, k and v, and writes three."""
    model = tiny_mixture("bailing_hybrid", "cpu")
    model.save_pretrained(tmp_path / "plain")
    plain = {name: x for name, x in tensors_in(tmp_path / "plain").items() if "conv1d" in name}
    assert {name.rpartition(".attention.")[2] for name in plain} == {f"{x}_conv1d.weight" for x in "qkv"}
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    found = dict(checkpoint.quantized_weights(model))
    assert_same_tensors({name: found[name] for name in plain}, plain)
