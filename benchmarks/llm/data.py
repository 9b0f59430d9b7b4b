"""Text as bytes: reading it, holding some out, and drawing batches that depend on (seed, step) alone."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from llm.config import VOCABULARY, UsageError

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
        """Entropy of a byte in nats: the loss of a model that knows frequencies alone."""
        p = torch.bincount(self.train, minlength=VOCABULARY).double() / len(self.train)
        return -torch.special.xlogy(p, p).sum().item()

    def batch(self, seed: int, step: int, sequences: int) -> torch.Tensor:
        """Windows [sequences, seq_len + 1] int64 of the training text, the same for every call with these arguments."""
        # The CPU generator reads the low 32 bits of its seed: both numbers have to reach them.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.train) - self.seq_len, (sequences,), generator=generator)
        return self.train[starts[:, None] + torch.arange(self.seq_len + 1)].long()


def read_corpus(path: str | None, seq_len: int, held_out_sequences: int) -> Corpus:
    """The text at `path`, a file or a folder; None: the Python sources of this installation's standard library.

    Files are joined in sorted order up to `MAX_BYTES`; in a folder, hidden and binary (NUL bytes) files are left out.
    Raises UsageError for a path that does not exist, cannot be read, or holds too little text.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files, name = _files(root, ".py"), f"Python {'.'.join(map(str, os.sys.version_info[:2]))} standard library"
    else:
        root, name = Path(path), str(path)
        if not root.exists():
            raise UsageError(f"--data {path}: no such file or folder; give one that exists, or leave --data out")
        files = _files(root) if root.is_dir() else [root]
    pieces, size = [], 0
    for file in files:
        try:
            with file.open("rb") as opened:
                piece = opened.read(MAX_BYTES - size)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"--data: cannot read {file}: {reason}; fix its permissions or move it away") from None
        if root.is_dir() and b"\0" in piece[:_PROBE_BYTES]:
            continue
        pieces.append(piece)
        size += len(piece)
        if size == MAX_BYTES:
            break
    if size == 0:
        raise UsageError(f"{name}: no text found in {len(files)} file(s); give a file or folder with text")
    return Corpus.from_bytes(b"".join(pieces), name, seq_len, held_out_sequences)


def _files(root: Path, suffix: str = "") -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("site-packages", "dist-packages")]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(f for f in found if f.is_file())
