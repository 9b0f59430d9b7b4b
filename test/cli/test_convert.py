"""`convert` and `verify`: checkpoints on disk, quantized and compared."""

import json

import pytest
import torch
from exported_models import FORMATS, export, language_model, safetensors, save, tensors_in, tiny_mixture
from helpers import FP8_POW2, assert_same_tensors
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, recommended_layers
from torchao_blockwise.checkpoint.files import INDEX, Folder
from torchao_blockwise.cli import convert, main
from torchao_blockwise.testing import assert_bitwise_equal

transformers = pytest.importorskip("transformers", "5.0")


def model_of(kind: str):
    model = tiny_mixture(kind, "cpu") if kind == "deepseek_v4" else language_model(kind, None)
    return model.bfloat16()


def plain(kind: str, folder):
    model = model_of(kind)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


SAME = [(kind, to, FORMATS[to]) for kind in ("Llama", "Qwen3Moe") for to in ("fp8_block", "nvfp4_compressed_tensors")]
SAME += [("Llama", "fp8_block", FP8_POW2), ("Llama", "nvfp4_modelopt", FORMATS["nvfp4_modelopt"])]
SAME += [("deepseek_v4", "fp8_block_ue8m0", FP8_POW2)]


@pytest.mark.parametrize(("kind", "to", "config"), SAME)
def test_it_writes_what_export_writes(kind, to, config, tmp_path, capsys):
    """Layers that engines fuse have one tensor scale in both. All files except the tokenizer's are the same."""
    model = plain(kind, tmp_path / "plain")
    options = ["--power-of-2-scales"] * (config is FP8_POW2 and to == "fp8_block")
    assert run("convert", tmp_path / "plain", tmp_path / "out", "--to", to, *options) == 0
    assert " tensors quantized, " in capsys.readouterr().out
    quantize_(model, config, filter_fn=recommended_layers(model))
    assert_same_tensors(tensors_in(tmp_path / "out"), export(model, tmp_path / "exported", to))
    files = {file.name for file in (tmp_path / "out").glob("*.json")}
    for file in files - {"tokenizer.json", "generation_config.json", "config.json"}:
        assert (tmp_path / "out" / file).read_text() == (tmp_path / "exported" / file).read_text(), file
    settings = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("out", "exported")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"] and "tokenizer.json" in files
    assert settings[0]["quantization_config"].get("scale_fmt") == ("ue8m0" if config is FP8_POW2 else None)
    for first, second in (("out", "exported"), ("out", "plain"), ("plain", "out")):
        assert run("verify", tmp_path / first, tmp_path / second) == 0
        assert capsys.readouterr().out.endswith("\nPASS\n")
    assert run("verify", tmp_path / "out", tmp_path / "plain", "--error", "0.001") == 1
    assert "relative error" in capsys.readouterr().out


@pytest.mark.parametrize("to", ("fp8_block", "nvfp4_compressed_tensors"))
def test_what_is_interrupted_goes_on(to, tmp_path, monkeypatch, capsys):
    """Files that are finished are kept, their tensors not quantized again; the bytes are those of one run."""
    plain("Llama", tmp_path / "plain")
    command = ["convert", tmp_path / "plain", "--to", to, "--shard-gb", "0.0001"]
    assert run(*command, tmp_path / "whole") == 0
    quantize, calls = convert.ops.quantize, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return quantize(*args, **options)

    monkeypatch.setattr(convert.ops, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*command, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out-unfinished").is_dir()
    # A file that was being written is none.
    (tmp_path / ".out-unfinished" / "part").write_bytes(b"half")
    capsys.readouterr()
    assert run(*command, tmp_path / "out") == 0
    assert "tensors that an interrupted run has written" in capsys.readouterr().out
    # 14 weights in all.
    assert 14 < len(calls) < 9 + 14
    files = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == files and len(files) > 4
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (tmp_path / ".out-unfinished").exists()


def test_a_disk_that_is_full_at_the_end_costs_one_file(tmp_path, monkeypatch, capsys):
    """The others are kept for the same command; other options start again."""
    plain("Llama", tmp_path / "plain")
    command = ["convert", tmp_path / "plain", tmp_path / "out", "--shard-gb", "0.0001"]

    write_json = Folder.write_json

    def full(folder, name, content) -> None:
        if name == INDEX:
            raise OSError("No space left on device")
        write_json(folder, name, content)

    for options, goes_on in (((), True), (("--skip", "*.down_proj"), False)):
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "write_json", full)
            assert run(*command) == 2
        capsys.readouterr()
        assert run(*command, *options) == 0
        assert ("tensors that an interrupted run has written" in capsys.readouterr().out) is goes_on
        assert not (tmp_path / ".out-unfinished").exists()
        found = tensors_in(tmp_path / "out")
        assert ("model.layers.0.mlp.down_proj.weight_scale_inv" in found) is goes_on
        assert "model.layers.0.mlp.up_proj.weight_scale_inv" in found
        (tmp_path / "out").rename(tmp_path / str(goes_on))


def test_stray_files_are_not_copied(tmp_path):
    plain("Llama", tmp_path / "plain")
    assert run("convert", tmp_path / "plain", tmp_path / "out") == 0
    safetensors.save_file({"layers.0.wq.weight": torch.ones(2, 2)}, tmp_path / "plain" / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"ignored consolidated\.safetensors, because the checkpoint is model\.saf"):
        assert run("convert", tmp_path / "plain", tmp_path / "again") == 0
    assert tensors_in(tmp_path / "again").keys() == tensors_in(tmp_path / "out").keys()
    with pytest.warns(UserWarning, match="ignored consolidated"):
        assert run("verify", tmp_path / "out", tmp_path / "plain") == 0


SCALES_OF_AN_ENGINE = ("input_scale", "output_scale", "k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")


@pytest.mark.parametrize("to", ("plain", "nvfp4_modelopt"))
def test_scales_of_an_engine_are_of_no_model(to, tmp_path):
    """`convert` leaves them out, `verify` and `load` do not miss them."""
    plain("Llama", tmp_path / "plain")
    assert run("convert", tmp_path / "plain", tmp_path / "fp8") == 0
    without = tensors_in(tmp_path / "fp8")
    more = {f"model.layers.0.self_attn.{name}": torch.ones(()) for name in SCALES_OF_AN_ENGINE}
    save(without | more, tmp_path / "fp8")
    assert run("convert", tmp_path / "fp8", tmp_path / "out", "--to", to) == 0
    assert not tensors_in(tmp_path / "out").keys() & more.keys()
    for pair in (("fp8", "plain"), ("plain", "fp8"), ("fp8", "fp8")):
        assert run("verify", *(tmp_path / folder for folder in pair)) == 0
    checkpoint.load(language_model("Llama", None), tmp_path / "fp8")
    # Other names that are left over are still said.
    save(without | {"model.layers.0.self_attn.x_scale": torch.ones(())}, tmp_path / "fp8")
    assert run("verify", tmp_path / "fp8", tmp_path / "plain") == 1


@pytest.mark.parametrize("kind", ("Llama", "Qwen3Moe"))
def test_what_is_quantized_is_decoded(kind, tmp_path):
    """DeepSeek's files exist only in FP8: as plain ones, and in another format."""
    plain(kind, tmp_path / "source")
    steps = (("source", "fp8_block", "fp8"), ("fp8", "plain", "plain"), ("fp8", "nvfp4_modelopt", "nvfp4"))
    for source, to, folder in (*steps, ("nvfp4", "fp8_block", "back")):
        assert run("convert", tmp_path / source, tmp_path / folder, "--to", to) == 0
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    decoded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    loaded = model_of(kind)
    checkpoint.load(loaded, tmp_path / "fp8")
    for (name, got), wanted in zip(decoded.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert_bitwise_equal(got, wanted.float(), name)
    # Values go from one format to the other without being rounded to bf16 between.
    loaded = model_of(kind).float()
    checkpoint.load(loaded, tmp_path / "fp8")
    loaded.save_pretrained(tmp_path / "in_fp32")
    assert run("convert", tmp_path / "in_fp32", tmp_path / "again", "--to", "nvfp4_modelopt") == 0
    got, wanted = ({n: x for n, x in tensors_in(tmp_path / f).items() if ".mlp." in n} for f in ("nvfp4", "again"))
    assert_same_tensors({n: x for n, x in got.items() if "proj" in n}, {n: x for n, x in wanted.items() if "proj" in n})
    assert run("verify", tmp_path / "back", tmp_path / "source", "--error", "0.25") == 0


def test_differences_are_named(tmp_path, capsys):
    plain("Llama", tmp_path / "a")
    found = tensors_in(tmp_path / "a")
    found["more"] = found.pop("lm_head.weight")
    found["model.norm.weight"] = torch.ones(3)
    save(found, tmp_path / "b")
    assert run("verify", tmp_path / "a", tmp_path / "b") == 1
    out = capsys.readouterr().out
    assert "b has no lm_head.weight" in out and "a has no more" in out
    assert "model.norm.weight: shape [192] and [3]" in out and out.endswith("\nFAIL: 3 problems\n")
    name = "model.layers.0.mlp.up_proj.weight"
    found = export(language_model("Llama", FORMATS["nvfp4_modelopt"]), tmp_path / "c", "nvfp4_modelopt")
    save(found | {name: found[name] ^ 0x33}, tmp_path / "d")
    assert run("verify", tmp_path / "c", tmp_path / "d") == 1
    assert f"{name}: relative error" in capsys.readouterr().out
    del found[f"{name}_scale"]
    save(found, tmp_path / "d")
    assert run("verify", tmp_path / "c", tmp_path / "d") == 1
    assert f"is in U8 and has no {name}_scale" in capsys.readouterr().out


WRONG = {
    "nothing": (["convert", "nowhere", "out"], "no configuration of 'nowhere'"),
    "no files": (["convert", "empty", "out"], r"has no *.safetensors"),
    "there": (["convert", "plain", "plain"], "exists and is not empty"),
    "scales": (
        ["convert", "plain", "again", "--to", "nvfp4_modelopt", "--power-of-2-scales"],
        "--power-of-2-scales is only for fp8_block; leave it out",
    ),
    "bytes of scales": (
        ["convert", "plain", "again", "--to", "fp8_block_ue8m0"],
        "has model_type llama; choose fp8_block (convert: with --power-of-2-scales), ",
    ),
    "verify": (["verify", "plain", "nowhere"], "has no *.safetensors"),
}


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_a_sentence(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain("Llama", tmp_path / "plain").config.save_pretrained(tmp_path / "empty")
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert message in shown and "export:" not in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == before
