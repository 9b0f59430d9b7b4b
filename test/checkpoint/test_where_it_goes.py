"""Where an export goes: places that cannot be written, disks that fill up, processes that are killed, two at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from exported_models import language_model, logits, tensors_in
from helpers import FP8, mlp

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import files
from torchao_blockwise.cli import main
from torchao_blockwise.testing import assert_bitwise_equal

SafetensorError = pytest.importorskip("safetensors").SafetensorError


REMEDY = "give a directory that can be written, or free some space"


@pytest.mark.parametrize(
    ("umask", "folder", "file"), ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600)), ids=("open", "own")
)
def test_who_may_read_it(umask, folder, file, tmp_path):
    """As of other files that the process makes: engines run as other users."""
    kept = os.umask(umask)
    try:
        checkpoint.export(mlp(FP8), tmp_path / "out")
    finally:
        os.umask(kept)
    assert (tmp_path / "out").stat().st_mode & 0o777 == folder
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == file


def test_the_working_directory_is_not_replaced(tmp_path, monkeypatch):
    """Programs that run there would have none."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=r"here is the working directory, .* give a folder inside it, .*here/model"):
        checkpoint.export(mlp(FP8), ".")
    assert Path.cwd() == tmp_path / "here" and [file.name for file in tmp_path.iterdir()] == ["here"]
    checkpoint.export(mlp(FP8), "model")
    assert (tmp_path / "here" / "model" / "model.safetensors").exists()


def test_a_mount_point_is_not_replaced(tmp_path, monkeypatch):
    """An empty volume of a container: it cannot be renamed to, which is said before all is written."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
    with pytest.raises(ValueError, match=r"volume is a mount point, .* give a folder inside it, .*volume/model"):
        checkpoint.export(mlp(FP8), tmp_path / "volume")
    checkpoint.export(mlp(FP8), tmp_path / "volume" / "model")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty; give another directory, or remove it"):
        checkpoint.export(mlp(FP8), tmp_path)
    with pytest.raises(FileExistsError, match=r"file is a file; give a directory, or remove it"):
        checkpoint.export(mlp(FP8), tmp_path / "file")
    for folder, why in (("file/out", ""), ("x" * 250, ".*name too long")):
        with pytest.raises(OSError, match=rf"export: .*{folder} cannot be written {why}.*{REMEDY}"):
            checkpoint.export(mlp(FP8), tmp_path / folder)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("leads_to", ("folder", "nothing"))
def test_a_link_stays_one(leads_to, tmp_path):
    if leads_to == "folder":
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    checkpoint.export(mlp(FP8), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


ERRORS = {
    # safetensors raises its own error, not an OSError.
    "safetensors.torch.save_file": SafetensorError("Error while serializing: I/O error: No space left on device"),
    "transformers.LlamaConfig.save_pretrained": OSError(28, "No space left on device"),
}


@pytest.mark.parametrize("writer", ERRORS)
def test_a_full_disk_is_said_and_leaves_nothing(writer, tmp_path, monkeypatch):
    model = language_model("Llama")
    monkeypatch.setattr(writer, mock.Mock(side_effect=ERRORS[writer]))
    with pytest.raises(OSError, match=rf"out cannot be written \(.*No space left.*bytes are free;.*{REMEDY}"):
        checkpoint.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of files' sizes")
def test_what_the_system_refuses_in_the_middle_leaves_nothing(tmp_path):
    """The real error of a real write: a file may have no more bytes."""
    import resource

    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, kept[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written \(.*File too large"):
            checkpoint.export(mlp(FP8, features=(256, 600, 256)), tmp_path / "out", shard_bytes=90_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from exported_models import language_model
from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import files
class Folder(files.Folder):
    def _flush(self):
        super()._flush()
        if self._count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
checkpoint.writing.Folder = Folder
checkpoint.export(language_model("Llama"), sys.argv[1], shard_bytes=200_000)
"""


def test_what_is_killed_is_not_taken_for_whole(tmp_path, capsys):
    """Neither the name that was given nor the hidden folder that is left; the next export is not disturbed."""
    transformers = pytest.importorskip("transformers", "5.0")
    here = Path(__file__).parent
    made = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "out"), str(here), str(here.parent)], check=False
    )
    assert made.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out-") and len(list(left.glob("*.safetensors"))) == 2
    checkpoint.export(language_model("Llama"), tmp_path / "out")
    model = language_model("Llama")
    before = logits(model)
    with pytest.raises(KeyError, match="do the files belong to another model"):
        checkpoint.load(model, left)
    assert_bitwise_equal(logits(model), before)
    assert main(["verify", str(left), str(tmp_path / "out")]) == 1
    assert main(["verify", str(tmp_path / "out"), str(left)]) == 1
    said = capsys.readouterr().out
    assert "has no model." in said and "is in F8_E4M3 and has no" in said
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(left)


@pytest.mark.parametrize("there", (True, False), ids=("empty", "absent"))
def test_the_second_of_two_at_once_is_said(there, tmp_path):
    """The first one that ends has the directory, whole."""
    out = tmp_path / "out"
    if there:
        out.mkdir()
    said = pytest.raises(FileExistsError, match=r"out received files .*give each export a separate directory")
    with said, files.Folder(out, 1000) as second:
        second.add("second", torch.ones(3))
        checkpoint.export(mlp(FP8), out)
    assert "second" not in tensors_in(out) and [file.name for file in tmp_path.iterdir()] == ["out"]
    checkpoint.load(mlp(FP8), out)
