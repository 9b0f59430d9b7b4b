"""Files that are damaged or made to deceive: refused with file and fix, or read in bounds, in little memory."""

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from exported_models import FORMATS, safetensors
from helpers import FP8, assert_same_tensors, mlp

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint.stored_weights import StoredWeights
from torchao_blockwise.diagnostics.live_memory import LiveMemory
from torchao_blockwise.testing import assert_bitwise_equal

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
every_kind = pytest.mark.parametrize("format", [format for format in FORMATS if format != "fp8_block_ue8m0"])
DTYPES = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "U8", "I8", "U64", "")
SIZES = (0, 1, 2, 127, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, 2**70, -1, 1.5, "1", None)


def header_of(file: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", file[:8])[0]
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def with_header(header: dict | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def damaged(file: bytes, draw: random.Random) -> bytes:
    """The file with one field of its header changed, or some of its bytes, or a part of it missing."""
    header, data = header_of(file)
    kind = draw.choice(("bytes", "header bytes", "cut", "length", "field", "field", "field", "data"))
    if kind in ("bytes", "header bytes"):
        changed = bytearray(file)
        end = len(file) if kind == "bytes" else len(file) - len(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(end)] = draw.randrange(256)
        return bytes(changed)
    if kind == "cut":
        return file[: draw.randrange(len(file))]
    if kind == "length":
        length = draw.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1, 99_999_999, len(file), len(file) - 8))
        return with_header(header, data, length)
    if kind == "data":
        return with_header(header, data[: draw.randrange(len(data))] + bytes(draw.randrange(300)))
    name = draw.choice([name for name in header if name != "__metadata__"])
    field = draw.choice(("dtype", "shape", "size", "dims", "offset", "offset", "name", "gone", "foreign"))
    held = header[name]
    if field == "dtype":
        held["dtype"] = draw.choice(DTYPES)
    elif field == "shape":
        # Of the same bytes, perhaps.
        held["shape"] = draw.choice(([], [0], held["shape"][::-1], [*held["shape"], 1], [1, *held["shape"]]))
    elif field == "size" and held["shape"]:
        held["shape"][draw.randrange(len(held["shape"]))] = draw.choice(SIZES)
    elif field == "dims":
        held["shape"], held["data_offsets"] = [draw.choice(SIZES), draw.choice(SIZES), 0], [0, 0]
    elif field == "offset":
        held["data_offsets"][draw.randrange(2)] = draw.choice((*SIZES, len(data), len(data) + 1))
    elif field == "name":
        header[draw.choice(("", "../x", "0.weight", "0.weight_scale_inv", "\0", "é" * 999))] = header.pop(name)
    elif field == "gone":
        del held[draw.choice(list(held))]
    else:
        header[name] = draw.choice((None, 3, [], "F32", {"dtype": "F32", "shape": [], "data_offsets": [0, 4, 8]}))
    return with_header(header, data)


def read_all(folder: Path) -> None:
    """Everything that `load`, `convert` and `verify` do to files before and while they read them."""
    weights = StoredWeights(folder)
    for name in sorted(weights.names):
        values = weights.values(name, torch.float32)
        # Every byte is touched.
        values.view(torch.uint8).sum() if values.numel() and values.dim() else values.clone()


def exported(folder: Path, format: str) -> bytes:
    checkpoint.export(mlp(FORMATS[format], seed=1), folder / "out", format)
    return (folder / "out" / SINGLE).read_bytes()


@every_kind
@pytest.mark.parametrize("seeds", (range(150), pytest.param(range(150, 1200), marks=pytest.mark.slow)), ids=len)
def test_damaged_files_are_refused_or_read_in_bounds(format, seeds, tmp_path):
    whole, out = exported(tmp_path, format), tmp_path / "out"
    model = mlp(FORMATS[format])
    before = {n: x.clone() for n, x in model.state_dict().items()}
    refused = 0
    for seed in seeds:
        (out / SINGLE).write_bytes(damaged(whole, random.Random(seed)))
        with LiveMemory() as memory:
            for read in (read_all, lambda folder: checkpoint.load(model, folder)):
                try:
                    read(out)
                except (ValueError, KeyError) as error:
                    said = str(error)
                    assert str(out) in said and ("; " in said or isinstance(error, KeyError)), (seed, said)
                    # Names that do not match are `load`'s only KeyError.
                    assert isinstance(error, ValueError) or "has no " in said or "no place for " in said, (seed, said)
                    refused += 1
                    assert_same_tensors(model.state_dict(), before)
                else:
                    before = {n: x.clone() for n, x in model.state_dict().items()}
        assert memory.peak <= 64 * len(whole)
    assert refused > len(seeds)


@pytest.mark.parametrize("kind", ("parent", "absolute", "link", "linked folder", "link without an index"))
def test_a_file_outside_of_the_folder_is_not_opened(kind, tmp_path):
    exported(tmp_path, "fp8_block")
    folder, outside = tmp_path / "out", tmp_path / "outside.safetensors"
    (folder / SINGLE).rename(outside)
    name = {"parent": "../outside.safetensors", "absolute": str(outside)}.get(kind, SINGLE)
    if kind in ("link", "link without an index"):
        (folder / SINGLE).symlink_to(outside)
    elif kind == "linked folder":
        (folder / "sub").symlink_to(tmp_path)
        name = "sub/outside.safetensors"
    if kind != "link without an index":
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(safetensors.load_file(outside), name)}))
    with pytest.raises(ValueError, match=r"load: .* points outside the folder, to .*outside\.saf.*; copy that file"):
        checkpoint.load(mlp(FP8), folder)


@pytest.mark.parametrize("linked", (True, False), ids=("linked", "direct"))
def test_the_cache_of_hugging_face_is_read(linked, tmp_path):
    """Its folders hold links to blobs; the folder itself may be a link."""
    exported(tmp_path, "fp8_block")
    snapshot = tmp_path / "models--of--mine" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--of--mine" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "out" / SINGLE).rename(blobs / "5e6f")
    (snapshot / SINGLE).symlink_to(os.path.relpath(blobs / "5e6f", snapshot))
    if linked:
        (tmp_path / "link").symlink_to(snapshot)
        snapshot = tmp_path / "link"
    model = mlp(FP8)
    checkpoint.load(model, snapshot)
    assert_bitwise_equal(model[0].bias, mlp(FP8, seed=1)[0].bias)


NAMES = {
    "pickle": ("pytorch_model.bin", r"from tensors to \*\.safetensors, .*or use a checkpoint in safetensors"),
    "missing": ("absent.safetensors", r"absent\.safetensors is missing or not a file; copy it again"),
    "folder": ("sub.safetensors", r"sub\.safetensors is missing or not a file"),
    "pipe": ("pipe.safetensors", r"pipe\.safetensors is missing or not a file"),
    "loop": ("loop.safetensors", r"loop\.safetensors.* copy it again"),
    "zero": ("a\0.safetensors", r"cannot be read \(embedded null.*copy it again"),
    "number": (3, r"index\.json has no weight_map from tensors to .*; copy it again"),
    "list": (["a"], r"index\.json has no weight_map from tensors to "),
}


@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES)
def test_names_of_an_index_that_are_no_files(name, message, tmp_path):
    exported(tmp_path, "fp8_block")
    out = tmp_path / "out"
    (out / "sub.safetensors").mkdir()
    os.mkfifo(out / "pipe.safetensors")
    (out / "loop.safetensors").symlink_to("loop.safetensors")
    (out / INDEX).write_text(json.dumps({"weight_map": {"0.weight": name}}))
    with pytest.raises(ValueError, match=message):
        checkpoint.load(mlp(FP8), out)


@pytest.mark.parametrize("name", (INDEX, "config.json"))
@pytest.mark.parametrize("text", (b"[" * 200_000, b'{"a": "\xff"}', b"", b"\0"), ids=("deep", "latin", "empty", "zero"))
def test_json_that_cannot_be_read(text, name, tmp_path):
    exported(tmp_path, "fp8_block")
    (tmp_path / "out" / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"load: .*{name} is not valid JSON .*; copy it again"):
        checkpoint.load(mlp(FP8), tmp_path / "out")


def test_a_tokenizer_outside_of_the_folder_is_not_copied(tmp_path):
    """A file of the user's would be published with the model."""
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "secret").write_text("secret")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    (source / "vocab.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"tokenizer\.json points outside the folder, to .*; it is left out"):
        checkpoint.export(mlp(FP8), tmp_path / "out", tokenizer_from=source)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [SINGLE, "vocab.json"]
