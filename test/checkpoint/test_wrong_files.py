"""Files that are not what they seem: refused with the file and a fix, before a value of the model changes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from exported_models import FORMATS, compressed_tensors, export, safetensors, save, tensors_in
from helpers import FP8, assert_same_tensors, mlp, replace

from torchao_blockwise import checkpoint
from torchao_blockwise.testing import assert_bitwise_equal

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CT, MODELOPT = "nvfp4_compressed_tensors", "nvfp4_modelopt"


def assert_refused(format: str, folder: Path, message: str, error=(ValueError, KeyError), configs=None) -> None:
    for config in (FORMATS[format],) if configs is None else configs:
        model = mlp(config)
        before = {n: x.clone() for n, x in model.state_dict().items()}
        with pytest.raises(error, match=message):
            checkpoint.load(model, folder)
        assert_same_tensors(model.state_dict(), before)


def gone(name: str):
    return lambda t: t.pop(name)


def put(name: str, x: torch.Tensor):
    return lambda t: t.update({name: x})


def cast(name: str, dtype: torch.dtype):
    return lambda t: t.update({name: t[name].float().to(dtype)})


def first(name: str, value: float):
    return lambda t: t[name].view(-1)[:1].copy_(torch.tensor(value))


def zero_scale(code: int):
    """Of a block that has a code which is not zero."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.weight"].view(torch.uint8)[128:, :] = 0
        tensors["0.weight"].view(torch.uint8)[159, 63] = code
        tensors["0.weight_scale_inv"][1, 0] = 0

    return change


def bare(dtype: torch.dtype):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        cast("0.weight", dtype)(tensors)
        del tensors["0.weight_scale_inv"]

    return change


NO_NUMBER = "scales that are not positive numbers; copy"
# (format, what happens to its tensors, what is said)
TENSORS = [
    ("fp8_block", gone("0.weight_scale_inv"), r"0\.weight in .*model\.saf.* is in F8_E4M3 and has no 0\.weight_s"),
    ("fp8_block", first("2.weight_scale_inv", float("nan")), rf"2\.weight_scale_inv in .* has {NO_NUMBER}"),
    ("fp8_block", first("2.weight_scale_inv", -1.0), NO_NUMBER),
    ("fp8_block", zero_scale(1), rf"0\.weight_scale_inv in .* has {NO_NUMBER}"),
    ("fp8_block", zero_scale(0x7F), NO_NUMBER),
    ("fp8_block", put("0.weight_scale_inv", torch.ones(3, 3)), r"has shape \[3, 3\], but the model needs \[2, 1\]"),
    ("fp8_block", put("2.bias", torch.ones(7)), r"2\.bias in .* has shape \[7\], but the model needs \[32\]"),
    ("fp8_block", gone("2.bias"), r"has no 2\.bias"),
    ("fp8_block", put("3.bias", torch.ones(7)), r"no place for 3\.bias"),
    ("fp8_block", cast("0.bias", torch.int64), r"0\.bias in .* is in I64, but the model needs torch\.float32"),
    ("fp8_block", lambda t: (cast("0.weight", torch.int8)(t), gone("0.weight_scale_inv")(t)), r"is in I8, but the"),
    ("fp8_block", cast("0.weight_scale_inv", torch.int32), r"0\.weight_scale_inv in .* is in I32, expected F32"),
    ("fp8_block", cast("0.weight", torch.float8_e5m2), r"0\.weight .* F8_E5M2, which is not supported; use a plain"),
    ("fp8_block", bare(torch.float8_e5m2fnuz), r"is in F8_E5M2FNUZ, which is not supported; use a plain"),
    ("fp8_block", bare(torch.float8_e4m3fnuz), r"is in F8_E4M3FNUZ, which is not supported; use a plain"),
    (CT, gone("0.weight_scale"), r"0\.weight_packed in .* is in U8 and has no 0\.weight_scale; copy the files again"),
    (CT, gone("2.weight_global_scale"), r"has no 2\.weight_global_scale"),
    (CT, gone("0.weight_packed"), r"has no 0\.weight"),
    (CT, cast("0.weight_packed", torch.int32), r"0\.weight_packed in .* is in I32, expected U8; copy the file"),
    (CT, first("2.weight_global_scale", 0), r"2\.weight_global_scale in .* is 0\.0, not a positive number"),
    (CT, first("2.weight_global_scale", float("nan")), r"is nan, not a positive number; copy the file again"),
    (CT, first("2.weight_global_scale", float("inf")), r"is inf, not a positive number"),
    (CT, first("0.weight_scale", -1), rf"0\.weight_scale in .* has {NO_NUMBER}"),
    (CT, first("0.weight_scale", float("nan")), NO_NUMBER),
    (CT, put("2.weight_scale", torch.ones(31, 10).to(torch.float8_e4m3fn)), r"\[31, 10\], but .* needs \[32, 10\]"),
    (CT, put("0.weight_packed", torch.ones(160, 24).to(torch.uint8)), r"\[160, 24\], but the model needs \[160, 32\]"),
    (CT, put("0.weight_global_scale", torch.ones(3)), r"has shape \[3\], but the model needs \[1\]"),
    (CT, cast("0.weight_scale", torch.float32), r"0\.weight_scale in .* is in F32, expected F8_E4M3"),
    (MODELOPT, gone("2.weight_scale_2"), r"2\.weight in .* is in U8 and has no 2\.weight_scale_2"),
    (MODELOPT, gone("0.weight_scale"), r"0\.weight in .* is in U8 and has no 0\.weight_scale;"),
    (MODELOPT, first("0.weight_scale_2", 0), r"0\.weight_scale_2 in .* is 0\.0, not a positive number"),
]


@pytest.mark.parametrize(("format", "change", "message"), TENSORS)
def test_tensors(format, change, message, tmp_path):
    """Into masters, quantized Parameters and plain ones."""
    found = export(mlp(FORMATS[format], seed=1), tmp_path, format)
    change(found)
    save(found, tmp_path)
    config = FORMATS[format]
    assert_refused(format, tmp_path, message, configs=(config, replace(config, master_weights=False), None))


@pytest.mark.parametrize("format", (CT, MODELOPT, "fp8_block"))
def test_the_last_of_many_files_is_bad(format, tmp_path):
    """Nothing of the others is loaded, and the message names it."""
    checkpoint.export(mlp(FORMATS[format], seed=1), tmp_path, format, shard_bytes=1)
    index, found = json.loads((tmp_path / INDEX).read_text()), tensors_in(tmp_path)
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    name, last = [*index["weight_map"].items()][-1]
    whole = (tmp_path / last).read_bytes()
    for bad in (None, b"", whole[:-1], b"PK\x03\x04" * 99, {"another": torch.ones(1)}, {name: torch.ones(1, 1, 33)}):
        if bad is None:
            (tmp_path / last).unlink()
        elif isinstance(bad, bytes):
            (tmp_path / last).write_bytes(bad)
        else:
            safetensors.save_file(bad, tmp_path / last)
        assert_refused(format, tmp_path, rf"{tmp_path}.*({re.escape(name)}|{last}).*; |({re.escape(name)}|{last}).*; ")


MIXED = "mixed-precision"
SETTINGS = [
    # GPT-OSS is published so.
    ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', but only 'fp8', .*'modelopt' and .*; use a plain checkpoint"),
    ({"quant_method": "fp8"}, r"weight_block_size is None; only \[128, 128\] is supported"),
    ({"quant_method": "fp8", "weight_block_size": 128}, r"quantization_config of 'fp8' cannot be read"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo is 'W4A8_AWQ'; for modelopt, only"),
    (compressed_tensors(block=None), r"block_structure is None; only \[128, 128\] is supported"),
    (compressed_tensors(block=[64, 64]), r"block_structure is \[64, 64\]"),
    (compressed_tensors("pack-quantized"), r"format is 'pack-quantized'; .*only 'nvfp4-pack-quantized' and"),
    (compressed_tensors() | {"config_groups": None}, r"quantization_config of .* cannot be read"),
    (
        compressed_tensors(MIXED, first="float-quantized", second="pack-quantized"),
        r"second of 'mixed-precision': format is 'pack-quantized'; for compressed-tensors, only ",
    ),
    (compressed_tensors(MIXED, first="float-quantized", second=None), r"second of 'mixed-precision': format is None"),
    (compressed_tensors(MIXED, first=MIXED), r"first of 'mixed-precision': format is 'mixed-precision'"),
    ([1], "quantization_config of .* is a list"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings(settings, message, tmp_path):
    export(mlp(FP8, seed=1), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert_refused("fp8_block", tmp_path, message)


def copied(*names: str):
    """The file under other names."""

    def change(folder: Path) -> None:
        for name in names:
            shutil.copy(folder / SINGLE, folder / f"{name}.safetensors")
        (folder / SINGLE).unlink()

    return change


def indexed(*names: str):
    return written(INDEX, json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))


def written(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def cut(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])


FILES = {
    "no files": (lambda folder: (folder / SINGLE).unlink(), r"has no \*\.safetensors; give the folder"),
    "file cut": (cut, r"model\.safetensors cannot be read .*copy it again"),
    "two checkpoints": (copied("one", "other"), r"is also in other\.safetensors.*remove one"),
    "a shard lost": (copied("model-1-of-2"), r"has no model.*index\.json, and 1 files .* their names say 2; copy the"),
    "two sets": (
        copied("model-1-of-2", "model-2-of-2", "model-1-of-1"),
        r"3 files .* say 1 and 2; .*remove the extra ones",
    ),
    "index of more": (indexed("0.weight", "9.bias"), r"index\.json lists 9\.bias in model.*, which lacks it; copy"),
    "index of nothing": (written(INDEX, "{}"), r"index\.json has no weight_map"),
    "config of a list": (written("config.json", "[]"), r"config\.json contains a list, not an object"),
}


@pytest.mark.parametrize(("change", "message"), FILES.values(), ids=FILES)
def test_files(change, message, tmp_path):
    export(mlp(FP8, seed=1), tmp_path)
    change(tmp_path)
    assert_refused("fp8_block", tmp_path, message, error=(ValueError, FileNotFoundError))


STRAYS = {
    # name: (tensors of a file, other files, what is ignored)
    "one file": (10**9, ("consolidated", "adapter_model"), "adapter_model.safetensors, consolidated.safetensors"),
    "shards": (1, ("consolidated",), "consolidated.safetensors"),
    "shards next to a file": (1, ("model", "a", "b", "c"), "a.safetensors, b.safetensors, c.safetensors and 1 more"),
}


@pytest.mark.parametrize(("shard_bytes", "others", "ignored"), STRAYS.values(), ids=STRAYS)
def test_files_that_are_not_the_checkpoint_are_ignored_and_named(shard_bytes, others, ignored, tmp_path):
    checkpoint.export(mlp(FP8, seed=1), tmp_path / "out", shard_bytes=shard_bytes)
    for name in others:
        file = tmp_path / "out" / f"{name}.safetensors"
        safetensors.save_file({"0.weight": torch.ones(2, 2), "stray": torch.ones(1)}, file)
    model = mlp(FP8)
    for without_index in (False, True):
        if without_index:
            (tmp_path / "out" / INDEX).unlink(missing_ok=True)
            (tmp_path / "out" / SINGLE).unlink() if "model" in others else None
            ignored = ignored.replace(" and 1 more", "")
        with pytest.warns(UserWarning, match=rf"load: .*out: ignored {ignored}, because ") as said:
            checkpoint.load(model, tmp_path / "out")
        assert len(said) == 1
        x = torch.randn(4, 64)
        assert_bitwise_equal(model(x).detach(), mlp(FP8, seed=1)(x).detach())


def test_tensors_that_the_index_does_not_list_are_ignored_and_named(tmp_path):
    names = export(mlp(FP8, seed=1), tmp_path)
    save(names | {"more": torch.ones(1)}, tmp_path)
    indexed(*names)(tmp_path)
    with pytest.warns(UserWarning, match=r"ignored more, because model\.safetensors\.index\.json does not list them"):
        checkpoint.load(mlp(FP8), tmp_path)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_numbers_in_the_place_of_integers_are_refused(dtype, tmp_path):
    """Counters of a model would be cut to integers."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    save(tensors | {"0.num_batches_tracked": torch.tensor(1.5, dtype=dtype), "0.bias": torch.ones(4)}, tmp_path)
    with pytest.raises(ValueError, match=r"0\.num_batches_tracked .* B?F\d+, but the model needs torch\.int64; "):
        checkpoint.load(model, tmp_path)
    assert not model[0].bias.any()
