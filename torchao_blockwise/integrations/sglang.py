"""SGLang: the quantized weights of a model in training, sent to an engine in buckets.

Source of the interface: SGLang, srt/entrypoints/engine.py (`Engine.update_weights_from_tensor`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import quantized_weights

BUCKET_BYTES = 512 * 2**20


def update_weights(
    engine: Any, model: nn.Module, format: str = "fp8_block", *, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Send `checkpoint.quantized_weights` of `model` to an SGLang engine; returns the bytes of its tensors.

    engine: has `update_weights_from_tensor(named_tensors, load_format=None, flush_cache=True)`, as `sglang.Engine`
        does; None on ranks that have none. All ranks that share the model call this, and gather in lockstep.
    bucket_bytes: of a call, so of what is held beside the model; a larger tensor goes alone. The last call alone lets
        the engine drop what it has cached.
    Raises RuntimeError where the engine refuses a bucket: it then holds weights of two steps, until the next update.
    ValueError as `checkpoint.export`.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    held = sent = 0

    def send(last: bool) -> None:
        nonlocal bucket, held
        if engine is not None and bucket:
            answer = engine.update_weights_from_tensor(named_tensors=bucket, load_format=None, flush_cache=last)
            done, message = answer if isinstance(answer, tuple) else (True, "")
            if not done:
                raise RuntimeError(
                    f"update_weights: the engine refused {bucket[0][0]} and {len(bucket) - 1} others ({message}); its "
                    "weights are now of two steps, so send them again before it generates"
                )
        bucket, held = [], 0

    for name, tensor in quantized_weights(model, format):
        if bucket and held + tensor.nbytes > bucket_bytes:
            send(last=False)
        bucket.append((name, tensor.detach()))
        held, sent = held + tensor.nbytes, sent + tensor.nbytes
    send(last=True)
    return sent
