"""Checksums of tensors: what is sent, written or received is compared without a second copy of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

# Bytes at a time: their words take twice as many, in int64.
_CHUNK = 1 << 24


@torch.no_grad()
def checksum(x: torch.Tensor) -> torch.Tensor:
    """A number of the bytes of `x`: bytes + Σ word[i] · (2i + 1) mod 2^64, int64 [].

    It is made on the device of `x`, which is not waited for.
    word: int32, little-endian, in row-major order; the last one is filled up with zeros. A change of one word always
    changes it, and so do two words that change places. It finds errors, and nobody who means to deceive.
    """
    data = x.detach().reshape(-1).contiguous().view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK]
        chunk = F.pad(chunk, (0, -chunk.numel() % 4))
        # Words lie at multiples of four bytes, parts of tensors need not.
        chunk = chunk.clone() if chunk.storage_offset() % 4 else chunk
        words = chunk.view(torch.int32).long()
        first = start // 4
        odd = torch.arange(2 * first + 1, 2 * (first + len(words)) + 1, 2, device=words.device)
        total += (words * odd).sum()
    return total


def checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """{name: `checksum` as 16 hexadecimal digits} of (name, tensor), one by one.

    Devices are waited for once, at the end. Of `quantized_weights` it is what a receiver computes of what it got, in
    whatever pieces that came. Where ranks share the model all of them call it.
    """
    names, sums = [], []
    for name, x in tensors:
        names.append(name)
        sums.append(checksum(x))
    if not sums:
        return {}
    devices = {total.device for total in sums}
    together = torch.stack(sums) if len(devices) == 1 else torch.stack([total.cpu() for total in sums])
    return {name: f"{total % (1 << 64):016x}" for name, total in zip(names, together.tolist(), strict=True)}
