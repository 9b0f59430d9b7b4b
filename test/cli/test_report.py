"""`report`: a Hugging Face model on the meta device, converted and fused as asked for."""

import json
import os

import pytest

from torchao_blockwise._compat import hugging_face
from torchao_blockwise.cli import main
from torchao_blockwise.cli.inputs import meta_model

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "dense": lambda: transformers.Qwen3Config(**SIZES),
    "experts": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "named": lambda: transformers.LlamaConfig(**SIZES, architectures=["LlamaForSequenceClassification"]),
    "translation": lambda: transformers.T5Config(
        vocab_size=512, d_model=256, d_ff=512, num_layers=2, num_heads=4, architectures=["T5ForConditionalGeneration"]
    ),
    "vision": lambda: transformers.ViTConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, architectures=["ViTModel"]
    ),
}


@pytest.fixture
def report(tmp_path, capsys):
    """(kind, options) -> the report of that configuration: its JSON, or its text for `text=True`."""

    def run(kind: str, *options: str, code: int = 0, text: bool = False):
        CONFIGS[kind]().save_pretrained(tmp_path / kind)
        assert main(["report", str(tmp_path / kind), *([] if text else ["--json"]), *options]) == code
        printed = capsys.readouterr().out
        return printed if text else json.loads(printed)

    return run


def test_text(report):
    printed = report("dense", "--fuse", "--tokens", "64", text=True)
    assert printed.startswith("Qwen3ForCausalLM, ") and "lm_head                          skipped" in printed
    assert "14 of 15   converted" in printed and "4 of 4  " in printed and "peak of forward and backward" in printed


def test_memory(report):
    at_rest = report("dense")["memory"]
    parameters = sum(p.numel() for p in transformers.Qwen3ForCausalLM(CONFIGS["dense"]()).parameters())
    assert at_rest["predicted"]["weights"] == at_rest["unconverted"]["weights"] == 2 * parameters
    assert at_rest["predicted"]["saved"] is None and at_rest["measured"] is None
    plain, fused = (report("dense", "--tokens", "64", *more)["memory"] for more in ((), ("--fuse",)))
    for memory in (plain, fused):
        assert memory["notes"] == [] and memory["predicted"]["peak"] > memory["predicted"]["weights"]
    assert fused["predicted"]["saved"] < plain["predicted"]["saved"]
    translation = report("translation", "--tokens", "64")["memory"]
    assert translation["notes"] == [] and translation["predicted"]["saved"] > 0


def test_the_architecture_of_the_configuration_is_taken(report):
    """Its step has no labels."""
    found = report("named", "--tokens", "64")
    assert found["model"].startswith("LlamaForSequenceClassification, ")
    assert found["memory"]["notes"] == [] and found["memory"]["predicted"]["saved"] > 0


CLASSES = {
    "LlamaForSequenceClassification": lambda: CONFIGS["named"](),
    # The first architecture is of a later transformers.
    "Qwen3ForSequenceClassification": lambda: transformers.Qwen3Config(
        **SIZES, architectures=["Qwen3ForLater", "Qwen3ForSequenceClassification"]
    ),
    "Qwen3ForCausalLM": lambda: CONFIGS["dense"](),
    # It has no language model.
    "ViTModel": lambda: transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
}


@pytest.mark.parametrize("name", CLASSES)
def test_commands_and_from_pretrained_make_the_same_class(name, tmp_path):
    config = CLASSES[name]()
    config.save_pretrained(tmp_path)
    models = meta_model(str(tmp_path)), hugging_face.model_on_meta(config, None, {})
    assert [type(model).__name__ for model in models] == [name] * 2


def test_a_configuration_without_a_model_is_refused():
    class Later(transformers.PreTrainedConfig):
        model_type = "later"

    with pytest.raises(ValueError, match=r"transformers .* has no model for Later; upgrade it"):
        hugging_face.model_on_meta(Later(), None, {})


def test_experts_are_converted_and_a_file_is_as_good_as_its_folder(report, tmp_path, capsys):
    found = report("experts")
    rows = {row["fqn"]: row["status"] for row in found["conversion"]["layers"]}
    assert rows["model.layers.0.mlp.experts.down_proj"] == "converted" and "fusion" not in found
    assert main(["report", str(tmp_path / "experts" / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


OF_LAST_BLOCKS = {"fp8": ["--filter", "keep_last_blocks=1"], "nvfp4": []}


@pytest.mark.parametrize("recipe", OF_LAST_BLOCKS)
def test_filters_leave_out_more_than_the_default_does(recipe, report):
    found = report("dense", "--recipe", recipe, "--filter", "skip_fqns=*.q_proj,*.k_proj", *OF_LAST_BLOCKS[recipe])
    rows = {row["fqn"]: row["reason"] for row in found["conversion"]["layers"]}
    assert rows["model.layers.0.mlp.up_proj"] == {"fp8": "fp8_128x128", "nvfp4": "nvfp4_16x16"}[recipe]
    assert rows["model.layers.0.self_attn.k_proj"] == "skip_fqns: matches '*.k_proj'"
    assert rows["model.layers.1.mlp.up_proj"] == "keep_last_blocks: in the last block"
    assert rows["lm_head"] == "output head"
    assert "Filter(recommended_layers(Qwen3ForCausalLM) & skip_fqns('*.q_proj', '*.k_proj')" in found["model"]


def test_the_exit_code_says_what_cannot_be_converted(report, monkeypatch):
    monkeypatch.setattr("torchao_blockwise.conversion.handlers.why_not_convertible", lambda *args, **kwargs: "no")
    found = report("dense", "--fuse", code=1)
    assert found["conversion"]["totals"]["converted"] == 0 and found["fusion"]["fused"] == 0
    assert {row["status"] for row in found["conversion"]["layers"]} == {"cannot convert", "skipped"}


WRONG = {
    "file": (["nowhere/config.json"], "nowhere/config.json does not exist; give a config.json, a folder"),
    "folder": (["."], ". contains no config.json; give a folder that does, or the file"),
    "id": (["nobody/nothing"], "the Hugging Face cache has no configuration of 'nobody/nothing'; download it (hf "),
    "broken": (["broken"], "transformers cannot read the configuration in broken: "),
    "filter": (["dense", "--filter", "skip_fqn=*.wo"], "got skip_fqn; did you mean 'skip_fqns'?"),
    "no value": (["dense", "--filter", "min_features"], "--filter min_features: invalid literal for int()"),
    "number": (["dense", "--filter", "min_features=x"], "--filter min_features=x: invalid literal for int()"),
    "blocks": (["dense", "--filter", "keep_last_blocks=9"], "has 2 blocks, got count=9"),
    "tokens": (["dense", "--tokens", "0"], "--tokens must be 1 or more, got 0"),
    "images": (["vision", "--tokens", "64"], "needs a model of token ids, but ViTModel takes pixel_values; leave it"),
}


@pytest.mark.parametrize(("argv", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_sentence(argv, said, tmp_path, monkeypatch, capsys):
    for kind in ("dense", "vision"):
        CONFIGS[kind]().save_pretrained(tmp_path / kind)
    os.mkdir(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and len(printed.err.splitlines()) == 1
