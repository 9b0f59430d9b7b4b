"""Folders of safetensors files, written atomically and read tensor by tensor."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchao_blockwise._names import shown

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The file that identifies a run which may be resumed, and the name of a file while it is being written.
_PLAN, _PART = "plan.json", "part"
_SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")
# A key of config.json.
SETTINGS = "quantization_config"
# Open files are mapped, so everything that was read from them stays in memory.
_OPEN_FILES = 4
# The files of a tokenizer.
_COPIED = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*", "added_tokens.json")


def safetensors() -> Any:
    """Import and return `safetensors`, an optional package."""
    try:
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError("checkpoint needs safetensors; pip install safetensors") from error


def inside(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`; raise ValueError if it is not a file or lies outside the folder.

    Hugging Face's cache links files in `snapshots/<revision>` to `blobs`, so `blobs` counts as part of the folder.
    """
    home, path = folder.resolve(), (folder / name).resolve()
    blobs = (place.parent / "blobs" for place in home.parents if place.name == "snapshots")
    if not any(path.is_relative_to(place) for place in (home, *blobs)):
        raise ValueError(f"{folder / name} points outside the folder, to {path}; copy that file into the folder")
    if not path.is_file():
        raise ValueError(f"{folder / name} is missing or not a file; copy it again")
    return path


class Folder(AbstractContextManager["Folder"]):
    """A folder that is written atomically: files go to a temporary folder next to it, which is renamed at the end.

    resume: JSON-able data that determines everything that is written. With it, an interrupted run keeps its finished
        files in a temporary folder with a fixed name. A later run with equal data continues there, and does not `add`
        the tensors in `done` again. Without it an interrupted run removes the temporary folder; a killed process leaves
        it behind, as a hidden folder.
    done: {tensor: number of its finished file}. nbytes: the bytes of all tensors so far.
    Raises FileExistsError if the folder exists and is not empty, ValueError if it cannot be replaced, OSError if it
    cannot be written, also for errors of the file system inside the `with` statement.
    """

    def __init__(self, directory: str | os.PathLike[str], shard_bytes: int, resume: object = None) -> None:
        # A symbolic link stays; the folder that it points to is replaced.
        self.final, self.shard_bytes = Path(directory).resolve(), shard_bytes
        if self.final.exists() and not self.final.is_dir():
            raise FileExistsError(f"export: {self.final} is a file; give a directory, or remove it")
        if self.final.exists() and any(self.final.iterdir()):
            raise FileExistsError(f"export: {self.final} exists and is not empty; give another directory, or remove it")
        is_here = self.final == Path.cwd()
        if is_here or self.final.is_mount():
            raise ValueError(
                f"export: {self.final} is {'the working directory' if is_here else 'a mount point'}, which cannot be "
                f"replaced by a finished folder; give a folder inside it, such as {self.final / 'model'}"
            )
        self._pending: dict[str, torch.Tensor] = {}
        self.nbytes = self._pending_bytes = self._count = 0
        self.done: dict[str, int] = {}
        self._resumes = resume is not None
        # `tempfile` would make a folder that only its owner may read.
        self.path = self.final.parent / f".{self.final.name}-{'unfinished' if self._resumes else secrets.token_hex(4)}"
        with self._writing():
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if self._resumes:
                self._take_up(json.loads(json.dumps(resume)))
            else:
                self.path.mkdir()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context that turns errors of the file system into an OSError with the folder, the bytes and the fix."""
        try:
            yield
        except (OSError, safetensors().SafetensorError) as error:
            free = shutil.disk_usage(next(place for place in self.final.parents if place.exists())).free
            after = "run the same command again to continue" if self._resumes else "the temporary folder was removed"
            raise OSError(
                f"export: {self.final} cannot be written ({error}). It is written to a temporary folder in "
                f"{self.final.parent}, where {free:,} bytes are free; {self.nbytes:,} bytes were to be written so far "
                f"({after}); give a directory that can be written, or free some space"
            ) from error

    def _take_up(self, plan: object) -> None:
        """Continue with the files of an earlier run if it had the same plan, else start again."""
        written = self.path / _PLAN
        if not written.exists() or json.loads(written.read_text()) != plan:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
            self.write_json(_PLAN, plan)
        (self.path / _PART).unlink(missing_ok=True)
        while (file := self._shard(self._count)).exists():
            with safetensors().safe_open(str(file), framework="pt") as opened:
                self.done |= dict.fromkeys(opened.keys(), self._count)
                self.nbytes += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
            self._count += 1

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        try:
            with self._writing():
                if raised is not None:
                    raise raised
                self._finish()
                # An empty folder is replaced.
                os.replace(self.path, self.final)
        except OSError as error:
            if self.final.is_dir() and any(self.final.iterdir()):
                raise FileExistsError(
                    f"export: {self.final} received files while this export ran, perhaps from another export, and was "
                    "not replaced; give each export a separate directory"
                ) from error
            raise
        finally:
            if not self._resumes:
                shutil.rmtree(self.path, ignore_errors=True)

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add a tensor; once `shard_bytes` of them are pending, a file is written."""
        # A copy, because `x` may be a view of memory that changes later.
        self._pending[name] = x.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += x.nbytes
        self.nbytes += x.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self._flush()

    def write_json(self, name: str, content: object) -> None:
        (self.path / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def copy_tokenizer(self, source: Path) -> None:
        """Copy the tokenizer's files from folder `source`, except symbolic links that lead out of it."""
        for file in (file for pattern in _COPIED for file in sorted(source.glob(pattern))):
            try:
                shutil.copyfile(inside(source, file.name), self.path / file.name)
            # A RuntimeError is a link to itself.
            except (RuntimeError, ValueError) as reason:
                warnings.warn(f"export: the tokenizer's {reason}; it is left out", stacklevel=2)

    def _flush(self) -> None:
        if not self._pending:
            return
        part = self.path / _PART
        importlib.import_module("safetensors.torch").save_file(self._pending, str(part), metadata={"format": "pt"})
        # safetensors makes the file readable by its owner only; the engine may run as another user.
        part.chmod(self.path.stat().st_mode & 0o666)
        part.rename(self._shard(self._count))
        self.done |= dict.fromkeys(self._pending, self._count)
        self._count += 1
        self._pending, self._pending_bytes = {}, 0

    def _shard(self, number: int) -> Path:
        """The name of a finished file until the number of files is known."""
        return self.path / f"shard-{number}.safetensors"

    def _finish(self) -> None:
        self._flush()
        files = [f"model-{number + 1:05}-of-{self._count:05}.safetensors" for number in range(self._count)]
        if self._count == 1:
            files = [_SINGLE]
        else:
            where = {name: files[number] for name, number in self.done.items()}
            self.write_json(INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": where})
        (self.path / _PLAN).unlink(missing_ok=True)
        for number, file in enumerate(files):
            self._shard(number).rename(self.path / file)


class Stored(NamedTuple):
    """A tensor in a file. dtype: as files spell it, for example "F8_E4M3" or "BF16"."""

    file: str
    dtype: str
    shape: list[int]


class Files:
    """The tensors in a folder of safetensors files, by name. Only a few files are open at a time.

    Tensors are those that the index lists. Without an index they are those of `model.safetensors`, else of
    `model-*-of-*`, else of all files. A warning names the files and tensors that are ignored.
    Raises FileNotFoundError for a folder without safetensors files, ValueError for files that cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        # Not a cache of a method, so that files are closed with the last reference to this object.
        self._opened = functools.lru_cache(_OPEN_FILES)(functools.partial(_opened, self.path))
        self.tensors: dict[str, Stored] = {}
        on_disk = sorted(file.name for file in self.path.glob("*.safetensors"))
        listed = _weight_map(self.path)
        self.files = _without_index(self.path, on_disk) if listed is None else sorted(set(listed.values()))
        if not self.files:
            raise FileNotFoundError(f"load: {self.path} has no *.safetensors; give the folder of a checkpoint")
        strays = [file for file in on_disk if file not in self.files]
        for file in self.files:
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118  # it is not a dict
                if listed is not None and listed.get(name) != file:
                    strays += [name] * (name not in listed)
                elif name in self.tensors:
                    raise ValueError(
                        f"load: {self.where(name)} is also in {file}, so the folder contains two checkpoints; remove "
                        "one of them"
                    )
                else:
                    part = opened.get_slice(name)
                    self.tensors[name] = Stored(file, str(part.get_dtype()), list(part.get_shape()))
        for name, file in (listed or {}).items():
            if name not in self.tensors:
                raise ValueError(f"load: {self.path / INDEX} lists {name} in {file}, which lacks it; copy both again")
        if strays:
            why = f"{INDEX} does not list them" if listed is not None else f"the checkpoint is {shown(self.files)}"
            warnings.warn(f"load: {self.path}: ignored {shown(strays)}, because {why}", stacklevel=2)

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._opened(self.tensors[name].file).get_tensor(name)
        except Exception as error:
            raise ValueError(f"load: {self.where(name)} cannot be read ({error}); copy the file again") from error
        return tensor

    def where(self, name: str) -> str:
        """Return "NAME in FILE", for messages."""
        return f"{name} in {self.path / self.tensors[name].file}"


def config_and_settings(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json of the folder without quantization settings, and these settings; empty if there are none.

    The settings are those of the model or of its language model.
    """
    file = folder / "config.json"
    content = _object_in(file) if file.exists() else {}
    parts = [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
    settings: Any = next(filter(None, [part.pop(SETTINGS, None) for part in parts]), {})
    if not isinstance(settings, dict):
        raise ValueError(f"load: {SETTINGS} of {file} is a {type(settings).__name__}; copy it again")
    return content, settings


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Return {tensor: file} from the index, or None without one."""
    if not (index := folder / INDEX).exists():
        return None
    listed = _object_in(index).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else [None]
    if not all(isinstance(file, str) and file.endswith(".safetensors") for file in names):
        raise ValueError(
            f"load: {index} has no weight_map from tensors to *.safetensors, the files that are supported; "
            "copy it again, or use a checkpoint in safetensors"
        )
    return listed


def _without_index(folder: Path, names: list[str]) -> list[str]:
    """Return the files of a checkpoint without an index: those with the usual names, or all if there are none."""
    shards = {name: int(match[1]) for name in names if (match := _SHARD.fullmatch(name))}
    counts = set(shards.values())
    if _SINGLE not in names and counts and counts != {len(shards)}:
        raise ValueError(
            f"load: {folder} has no {INDEX}, and {len(shards)} files model-*-of-*.safetensors, but their names say "
            f"{' and '.join(map(str, sorted(counts)))}; copy the index and the missing files, or remove the extra ones"
        )
    return [_SINGLE] if _SINGLE in names else list(shards) or names


def _opened(folder: Path, file: str) -> Any:
    try:
        # `safe_open` checks sizes and offsets against the size of the file, and maps the file.
        return safetensors().safe_open(str(inside(folder, file)), framework="pt")
    except Exception as error:
        raise ValueError(f"load: {folder / file} cannot be read ({error}); copy it again") from error


def _object_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError for other content."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load: {file} is not valid JSON ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"load: {file} contains a {type(content).__name__}, not an object; copy it again")
    return content
