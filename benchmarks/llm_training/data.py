"""Text as bytes: reading it, holding some out, and drawing batches that depend only on (seed, step)."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_training.config import VOCABULARY, UsageError

# 16,384 steps of 16,384 tokens before text is repeated.
MAX_BYTES = 256 * 2**20
_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Corpus:
    """Training text, and windows of it that training never sees.

    train: [bytes] uint8. held_out: [H, seq_len + 1] uint8, evenly spaced over the text and cut out of `train`.
    """

    name: str
    digest: str
    seq_len: int
    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def from_bytes(cls, data: bytes, name: str, seq_len: int, held_out_sequences: int) -> Corpus:
        """Cut `held_out_sequences` windows, fewer where they would exceed a tenth of the text, out of `data`.

        Raises UsageError for text shorter than two windows: one to train on, one to hold out.
        """
        window = seq_len + 1
        if len(data) < 2 * window:
            need = f"at least {2 * window:,} bytes (two sequences of {seq_len} + 1)"
            raise UsageError(f"{name}: need {need}, got {len(data):,}; give more text or a smaller --seq-len")
        count = max(1, min(held_out_sequences, len(data) // (10 * window)))
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        # The last window of each of `count` equal stretches.
        ends = torch.tensor([len(data) * (i + 1) // count for i in range(count)])
        where = ends[:, None] - window + torch.arange(window)
        keep = torch.ones(len(data), dtype=torch.bool)
        keep[where.flatten()] = False
        digest = hashlib.sha256(data).hexdigest()[:16]
        return cls(name, digest, seq_len, text[keep], text[where])

    @property
    def unigram_entropy(self) -> float:
        """Entropy of a byte in nats: the loss of a model that knows only frequencies."""
        p = torch.bincount(self.train, minlength=VOCABULARY).double() / len(self.train)
        return -torch.special.xlogy(p, p).sum().item()

    def batch(self, seed: int, step: int, sequences: int) -> torch.Tensor:
        """Windows [sequences, seq_len + 1] int64 of the training text, the same for every call with these arguments.

        Windows lie side by side and come in random order; none comes again before all have come.
        """
        windows = (len(self.train) - 1) // self.seq_len
        first, last = step * sequences, (step + 1) * sequences - 1
        passes = range(first // windows, last // windows + 1)
        order = torch.cat([_order(windows, seed, i) for i in passes])
        starts = order[first - passes[0] * windows :][:sequences] * self.seq_len
        return self.train[starts[:, None] + torch.arange(self.seq_len + 1)].long()


@functools.lru_cache(maxsize=2)
def _order(windows: int, seed: int, number: int) -> torch.Tensor:
    """The random order of a pass over the text."""
    # The CPU generator reads the low 32 bits of its seed: both numbers have to reach them.
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed * 1_000_003 + number))


def read_corpus(path: str | None, seq_len: int, held_out_sequences: int, *, site_packages: bool = False) -> Corpus:
    """The text at `path`, a file or a folder; None: Python's standard library, optionally with site-packages.

    Files are joined in sorted order up to `MAX_BYTES`. Of a folder, hidden and binary (NUL bytes) files and copies are
    left out.
    Raises UsageError for a path that does not exist or holds too little text.
    """
    if path is None:
        name = f"Python {'.'.join(platform.python_version_tuple()[:2])} standard library"
        name += " and site-packages" * site_packages
        kinds = ("stdlib", "purelib", "platlib") if site_packages else ("stdlib",)
        # Pure Python packages and others lie in one folder as a rule.
        roots = dict.fromkeys(Path(sysconfig.get_paths()[kind]) for kind in kinds)
        files = [file for root in roots for file in _files(root, ".py")]
    elif Path(path).exists():
        name, files = path, _files(Path(path)) if Path(path).is_dir() else [Path(path)]
    else:
        raise UsageError(f"--data {path}: no such file or folder; give one that exists, or leave --data out")
    text, seen = bytearray(), set()
    for file in files:
        with file.open("rb") as opened:
            piece = opened.read(MAX_BYTES)
        digest = hashlib.sha256(piece).digest()
        if digest not in seen and (path is None or len(files) == 1 or b"\0" not in piece[:_PROBE_BYTES]):
            seen.add(digest)
            text += piece[: MAX_BYTES - len(text)]
        if len(text) == MAX_BYTES:
            break
    return Corpus.from_bytes(bytes(text), name, seq_len, held_out_sequences)


def _files(root: Path, suffix: str = "") -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("site-packages", "dist-packages")]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(f for f in found if f.is_file())
