"""`convert` and `verify`: checkpoints on disk, quantized and compared."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import FP8, NVFP4
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, linears_and_experts, skip_lm_head
from torchao_blockwise.checkpoint.files import Folder
from torchao_blockwise.cli import convert, main
from torchao_blockwise.testing import assert_bitwise_equal

transformers = pytest.importorskip("transformers", "5.0")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("no_interpreter")

SIZES = {"vocab_size": 64, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 48}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "experts": lambda: transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=128, num_experts=3),
}


def plain(kind: str, folder, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    model.save_pretrained(folder)
    return model


def tensors_in(folder) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return safetensors.load_file(file)


@pytest.mark.parametrize("kind", CONFIGS)
def test_nvfp4_is_what_export_writes(kind, tmp_path, capsys):
    """Layers that engines run as one have one tensor scale in both."""
    model = plain(kind, tmp_path / "plain")
    to = "nvfp4_compressed_tensors"
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--to", to]) == 0
    quantize_(model, NVFP4, filter_fn=linears_and_experts() & skip_lm_head())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        checkpoint.export(model, tmp_path / "exported", to)
    got, expected = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "exported")
    assert got.keys() == expected.keys() and any(name.endswith("weight_packed") for name in got)
    for name, x in expected.items():
        assert_bitwise_equal(got[name].view(torch.uint8), x.view(torch.uint8), name)
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "exported")]) == 0
    assert capsys.readouterr().out.endswith("\nPASS\n")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "no"), "--to", to, "--power-of-2-scales"]) == 2
    assert "--power-of-2-scales is for fp8_block; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_writes_what_export_writes(kind, tmp_path, capsys):
    model = plain(kind, tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out")]) == 0
    assert " tensors quantized, " in capsys.readouterr().out
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    checkpoint.export(model, tmp_path / "exported")
    got, expected = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "exported")
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(got[name].view(torch.uint8), x.view(torch.uint8), name)
    settings, of_export = (
        json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        for folder in ("out", "exported")
    )
    assert settings == of_export and (tmp_path / "out" / "tokenizer.json").exists()
    for first, second in (("out", "exported"), ("out", "plain"), ("plain", "out")):
        assert main(["verify", str(tmp_path / first), str(tmp_path / second)]) == 0
    assert main(["verify", str(tmp_path / "out"), str(tmp_path / "plain"), "--error", "0.001"]) == 1
    assert "relative error" in capsys.readouterr().out


@pytest.mark.parametrize("to", ("fp8_block", "nvfp4_compressed_tensors"))
def test_what_is_interrupted_goes_on(to, tmp_path, monkeypatch, capsys):
    """Files that are finished are kept, their tensors not quantized again; the bytes are those of one run."""
    plain("llama", tmp_path / "plain")
    command = ["convert", str(tmp_path / "plain"), "--to", to, "--shard-gb", "0.0001"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    quantize, calls = convert.ops.quantize, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return quantize(*args, **options)

    monkeypatch.setattr(convert.ops, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*command, str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and (tmp_path / ".out-unfinished").is_dir()
    # A file that was being written is none.
    (tmp_path / ".out-unfinished" / "part").write_bytes(b"half")
    capsys.readouterr()
    assert main([*command, str(tmp_path / "out")]) == 0
    assert "goes on where it was interrupted, behind " in capsys.readouterr().out
    # 14 weights in all.
    assert 14 < len(calls) < 9 + 14
    files = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == files and len(files) > 4
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (tmp_path / ".out-unfinished").exists()


def test_a_disk_that_is_full_at_the_end_costs_one_file(tmp_path, monkeypatch, capsys):
    """Where the last file does not fit, the others are kept."""
    plain("llama", tmp_path / "plain")
    command = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--shard-gb", "0.0001"]

    def full(folder) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Folder, "_finish", full)
    assert main(command) == 2
    monkeypatch.undo()
    capsys.readouterr()
    assert main(command) == 0
    assert "goes on where it was interrupted" in capsys.readouterr().out
    assert not (tmp_path / ".out-unfinished").exists()


def test_other_options_start_anew(tmp_path, monkeypatch):
    plain("llama", tmp_path / "plain")
    command = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--shard-gb", "0.0001"]
    monkeypatch.setattr(convert, "write_settings", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(command)
    monkeypatch.undo()
    assert main([*command, "--skip", "*.down_proj"]) == 0
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in names
    assert "model.layers.0.mlp.down_proj.weight_scale_inv" not in names


def test_stray_files_are_not_copied(tmp_path, capsys):
    plain("llama", tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out")]) == 0
    safetensors.save_file({"layers.0.wq.weight": torch.ones(2, 2)}, tmp_path / "plain" / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"ignored consolidated\.safetensors, because the checkpoint is model\.saf"):
        assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "again")]) == 0
    assert tensors_in(tmp_path / "again").keys() == tensors_in(tmp_path / "out").keys()
    with pytest.warns(UserWarning, match="ignored consolidated"):
        assert main(["verify", str(tmp_path / "out"), str(tmp_path / "plain")]) == 0


SCALES_OF_AN_ENGINE = ("input_scale", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")


@pytest.mark.parametrize("to", ("plain", "nvfp4_modelopt"))
def test_scales_of_an_engine_are_of_no_model(to, tmp_path, capsys):
    """`convert` leaves them out, `verify` and `load` do not miss them."""
    plain("llama", tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "fp8")]) == 0
    file = tmp_path / "fp8" / "model.safetensors"
    more = {f"model.layers.0.self_attn.{name}": torch.ones(()) for name in SCALES_OF_AN_ENGINE}
    without = safetensors.load_file(file)
    safetensors.save_file(without | more, file, metadata={"format": "pt"})
    assert main(["convert", str(tmp_path / "fp8"), str(tmp_path / "out"), "--to", to]) == 0
    assert not tensors_in(tmp_path / "out").keys() & more.keys()
    for pair in (("fp8", "plain"), ("plain", "fp8"), ("fp8", "fp8")):
        assert main(["verify", *(str(tmp_path / folder) for folder in pair)]) == 0
    checkpoint.load(transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()), tmp_path / "fp8")
    # Other names that are left over are still said.
    safetensors.save_file(without | {"model.layers.0.self_attn.x_scale": torch.ones(())}, file)
    assert main(["verify", str(tmp_path / "fp8"), str(tmp_path / "plain")]) == 1


def test_experts_under_names_that_nobody_reads_are_refused(tmp_path, capsys):
    """With --skip they are copied."""
    options = SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GraniteMoeConfig(**options))
    model.save_pretrained(tmp_path / "plain")
    command = ["convert", str(tmp_path / "plain"), str(tmp_path / "out")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "input_linear.weight holds all experts of a layer under a name that readers take for high" in error
    assert "convert: --skip" in error and not (tmp_path / "out").exists()
    assert main([*command, "--skip", "*.experts"]) == 0
    found = tensors_in(tmp_path / "out")
    assert found["model.layers.0.block_sparse_moe.input_linear.weight"].dtype == torch.float32
    assert found["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn


def test_layers_are_left_out_by_name(tmp_path):
    plain("llama", tmp_path / "plain")
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--skip", "*.down_proj"]) == 0
    found = tensors_in(tmp_path / "out")
    assert found["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_quantized_is_decoded(kind, tmp_path, capsys):
    """DeepSeek's files exist in FP8 alone: as plain ones, and in another format."""
    folders = {to: tmp_path / to for to in ("source", "fp8_block", "plain", "nvfp4_modelopt", "anew", "back")}
    plain(kind, folders["source"])
    for source, to, folder in (
        ("source", "fp8_block", "fp8_block"),
        ("fp8_block", "plain", "plain"),
        ("fp8_block", "nvfp4_modelopt", "nvfp4_modelopt"),
        ("nvfp4_modelopt", "fp8_block", "back"),
    ):
        assert main(["convert", str(folders[source]), str(folders[folder]), "--to", to]) == 0
    assert "quantization_config" not in json.loads((folders["plain"] / "config.json").read_text())
    decoded = transformers.AutoModelForCausalLM.from_pretrained(folders["plain"], dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).bfloat16()
    checkpoint.load(loaded, folders["fp8_block"])
    for (name, got), wanted in zip(decoded.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert_bitwise_equal(got, wanted.float(), name)
    # Values go from one format to the other without being rounded to bf16 between.
    loaded = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    checkpoint.load(loaded, folders["fp8_block"])
    loaded.save_pretrained(folders["anew"])
    assert main(["convert", str(folders["anew"]), str(tmp_path / "again"), "--to", "nvfp4_modelopt"]) == 0
    got, wanted = tensors_in(folders["nvfp4_modelopt"]), tensors_in(tmp_path / "again")
    assert got.keys() == wanted.keys()
    for name in (name for name in got if name + "_scale" in got):
        assert_bitwise_equal(got[name], wanted[name], name)
    assert main(["verify", str(folders["back"]), str(folders["source"]), "--error", "0.25"]) == 0


def test_differences_are_named(tmp_path, capsys):
    plain("llama", tmp_path / "a")
    found = tensors_in(tmp_path / "a")
    found["more"] = found.pop("lm_head.weight")
    found["model.norm.weight"] = torch.ones(3)
    (tmp_path / "b").mkdir()
    safetensors.save_file(found, tmp_path / "b" / "model.safetensors")
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "b has no lm_head.weight" in out and "a has no more" in out
    assert "model.norm.weight: shape [192] and [3]" in out and out.endswith("\nFAIL: 3 problems\n")


WRONG = {
    "nothing": (["convert", "nowhere", "out"], "no configuration of 'nowhere'"),
    "no files": (["convert", "empty", "out"], r"has no *.safetensors"),
    "there": (["convert", "plain", "plain"], "exists and is not empty"),
    "quantized": (["convert", "out", "again"], "out is in fp8_block already, as its config.json says; give others"),
    "plain": (["convert", "plain", "again", "--to", "plain"], "plain is in plain already"),
    "verify": (["verify", "plain", "nowhere"], "has no *.safetensors"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_a_sentence(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain("llama", tmp_path / "plain")
    CONFIGS["llama"]().save_pretrained(tmp_path / "empty")
    if argv[1] == "out":
        assert main(["convert", "plain", "out"]) == 0
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == before
