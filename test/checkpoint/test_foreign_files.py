"""Folders that are not what they seem, and models that engines read otherwise: nothing silent, nothing half-done."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import FP8, mlp
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, linears_and_experts
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import SMALL, logits, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")


def copied(folder: Path) -> None:
    for name in ("one", "other"):
        shutil.copy(folder / "model.safetensors", folder / f"{name}.safetensors")
    (folder / "model.safetensors").unlink()


def a_shard_lost(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def two_sets(folder: Path) -> None:
    for name in ("1-of-2", "2-of-2", "1-of-1"):
        shutil.copy(folder / "model.safetensors", folder / f"model-{name}.safetensors")
    (folder / "model.safetensors").unlink()


def indexed(*names: str):
    return written(INDEX, json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))


def changed(**tensors):
    def change(folder: Path) -> None:
        found = tensors_in(folder)
        for name, dtype in tensors.items():
            name = name.replace("_0_", "0.")
            found.pop("0.weight_scale_inv") if name == "0.weight" else None
            found[name] = found[name].float().to(dtype)
        safetensors.save_file(found, folder / "model.safetensors")

    return change


def written(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


INDEX = "model.safetensors.index.json"
WRONG = {
    "two checkpoints": (copied, r"is in other\.safetensors as well.*remove one"),
    "a shard lost": (a_shard_lost, r"has no model.*index\.json, and 1 files .* their names say 2; copy the index and"),
    "two sets": (two_sets, r"3 files .* their names say 1 and 2; .*remove other ones"),
    "index of more": (indexed("0.weight", "9.bias"), r"index\.json has 9\.bias in model\.saf.*, which lacks it; copy"),
    "index cut": (written(INDEX, '{"weight'), r"index\.json is not JSON that can be read .*copy it again"),
    "index of nothing": (written(INDEX, "{}"), r"index\.json has no weight_map"),
    "config cut": (written("config.json", '{"a'), r"config\.json is not JSON"),
    "config of a list": (written("config.json", "[]"), r"config\.json holds a list, not an object"),
    "quantization of a list": (
        written("config.json", '{"quantization_config": [1]}'),
        "quantization_config of .* is a list",
    ),
    "integers for a bias": (changed(_0_bias=torch.int64), r"0\.bias in .* is in I64, the model wants torch\.float32"),
    "codes of 8 bits": (changed(_0_weight=torch.int8), r"0\.weight in .* is in I8, the model wants"),
    "scales that are integers": (changed(_0_weight_scale_inv=torch.int32), r"0\.weight_scale_inv in .* is in I32; F32"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_is_said_and_changes_nothing(change, message, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out")
    change(tmp_path / "out")
    model = mlp(FP8)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, tmp_path / "out")
    for n, x in model.state_dict().items():
        assert_bitwise_equal(x, before[n], n)


def other_files(folder: Path, *names: str) -> None:
    for name in names:
        safetensors.save_file({"0.weight": torch.ones(2, 2), "stray": torch.ones(1)}, folder / f"{name}.safetensors")


STRAYS = {
    # name: (tensors of a file, other files, what is ignored)
    "one file": (10**9, ("consolidated", "adapter_model"), "adapter_model.safetensors, consolidated.safetensors"),
    "shards": (1, ("consolidated",), "consolidated.safetensors"),
    "shards next to a file": (1, ("model", "a", "b", "c"), "a.safetensors, b.safetensors, c.safetensors and 1 more"),
}


@pytest.mark.parametrize(("shard_bytes", "others", "ignored"), STRAYS.values(), ids=STRAYS)
def test_files_that_are_not_the_checkpoint_are_ignored_and_named(shard_bytes, others, ignored, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out", shard_bytes=shard_bytes)
    other_files(tmp_path / "out", *others)
    model = mlp(FP8)
    for without_index in (False, True):
        if without_index:
            (tmp_path / "out" / INDEX).unlink(missing_ok=True)
            (tmp_path / "out" / "model.safetensors").unlink() if "model" in others else None
            ignored = ignored.replace(" and 1 more", "")
        with pytest.warns(UserWarning, match=rf"load: .*out: ignored {ignored}, because ") as said:
            checkpoint.load(model, tmp_path / "out")
        assert len(said) == 1
        x = torch.randn(4, 64)
        assert_bitwise_equal(model(x).detach(), mlp(FP8, seed=1)(x).detach())


def test_tensors_that_the_index_does_not_list_are_ignored_and_named(tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out")
    names = tensors_in(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    safetensors.save_file(names | {"more": torch.ones(1)}, file)
    indexed(*names)(tmp_path / "out")
    with pytest.warns(UserWarning, match=r"ignored more, because model\.safetensors\.index\.json does not list them"):
        checkpoint.load(mlp(FP8), tmp_path / "out")


@pytest.mark.parametrize("leads_to", ("folder", "nothing"))
def test_a_link_stays_one(leads_to, tmp_path):
    if leads_to == "folder":
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    checkpoint.export(mlp(FP8), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_an_embedding_is_written_in_high_precision(tmp_path):
    """A head that shares it has been converted: engines would take its codes for values."""
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    quantize_(model, FP8, filter_fn=linears_and_experts())
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight is an embedding's as well"):
        checkpoint.export(model, tmp_path / "out")
    found, name = tensors_in(tmp_path / "out"), "model.embed_tokens.weight"
    assert_bitwise_equal(found[name], model.get_parameter(name).hp.detach())
    assert f"{name}_scale_inv" not in found and found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    weights = checkpoint.quantized_weights(model)
    assert weights.metadata() == {n: (x.dtype, tuple(x.shape)) for n, x in weights}
    other = transformers.AutoModelForCausalLM.from_config(config)
    quantize_(other, FP8, filter_fn=linears_and_experts())
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
