"""Checksums: the same of the same bytes wherever they lie, others of others; a receiver and `verify` compare them."""

import json

import pytest
import torch
from exported_models import FORMATS, export, save, tensors_in
from helpers import mlp

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import checking
from torchao_blockwise.cli import main


def by_hand(data: bytes) -> int:
    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    return (len(data) + sum(word * (2 * i + 1) for i, word in enumerate(words))) % (1 << 64)


@pytest.mark.parametrize("size", (0, 1, 5, 63, 500))
@pytest.mark.parametrize("chunk", (4, 64, 1 << 24))
def test_it_is_the_formula(size, chunk, monkeypatch):
    monkeypatch.setattr(checking, "_CHUNK", chunk)
    data = torch.randint(256, (size + 1,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    # Begins off a word.
    total = checkpoint.checksum(data[1:])
    assert total.dtype == torch.int64 and total.shape == ()
    assert int(total) % (1 << 64) == by_hand(bytes(data[1:].tolist()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.uint8, torch.float8_e8m0fnu, torch.int64))
def test_it_is_of_bytes(dtype):
    """Whatever they stand for, and however they lie."""
    x = torch.arange(1, 64).reshape(7, 9).to(dtype)
    same = checkpoint.checksum(x.view(torch.uint8))
    assert torch.equal(checkpoint.checksum(x), same)
    assert torch.equal(checkpoint.checksum(x.view(torch.uint8).t().contiguous().t()), same)
    assert not torch.equal(checkpoint.checksum(x.t()), same)
    assert not torch.equal(checkpoint.checksum(torch.cat((x, torch.zeros(1, 9).to(dtype)))), same)


@pytest.mark.parametrize("format", ("fp8_block", "nvfp4_compressed_tensors"))
def test_a_receiver_and_files_have_those_of_the_sender(format, tmp_path, capsys):
    model = mlp(FORMATS[format], features=(208, 304, 130))
    weights = checkpoint.quantized_weights(model, format)
    sums = checkpoint.checksums(weights)
    assert list(sums) == list(weights.metadata())
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in sums.values())
    received = {name: x.detach().clone() for name, x in weights}
    found = export(model, tmp_path / "out", format)
    assert checkpoint.checksums(received.items()) == checkpoint.checksums(found.items()) == sums
    received["0.bias"][7] += 1
    assert {n for n, s in checkpoint.checksums(received.items()).items() if s != sums[n]} == {"0.bias"}
    assert checkpoint.checksums([]) == {}
    # verify compares files with them.
    (tmp_path / "sums.json").write_text(json.dumps(sums))
    command = ["verify", str(tmp_path / "out"), str(tmp_path / "sums.json")]
    assert main(command) == 0
    assert f"{len(sums)} tensors are the same, 0 have different bytes" in capsys.readouterr().out
    found = tensors_in(tmp_path / "out")
    found["2.bias"][3] += 1
    found["more"] = found.pop("0.bias")
    save(found, tmp_path / "out")
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "2.bias: checksum " in out and "out has no 0.bias" in out and "sums.json has no more" in out
    for text, said in (("[]", "must contain {name: checksum}, got a list; write it again"), ("{", "is not JSON")):
        (tmp_path / "sums.json").write_text(text)
        assert main(command) == 2
        assert said in capsys.readouterr().err
