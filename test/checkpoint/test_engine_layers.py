"""Layers that files name as not quantized, which readers find by name; and layers that engines fuse."""

import copy
import json
import re
import shutil
import textwrap
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from expert_modules import ROUTERS
from exported_models import FORMATS, MODELS, language_model, save, tensors_in, tiny_mixture
from helpers import FP8, NVFP4, assert_same_tensors, converted
from readers import check_folder, check_names, ignored_in, transformers_skips
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import (
    checkpoint,
    is_linear,
    keep_last_blocks,
    linears_and_experts,
    recommended_layers,
    skip_fqns,
    skip_lm_head,
)
from torchao_blockwise.checkpoint.engine_layers import fused_layers, plain_layers
from torchao_blockwise.checkpoint.layouts import LAYOUTS, UE8M0_MODEL_TYPE
from torchao_blockwise.checkpoint.model_tensors import Part, parts_on_disk, tensors_of
from torchao_blockwise.cli import main
from torchao_blockwise.tensors import MasterWeightTensor

MIXTURES = ("Qwen3Moe", "Mixtral", "DeepseekV3")
# Of the second layer's experts: what the files call their module, and what transformers does.
EXPERTS = {
    "Qwen3Moe": ["model.layers.1.mlp.experts"],
    "Mixtral": ["model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts"],
    "DeepseekV3": ["model.layers.1.mlp.experts"],
}


def partly(name: str, config, *more):
    """All but the last block is converted."""
    model = language_model(name, None)
    chosen = linears_and_experts() & skip_lm_head() & keep_last_blocks(model, 1)
    return converted(model, config, chosen & more[0] if more else chosen)


def settings(model, folder, format="fp8_block") -> dict:
    with warnings.catch_warnings():
        # Of tensor scales.
        warnings.filterwarnings("ignore", message=".*quantized again.*")
        checkpoint.export(model, folder, format)
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_not_quantized_is_named(name, tmp_path):
    """Routers are Parameters of transformers' own modules; the last block is not converted."""
    model = partly(name, FP8)
    ignored = settings(model, tmp_path / "out")["modules_to_not_convert"]
    assert min(check_folder(tmp_path / "out", "fp8_block").values()) > 3
    # transformers asks by its own names, of tied heads as well.
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear) or any(p.dim() == 3 for p in own.values()):
            is_converted = any(isinstance(p, MasterWeightTensor) for p in own.values())
            assert transformers_skips(path, ignored, set()) != is_converted, path
    if name in MIXTURES:
        assert [n for n in ignored if n.endswith("experts") and "shared" not in n] == EXPERTS[name]


BOTH_NVFP4 = ("nvfp4_compressed_tensors", "nvfp4_modelopt")


@pytest.mark.parametrize("format", ("fp8_block", *BOTH_NVFP4))
def test_convert_names_all_that_it_does_not_quantize(format, tmp_path):
    """Layers that predict further tokens too, which the model does not build."""
    language_model("DeepseekV3", None).save_pretrained(tmp_path / "plain")
    tensors = tensors_in(tmp_path / "plain")
    last = {name: x for name, x in tensors.items() if name.startswith("model.layers.1.")}
    more = {name.replace(".1.", ".2.", 1): x.clone() for name, x in last.items()}
    save(tensors | more | {"model.layers.2.eh_proj.weight": torch.zeros(192, 384)}, tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", format]) == 0
    assert min(check_folder(tmp_path / "out", format).values()) > 3


@pytest.mark.parametrize("format", BOTH_NVFP4)
@pytest.mark.parametrize("name", MIXTURES)
def test_nvfp4_names_them(name, format, tmp_path):
    """compressed-tensors is asked for single experts, under names of files."""
    ignored = settings(partly(name, NVFP4), tmp_path / "out", format)["ignore"]
    assert min(check_folder(tmp_path / "out", format).values()) > 3
    if format == "nvfp4_compressed_tensors":
        patterns = [n.removeprefix("re:") for n in ignored if n.startswith("re:")]
        assert len(patterns) == len(EXPERTS[name])
        asked = f"{EXPERTS[name][0]}.0.gate_proj"
        for layer, is_ignored in ((0, False), (1, True), (11, False)):
            single = asked.replace("layers.1", f"layers.{layer}")
            assert any(re.match(pattern, single) for pattern in patterns) is is_ignored


UNREAD = {
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "jetmoe": "mlp.input_linear.weight",
    "aria_text": "mlp.experts.fc1.weight",
}


@pytest.mark.parametrize("family", UNREAD)
def test_experts_under_names_that_nobody_reads_are_refused(family, tmp_path):
    model = tiny_mixture(family)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    for call in (checkpoint.quantized_weights, lambda model: checkpoint.export(model, tmp_path / "out")):
        with pytest.raises(ValueError, match=rf"{re.escape(UNREAD[family])} holds all experts.*skip_fqns\("):
            call(model)
    assert not (tmp_path / "out").exists()


# Each as {name: (shape, whether it is quantized)}.
NAMED = {
    "a Parameter among quantized layers": (
        {"layers.0.mixer.A_log": ((8, 4), False), "layers.0.mixer.in_proj.weight": ((8, 8), True)},
        ["layers.0.mixer.A_log"],
    ),
    "biases of quantized experts": (
        {"mlp.experts.up_bias": ((4, 8), False), "mlp.experts.up": ((4, 8, 8), True)}, [],
    ),
    "a Parameter of a plain module": ({"tower.embed.table": ((8, 8), False)}, ["tower.embed"]),
    "a Parameter of the model": ({"table": ((8, 8), False), "up.weight": ((8, 8), True)}, ["table"]),
    "norms": ({"norm.weight": ((8,), False)}, []),
    "a convolution": ({"conv.weight": ((8, 8, 3), False)}, ["conv"]),
    "a longer name next to it": (
        {"a.vision.table": ((8, 8), False), "a.vision_proj.weight": ((8, 8), True)}, ["a.vision.table"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "expected"), NAMED.values(), ids=NAMED)
def test_names(tensors, expected):
    assert plain_layers(Part(name, shape, (name,), x) for name, (shape, x) in tensors.items()) == (expected, [])


def test_where_engines_want_all_or_nothing_a_warning_says_so(tmp_path):
    model = partly("Qwen3Moe", FP8, skip_fqns("*.0.self_attn.k_proj"))
    with pytest.warns(UserWarning, match=r"fuse model.*\.q_proj\+k_proj\+v_proj and need all or none"):
        settings(model, tmp_path / "out")
    model = partly("Qwen3Moe", FP8)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.hp.detach())
    with pytest.warns(UserWarning, match=r"fuse model\.layers\.0\.mlp\.experts and"):
        settings(model, tmp_path / "again")


def test_all_experts_in_one_tensor_are_warned_of_because_transformers_loads_their_codes(tmp_path):
    transformers = pytest.importorskip("transformers", "5.0")
    model = language_model("GptOss", None, hidden_size=256, head_dim=64, intermediate_size=256, num_local_experts=2)
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    with pytest.warns(UserWarning, match=r"loads the codes of .*experts\.gate_up_proj.* as values"):
        checkpoint.export(model, tmp_path / "out")
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    assert theirs.model.layers[0].mlp.experts.gate_up_proj.abs().max() > 100, "decoded"
    expected = model.model.layers[0].mlp.experts.gate_up_proj.abs().max()
    checkpoint.load(model, tmp_path / "out")
    assert model.model.layers[0].mlp.experts.gate_up_proj.abs().max() == expected


def test_a_name_that_ends_with_that_of_a_plain_layer_is_warned_of(tmp_path):
    """transformers leaves out both, also where there is a dot before the end of the name."""
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.DistilBertConfig(vocab_size=64, dim=128, hidden_dim=256, n_layers=1, n_heads=2)
    model = transformers.DistilBertForSequenceClassification(config)
    quantize_(model, FP8, filter_fn=skip_fqns("classifier"))
    with pytest.warns(UserWarning, match=r"codes of pre_classifier as values, .* not converted, classifier; convert"):
        written = settings(model, tmp_path / "out")
    assert transformers_skips("pre_classifier", ignored_in(written), set())
    model.attention = nn.ModuleDict({"classifier": copy.deepcopy(model.pre_classifier)})
    with pytest.warns(UserWarning, match=r"codes of attention\.classifier, pre_classifier as values"):
        written = settings(model, tmp_path / "with_a_dot")
    assert transformers_skips("attention.classifier", ignored_in(written), set())
    model = transformers.DistilBertForSequenceClassification(config)
    quantize_(model, FP8, filter_fn=skip_fqns("classifier", "pre_classifier"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.export(model, tmp_path / "again")


@pytest.mark.parametrize("name", ("Llama", "Qwen3Moe"))
def test_a_model_that_transformers_has_dequantized_is_exported(name, tmp_path):
    transformers = pytest.importorskip("transformers", "5.0")
    model = language_model(name, None, hidden_size=256, head_dim=64, intermediate_size=256)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    checkpoint.export(model, tmp_path / "out")
    options = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True), "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    quantize_(theirs, FP8, filter_fn=recommended_layers(theirs))
    checkpoint.load(theirs, tmp_path / "out")
    checkpoint.export(theirs, tmp_path / "again")
    assert_same_tensors(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "out"))


def test_whole_models_warn_of_nothing(tmp_path):
    model = converted(language_model("Qwen3Moe", None, hidden_size=256, head_dim=64), FP8, is_linear() & skip_lm_head())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = settings(model, tmp_path / "out")["modules_to_not_convert"]
    routers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    experts = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert names == ["lm_head", "model.embed_tokens", *routers, *experts]


# Experts under names that no reader quantizes, and weights whose rows NVFP4 does not hold at these sizes.
LEFT_OUT = dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared", "aria_text"), ("*.experts",))
LEFT_OUT |= {"jetmoe": ("*.input_linear", "*.output_linear")}
LEFT_OUT |= {"deepseek_v4": ("*.o_a_proj",), "jamba": ("*.dt_proj",), "nemotron_h": ("*.shared_experts.down_proj",)}


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in sorted(ROUTERS) if family != "inkling2_text"])
def test_files_of_every_mixture(family, tmp_path):
    """`export` of a model and `convert` of its plain files write the same tensors, and name the same layers."""
    tiny_mixture(family, "cpu").save_pretrained(tmp_path / "plain")
    skipped = LEFT_OUT.get(family, ())
    for format, config in FORMATS.items():
        if format == "fp8_block_ue8m0" and not family.startswith(UE8M0_MODEL_TYPE):
            continue
        model = tiny_mixture(family, "cpu")
        chosen = recommended_layers(model)
        quantize_(model, config, filter_fn=chosen & skip_fqns(*skipped) if skipped else chosen)
        folders = {writer: tmp_path / f"{writer}_{format}" for writer in ("exported", "converted")}
        command = ["convert", str(tmp_path / "plain"), str(folders["converted"]), "--to", format]
        assert main([*command, *(x for pattern in skipped for x in ("--skip", pattern))]) == 0
        checkpoint.export(model, folders["exported"], format)
        # transformers asks by its own names.
        tensors = tensors_of(model)
        in_files = [part for parts in parts_on_disk(model).values() for part in parts]
        own = {x.own[0]: (x.is_quantized, tensors[x.own[0]].dim()) for x in in_files}
        check_names("fp8_block", LAYOUTS["fp8_block"].quantization_config(*plain_layers(in_files)), own)
        found = {}
        for writer, folder in folders.items():
            assert min(check_folder(folder, format).values()) > 0
            ignored = ignored_in(json.loads((folder / "config.json").read_text())["quantization_config"])
            found[writer] = ({name: x.dtype for name, x in tensors_in(folder).items()}, ignored)
        assert found["exported"] == found["converted"]
        for folder in folders.values():
            shutil.rmtree(folder)


# Of vLLM 0.33.0, read on 2026-11-26: members in files, by the last parts of names, from packed_modules_mapping and
# stacked weights of all models. Not here: convolutions, and layers without quantization.
VLLM = """
    q_proj k_proj v_proj | query key value | query_net key_net value_net | q k v | wq wk wv | k_proj v_proj
    key_net value_net | key_proj value_proj | q_proj k_proj | gate_proj up_proj | w1 w3 | c_fc_0 c_fc_1 | fc1 fc3
    gate_proj dense_h_to_4h | in_proj_qkv in_proj_z | in_proj_b in_proj_a | q_a_proj kv_a_proj_with_mqa
    q_a_proj kv_a_proj_with_mqa g_proj | wq_a wkv | wq_du wk_dv wv_dv wr_du | q_proj k_proj v_proj g_proj
    q_proj k_proj v_proj b_proj | q_proj k_proj v_proj b_proj f_a_proj | q_proj k_proj v_proj b_proj f_a_proj g_a_proj
    q_proj k_proj v_proj gate_proj | q_proj k_proj v_proj o_gate_proj | q_proj k_proj v_proj output_gate_proj
    q_proj k_proj v_proj index_q_proj index_k_proj | q_proj k_proj v_proj index_qk_proj
    q_proj k_proj v_proj sparse_indexer_q sparse_indexer_k sparse_indexer_z g_proj
"""
ROWS = [tuple(row.split()) for row in VLLM.strip().replace("\n", "|").split("|")]


def test_what_vllm_runs_as_one_is_known():
    """And layers without their neighbors are not, which in another module they are no longer."""
    for row in ROWS:
        names = {f"model.layers.{i}.mixer.{member}.weight": i for i in range(2) for member in row}
        fused = fused_layers([*names, "model.layers.0.mixer.o_proj.weight"])
        for name, i in names.items():
            assert fused[name] == f"model.layers.{i}.mixer.{'+'.join(row)}"
        assert fused["model.layers.0.mixer.o_proj.weight"] == "model.layers.0.mixer.o_proj"
        for member in row:
            others = [f"other.{x}.weight" for x in row if x != member]
            assert fused_layers([f"a.{member}.weight", *others])[f"a.{member}.weight"] == f"a.{member}"


def test_experts_of_a_list_are_one():
    experts = [f"mlp.experts.{i}.{name}.weight" for i in range(3) for name in ("gate_proj", "up_proj", "down_proj")]
    fused = fused_layers(experts)
    assert set(fused.values()) == {"mlp.experts.*.gate_proj+up_proj", "mlp.experts.*.down_proj"}


def ragged_warnings(run) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [warning for warning in found if "vLLM fuses" in str(warning.message)]


def test_ragged_rows_are_warned_of_once(tmp_path):
    """q_a_proj has 96 rows, the first block's MLP 320; kv_a_proj_with_mqa, the last, may have 192."""
    model = language_model("DeepseekV3")
    (found,) = ragged_warnings(lambda: checkpoint.export(model, tmp_path / "out"))
    assert found.filename == __file__
    assert_expected_inline(
        textwrap.fill(str(found.message), 100),
        """\
export: vLLM fuses model.layers.0.mlp.gate_proj+up_proj (320 rows),
model.layers.0.self_attn.q_a_proj+kv_a_proj_with_mqa (96 rows),
model.layers.1.self_attn.q_a_proj+kv_a_proj_with_mqa (96 rows) and refuses files if the rows of any
but the last are not a multiple of 128; leave these layers unconverted
(skip_fqns("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj",
"model.layers.*.self_attn.kv_a_proj_with_mqa", "model.layers.*.self_attn.q_a_proj"); convert:
--skip)""",
    )
    language_model("DeepseekV3", None).save_pretrained(tmp_path / "plain")
    convert = ["convert", str(tmp_path / "plain"), str(tmp_path / "converted")]
    (again,) = ragged_warnings(lambda: main(convert))
    assert str(again.message) == str(found.message)


def test_nothing_is_said_where_vllm_reads_the_files(tmp_path):
    """NVFP4 has scales for each row; and the remedy is one."""
    model = language_model("DeepseekV3", NVFP4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*quantized again")
        checkpoint.export(model, tmp_path / "nvfp4", "nvfp4_modelopt")
    model = language_model("DeepseekV3", None)
    named = skip_fqns(
        "model.layers.*.self_attn.q_a_proj",
        "model.layers.*.self_attn.kv_a_proj_with_mqa",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
    )
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head() & named)
    assert ragged_warnings(lambda: checkpoint.export(model, tmp_path / "out")) == []
