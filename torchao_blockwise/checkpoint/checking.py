"""Checksums of tensors, to compare what was sent or written with what arrived, without a second copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

# Bytes that are summed at a time. Their words, as int64, take twice as many.
_CHUNK = 1 << 24


@torch.no_grad()
def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return bytes + Σ word[i] · (2i + 1) mod 2^64 over the bytes of `x`, int64 [].

    word: int32, little-endian, in row-major order; the last one is padded with zeros.
    Runs on the device of `x` and does not synchronize. Changing one word always changes the checksum, and so does
    exchanging two different words, if `x` has at most 16 GiB. It detects accidental errors; it is not a cryptographic
    hash.
    """
    data = x.detach().reshape(-1).contiguous().view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK]
        # Padding copies. A view as int32 needs an offset that is a multiple of four bytes; a slice may have another.
        words = F.pad(chunk, (0, -chunk.numel() % 4)).view(torch.int32).long()
        first = start // 4
        odd = torch.arange(2 * first + 1, 2 * (first + len(words)) + 1, 2, device=words.device)
        total += (words * odd).sum()
    return total


def checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return {name: `checksum` as 16 hexadecimal digits} for an iterable of (name, tensor).

    Synchronizes with each device once, at the end. To verify a transfer, compare `checksums(quantized_weights(model))`
    with the checksums of the received tensors, however they were split for the transfer. If the model is sharded, all
    ranks must call it.
    """
    sums = {name: checksum(x) for name, x in tensors}
    device = next((total.device for total in sums.values()), None)
    together = torch.stack([total.to(device) for total in sums.values()]).tolist() if sums else []
    return {name: f"{total % (1 << 64):016x}" for name, total in zip(sums, together, strict=True)}
