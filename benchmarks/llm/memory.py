"""Bytes: what a run will need, what the device has, and what one step keeps for backward."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from llm.config import VOCABULARY, RunConfig, UsageError

# fp32 value, gradient and two AdamW moments, and a bf16 or quantized copy.
_BYTES_PER_PARAMETER = 4 + 4 + 8 + 2
# Allocator slack and short-lived buffers.
_MARGIN = 1.25


def estimated_bytes(config: RunConfig) -> int:
    """Upper estimate of a run's peak: parameters, optimizer and the activations of one microbatch in bf16."""
    stream = 2 * config.dim
    # Two norms with their fp32 inner values, qkv, rotated q and k, attention; gate, up, silu and their product.
    layer = 36 * config.dim + 8 * config.hidden * (config.top_k + config.shared_experts if config.experts else 1)
    # Of each assignment to an expert its tokens, and what the expert gives.
    layer += 4 * config.dim * config.top_k
    if config.activation_checkpointing:
        layers = config.layers * stream + layer
    else:
        layers = config.layers * layer
    per_token = layers + 8 * stream + 14 * VOCABULARY
    activations = per_token * config.batch_size * config.seq_len
    return int(_MARGIN * (_BYTES_PER_PARAMETER * config.parameters + activations))


def available_bytes(device: torch.device) -> int:
    """Bytes free on a GPU, or available to new processes on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_memory(config: RunConfig, device: torch.device) -> None:
    """Raise UsageError where the run needs more memory than the device has."""
    need, have = estimated_bytes(config), available_bytes(device)
    if need > have:
        remedy = "lower --batch-size or --seq-len, add --activation-checkpointing, or take a smaller --preset"
        gib = f"needs about {need / 2**30:.1f} GiB, {have / 2**30:.1f} GiB are free"
        raise UsageError(f"{device}: this run {gib}; {remedy}")


@contextlib.contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Collect {storage address: bytes} of what autograd saves for backward inside the block, parameters left out."""
    held: dict[int, int] = {}
    keep = []  # A storage that is freed and allocated again would be counted once.
    own = {s.data_ptr() for t in (*model.parameters(), *model.buffers()) for s in _storages(t)}

    def pack(t: torch.Tensor) -> torch.Tensor:
        for storage in _storages(t.detach()):
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
                keep.append(storage)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield held


def _storages(t: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    """The storages of a tensor, or of the plain tensors inside a wrapper subclass."""
    if is_traceable_wrapper_subclass(t):
        for name in t.__tensor_flatten__()[0]:
            yield from _storages(getattr(t, name))
    else:
        yield t.untyped_storage()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the linear weights and the experts' as the GEMMs read them.

    2 an element for the copy that bf16 autocast makes; the quantized operand, scales included, where converted.
    """
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    weights += [p for p in model.parameters() if p.dim() == 3]
    return sum(_operand_bytes(w) for w in weights)


def _operand_bytes(weight: torch.Tensor) -> int:
    config = getattr(weight, "config", None)
    return 2 * weight.numel() if config is None else config.weight_format.nbytes(*weight.shape)
