"""What ranks gather when a model is exported: how many bytes, in how many calls, and how much memory that takes."""

from __future__ import annotations

import copy

import torch
from export_tools import FEATURES, folder_of_all, mesh_of, tokens
from helpers import FP8, NVFP4, mlp, replace
from live_memory import peak_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint
from torchao_blockwise.checkpoint import gathering
from torchao_blockwise.testing import assert_bitwise_equal


class Gathers(TorchDispatchMode):
    """Counts the bytes that gathers give."""

    nbytes = calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops._c10d_functional.all_gather_into_tensor:
            self.nbytes += out.nbytes
        if func.overloadpacket is torch.ops.c10d._allgather_base_:
            self.nbytes += args[0].nbytes
        if func.overloadpacket is torch.ops.c10d.allgather_into_tensor_coalesced_:
            self.nbytes += sum(x.nbytes for x in args[0])
            self.calls += 1
        return out


def gathers_bytes(rank: int, size: int, masters: bool) -> None:
    """A byte an element of the weights, in high precision the biases alone; padded where rows split unevenly."""
    model = mlp(replace(FP8, master_weights=masters), features=FEATURES)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(tokens(4, FEATURES[0]))
    inner, hidden, outer = FEATURES
    with Gathers() as gathers:
        list(checkpoint.quantized_weights(model))
    least = hidden * (inner + outer) + 4 * (hidden + outer)
    assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def gathers_bytes_nvfp4(rank: int, size: int, masters: bool) -> None:
    """Half a byte an element of weights, padded where rows split unevenly."""
    inner, hidden, outer = 208, 304, 144
    model = mlp(replace(NVFP4, master_weights=masters), features=(inner, hidden, outer))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(tokens(4, inner))
    with Gathers() as gathers:
        list(checkpoint.quantized_weights(model, "nvfp4_compressed_tensors"))
    least = hidden * (inner + outer) // 2 + 4 * (hidden + outer)
    assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def gathers_together(rank: int, size: int, bucket_bytes: int, calls: int) -> None:
    """Weights that split evenly, in calls of so many bytes; one between them by itself. The bytes do not change."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        # Four weights of about 395 000 elements; the second one has an odd number of rows.
        features = ((256, 1536), (1536, 257), (257, 1536), (1536, 258))
        model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in features))
        quantize_(model, FP8)
        return model

    model, reference = made(), made()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(size))
    gathering._BUCKET_BYTES, kept = bucket_bytes or gathering._BUCKET_BYTES, gathering._BUCKET_BYTES
    try:
        with Gathers() as gathers:
            got = list(checkpoint.quantized_weights(model))
    finally:
        gathering._BUCKET_BYTES = kept
    assert gathers.calls == calls
    for (name, x), (other, whole) in zip(got, checkpoint.quantized_weights(reference), strict=True):
        assert name == other
        assert_bitwise_equal(x.detach().view(torch.uint8), whole.detach().view(torch.uint8), name)


def streams(rank: int, size: int, masters: bool) -> None:
    """What ranks hold beside their shards, while they write and read, is as much for many layers as for few."""
    width, config, peaks, folder = 384, replace(FP8, master_weights=masters), [], folder_of_all()
    gathering._BUCKET_BYTES, kept = width * width, gathering._BUCKET_BYTES
    try:
        for count in (3, 18):
            torch.manual_seed(0)
            # All alike: what reading takes depends on values, a little.
            alike = nn.Linear(width, width, bias=False)
            model = nn.Sequential(*(copy.deepcopy(alike) for _ in range(count)))
            quantize_(model, config)
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh_of(size))
            model(tokens(4, width))
            peaks.append(peak_of(checkpoint.export, model, folder / str(count), shard_bytes=width * width))
            if masters:
                peaks.append(peak_of(checkpoint.load, model, folder / str(count)))
    finally:
        gathering._BUCKET_BYTES = kept
    few, many = peaks[: len(peaks) // 2], peaks[len(peaks) // 2 :]
    # Numbers of each layer, scales and amaxes of its blocks, and one bucket, which a thread of gloo may hold a while.
    assert all(0 < b <= a + width * width + width * width // 10 for a, b in zip(few, many)), peaks
