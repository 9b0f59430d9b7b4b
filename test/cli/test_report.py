"""`report`: a Hugging Face model on the meta device, converted and fused as asked for."""

from __future__ import annotations

import json
import os

import pytest

from torchao_blockwise.cli import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_interpreter")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "dense": lambda: transformers.Qwen3Config(**SIZES),
    "experts": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "named": lambda: transformers.LlamaConfig(**SIZES, architectures=["LlamaForSequenceClassification"]),
}


@pytest.fixture
def saved(tmp_path):
    """kind -> the folder of its configuration."""

    def save(kind: str) -> str:
        CONFIGS[kind]().save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


def data(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_text(saved, capsys):
    assert main(["report", saved("dense"), "--fuse"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Qwen3ForCausalLM, ") and "lm_head                          skipped" in printed
    assert "14 of 15   converted" in printed and "4 of 4  " in printed


def test_memory(saved, capsys):
    """At rest, and with tokens of a step; of a fused model, which saves less."""
    folder, config = saved("dense"), CONFIGS["dense"]()
    assert main(["report", folder, "--json"]) == 0
    at_rest = data(capsys)["memory"]
    parameters = sum(p.numel() for p in transformers.Qwen3ForCausalLM(config).parameters())
    assert at_rest["predicted"]["weights"] == at_rest["bf16"]["weights"] == 2 * parameters
    assert at_rest["predicted"]["saved"] is None and at_rest["measured"] is None
    saved_bytes = {}
    for option in ((), ("--fuse",)):
        assert main(["report", folder, "--json", "--tokens", "64", *option]) == 0
        memory = data(capsys)["memory"]
        assert memory["notes"] == [] and memory["predicted"]["peak"] > memory["predicted"]["weights"]
        saved_bytes[option] = memory["predicted"]["saved"]
    assert saved_bytes["--fuse",] < saved_bytes[()]
    assert main(["report", folder, "--tokens", "64"]) == 0
    assert "peak of forward and backward" in capsys.readouterr().out


def test_memory_of_a_model_with_another_head(saved, capsys):
    assert main(["report", saved("named"), "--json", "--tokens", "64"]) == 0
    memory = data(capsys)["memory"]
    assert memory["notes"] == [] and memory["predicted"]["saved"] > 0


def test_tokens_must_be_some(saved, capsys):
    assert main(["report", saved("dense"), "--tokens", "0"]) == 2
    assert "--tokens must be 1 or more, got 0" in capsys.readouterr().err


def test_a_file_is_as_good_as_its_folder(saved, capsys):
    folder = saved("dense")
    assert main(["report", folder, "--json"]) == main(["report", os.path.join(folder, "config.json"), "--json"]) == 0
    first, second = capsys.readouterr().out.split("\n}\n")[:2]
    assert first == second


def test_experts_are_converted(saved, capsys):
    assert main(["report", saved("experts"), "--json"]) == 0
    rows = {row["fqn"]: row["status"] for row in data(capsys)["conversion"]["layers"]}
    assert rows["model.layers.0.mlp.experts.down_proj"] == "converted" and "fusion" not in rows


def test_the_architecture_of_the_configuration_is_taken(saved, capsys):
    assert main(["report", saved("named"), "--json"]) == 0
    assert data(capsys)["model"].startswith("LlamaForSequenceClassification, ")


def test_options_are_those_of_the_conversion(saved, capsys):
    options = ["--recipe", "nvfp4", "--no-master-weights", "--no-recommended", "--filter", "is_linear"]
    options += ["--filter", "keep_last_blocks=1"]
    assert main(["report", saved("dense"), *options, "--filter", "skip_fqns=*.q_proj,*.k_proj", "--json"]) == 0
    rows = {row["fqn"]: row for row in data(capsys)["conversion"]["layers"]}
    assert rows["lm_head"]["reason"] == "nvfp4_16x16, no master"
    assert rows["model.layers.0.self_attn.k_proj"]["reason"] == "skip_fqns: matches '*.k_proj'"
    assert rows["model.layers.1.mlp.up_proj"]["reason"] == "keep_last_blocks: in the last block"


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4"))
def test_filters_leave_out_more_than_the_default_does(recipe, saved, capsys):
    assert main(["report", saved("dense"), "--recipe", recipe, "--filter", "skip_fqns=*.q_proj", "--json"]) == 0
    found = data(capsys)
    rows = {row["fqn"]: row["reason"] for row in found["conversion"]["layers"]}
    assert rows["lm_head"] == "output head" and rows["model.layers.0.self_attn.q_proj"].startswith("skip_fqns")
    assert ("last block" in rows["model.layers.1.mlp.up_proj"]) is (recipe == "nvfp4")
    assert found["model"].endswith("Filter(recommended_layers(Qwen3ForCausalLM) & skip_fqns('*.q_proj',))")


def test_what_cannot_be_converted_is_shown_and_told_by_the_exit_code(saved, capsys, monkeypatch):
    monkeypatch.setattr("torchao_blockwise.conversion.report.why_not_convertible", lambda *args, **kwargs: "no")
    assert main(["report", saved("dense"), "--fuse", "--json"]) == 1
    found = data(capsys)
    assert found["conversion"]["totals"]["converted"] == 0 and found["fusion"]["fused"] == 0
    assert {row["status"] for row in found["conversion"]["layers"]} == {"cannot convert", "skipped"}


WRONG = {
    "file": (["nowhere/config.json"], "nowhere/config.json does not exist; give a config.json, a folder"),
    "folder": (["."], ". holds no config.json; give a folder that does, or the file"),
    "id": (["nobody/nothing"], "no configuration of 'nobody/nothing' is in the Hugging Face cache; download it (hf "),
    "broken": (["broken"], "transformers cannot read the configuration in broken: "),
    "filter": (["good", "--filter", "skip_lmhead"], "got skip_lmhead; did you mean 'skip_lm_head'?"),
    "another filter": (["good", "--filter", "xyz"], "--filter must be one of is_linear, experts, "),
    "no value": (["good", "--filter", "min_features"], "is written min_features=VALUE, got min_features"),
    "a value": (["good", "--filter", "experts=3"], "--filter experts is written experts, got experts=3"),
    "number": (["good", "--filter", "min_features=x"], "min_features=x: VALUE must be a whole number, got 'x'"),
    "blocks": (["good", "--filter", "keep_last_blocks=9"], "has 2 blocks, got count=9"),
    "nothing": (["good", "--no-recommended"], "--no-recommended leaves no filter; give one by --filter, as"),
    "recipe": (["good", "--recipe", "fp9"], "invalid choice: 'fp9'"),
}


@pytest.mark.parametrize(("argv", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_sentence(argv, said, saved, tmp_path, monkeypatch, capsys):
    os.rename(saved("dense"), tmp_path / "good")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["report", *argv])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and said in printed.err
    assert len(printed.err.splitlines()) == 1
