"""What files say is not quantized: transformers and engines find it by name, and quantize nothing else of it."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import warnings

import pytest
import torch
from helpers import FP8, NVFP4
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
from torchao_blockwise.checkpoint.layouts import LAYOUTS as FILE_FORMATS
from torchao_blockwise.checkpoint.model_tensors import Written, all_parts_on_disk, tensors_of, written
from torchao_blockwise.checkpoint.plain_layers import plain_layers
from torchao_blockwise.cli import main
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal

pytest.importorskip("safetensors.torch")

from exported_models import MODELS, TINY_MIXTURES, language_model, safetensors, tiny_mixture
from readers import asked, check_folder, check_names, ignored_in, layers_of, of_packages, transformers_skips

pytestmark = pytest.mark.usefixtures("no_interpreter")
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
    quantize_(model, config, filter_fn=chosen if not more else chosen & more[0])
    return model


def settings(model, folder, format="fp8_block") -> dict:
    with warnings.catch_warnings():
        # Of tensor scales.
        warnings.filterwarnings("ignore", message=".*quantized anew.*")
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
    model = language_model("DeepseekV3", None)
    model.save_pretrained(tmp_path / "plain")
    (file,) = (tmp_path / "plain").glob("*.safetensors")
    tensors = safetensors.load_file(file)
    last = {name: x for name, x in tensors.items() if name.startswith("model.layers.1.")}
    more = {name.replace(".1.", ".2.", 1): x.clone() for name, x in last.items()}
    more["model.layers.2.eh_proj.weight"] = torch.zeros(192, 384)
    safetensors.save_file(tensors | more, file, metadata={"format": "pt"})
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", format]) == 0
    assert min(check_folder(tmp_path / "out", format).values()) > 3


@pytest.mark.parametrize("format", BOTH_NVFP4)
@pytest.mark.parametrize("name", MIXTURES)
def test_nvfp4_names_them(name, format, tmp_path):
    settings(partly(name, NVFP4), tmp_path / "out", format)
    assert min(check_folder(tmp_path / "out", format).values()) > 3


@functools.cache
def written_of(family: str) -> tuple[list[Written], dict[str, int]]:
    """(what files of the family have, the dims of its tensors)."""
    model = tiny_mixture(family)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    tensors = tensors_of(model)
    in_files = [*written(model, tensors, all_parts_on_disk(model, tensors))]
    return in_files, {name: x.dim() for name, x in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_MIXTURES)
def test_every_mixture_of_experts(family):
    """Under the names of files, and under transformers' own."""
    in_files, dims = written_of(family)
    plain = plain_layers(in_files)
    for format, layout in FILE_FORMATS.items():
        weights = {x.name: (x.is_quantized, len(x.shape)) for x in in_files}
        check_names(format, layout.settings(plain), weights, packages=True)
    own = {x.own[0]: (x.is_quantized, dims[x.own[0]]) for x in in_files}
    check_names("fp8_block", FILE_FORMATS["fp8_block"].settings(plain), own)
    assert {x.is_quantized for x in in_files if len(x.shape) > 1} == {True, False}


def answer(skips, *args) -> bool | str:
    try:
        return skips(*args)
    except ValueError:
        return "members of a fused layer differ"


@pytest.mark.slow
@pytest.mark.parametrize("format", FILE_FORMATS)
def test_rules_of_the_default_tier_are_those_of_packages(format):
    """Lists that are wrong get the same answers too: shorter ones, and ones with other names."""
    packages = of_packages(format)
    if not any(itself.__name__ == "vllm_itself" for itself in packages):
        pytest.skip("vLLM's source is not here; CONTRIBUTING.md says how to get it")
    draw, answers = random.Random(0), set()
    for family in TINY_MIXTURES:
        in_files, _ = written_of(family)
        weights = {x.name: (x.is_quantized, len(x.shape)) for x in in_files}
        ignored, layers = ignored_in(FILE_FORMATS[format].settings(plain_layers(in_files))), layers_of(weights)
        lists = [[], ignored, [*ignored, *draw.sample(sorted(layers), 3)]]
        lists += [[name for name in ignored if draw.random() < 0.7] for _ in range(3)]
        for (itself, rule), names in itertools.product(packages.items(), lists):
            for layer in sorted({layer for _, layer, _ in asked(weights)}):
                got, expected = (answer(skips, layer, names, layers) for skips in (rule, itself))
                assert got == expected, (itself.__name__, layer, names)
                answers.add(got)
    assert len(answers) == 3


UNREAD = {
    "granitemoe": "block_sparse_moe.input_linear.weight",
    "jetmoe": "mlp.input_linear.weight",
    "aria_text": "mlp.experts.fc1.weight",
    "inkling2_text": "mlp.experts.w13_weight",
}


@pytest.mark.parametrize("family", UNREAD)
def test_experts_under_names_that_nobody_reads_are_refused(family, tmp_path):
    model = tiny_mixture(family)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    for call in (checkpoint.quantized_weights, lambda model: checkpoint.export(model, tmp_path / "out")):
        with pytest.raises(ValueError, match=rf"{re.escape(UNREAD[family])} holds all experts.*skip_fqns\("):
            call(model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ("gpt_oss", "llama4_text", "qwen3_moe"))
def test_experts_of_other_names_are_not(family):
    model = tiny_mixture(family)
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    assert checkpoint.quantized_weights(model).metadata()


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
    "a longer name beside": (
        {"a.vision.table": ((8, 8), False), "a.vision_proj.weight": ((8, 8), True)}, ["a.vision.table"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "expected"), NAMED.values(), ids=NAMED)
def test_names(tensors, expected):
    assert plain_layers(Written(name, (name,), *x) for name, x in tensors.items()) == (expected, [])


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_compressed_tensors_passes_over(name, tmp_path):
    """It is asked for single experts, under names of files."""
    ignored = settings(partly(name, NVFP4), tmp_path / "out", "nvfp4_compressed_tensors")["ignore"]
    patterns = [n.removeprefix("re:") for n in ignored if n.startswith("re:")]
    assert len(patterns) == len(EXPERTS[name])
    asked = f"{EXPERTS[name][0]}.0.gate_proj"
    assert any(re.match(pattern, asked) for pattern in patterns)
    assert not any(re.match(pattern, asked.replace("layers.1", "layers.0")) for pattern in patterns)
    assert not any(re.match(pattern, asked.replace("layers.1", "layers.11")) for pattern in patterns)


def test_where_engines_want_all_or_nothing_a_warning_says_so(tmp_path):
    model = partly("Qwen3Moe", FP8, skip_fqns("*.0.self_attn.k_proj"))
    with pytest.warns(UserWarning, match=r"run model.*\.q_proj\+k_proj\+v_proj as one and want all"):
        settings(model, tmp_path / "out")
    model = partly("Qwen3Moe", FP8)
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.hp.detach())
    with pytest.warns(UserWarning, match=r"run model\.layers\.0\.mlp\.experts as one"):
        settings(model, tmp_path / "again")


def test_whole_models_warn_of_nothing(tmp_path):
    model = language_model("Qwen3Moe", None, hidden_size=256, head_dim=64)
    quantize_(model, FP8, filter_fn=is_linear() & skip_lm_head())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = settings(model, tmp_path / "out")["modules_to_not_convert"]
    routers = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    experts = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert names == ["lm_head", "model.embed_tokens", *routers, *experts]


def test_a_convolution_that_files_have_in_parts(tmp_path):
    """transformers runs those of q, k and v as one, and writes three."""
    model = tiny_mixture("bailing_hybrid", "cpu")
    model.save_pretrained(tmp_path / "plain")
    (file,) = (tmp_path / "plain").glob("*.safetensors")
    plain = {name: x for name, x in safetensors.load_file(file).items() if "conv1d" in name}
    assert {name.rpartition(".attention.")[2] for name in plain} == {f"{x}_conv1d.weight" for x in "qkv"}
    quantize_(model, FP8, filter_fn=recommended_layers(model))
    found = dict(checkpoint.quantized_weights(model))
    for name, x in plain.items():
        assert_bitwise_equal(found[name], x, name)
