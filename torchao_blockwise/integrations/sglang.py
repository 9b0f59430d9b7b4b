"""SGLang: send the quantized weights of a model in training, in buckets, to an engine on the GPUs of this host.

    update_weights(engine, model)

Source of the interface: SGLang 0.5.23, srt/entrypoints/EngineBase.py (`begin_weight_update`,
`update_weights_from_tensor`, `end_weight_update`) and http_server_engine.py. Older engines have no begin and end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import quantized_weights

__all__ = ["update_weights"]

BUCKET_BYTES = 512 * 2**20
_MIXED_STEPS = "its weights are now a mix of two steps, so send them again before it generates"


def update_weights(
    engine: Any, model: nn.Module, format: str = "fp8_block", *, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Send `checkpoint.quantized_weights` of `model` to an SGLang engine, and return the number of bytes sent.

    engine: has `update_weights_from_tensor(named_tensors, load_format=None, flush_cache=True)`, as `sglang.Engine` and
        its HTTP adapter do for tensors on this host's GPUs; None on ranks without an engine. If the model is sharded,
        all ranks must call this function, and they gather in lockstep. If the engine has `begin_weight_update` and
        `end_weight_update`, both are called: between them it holds weights as files do, and at the end it converts them
        to the layout of its kernels.
    bucket_bytes: the size of one call, held in addition to the model; a larger tensor is sent by itself. Only the
        last call lets the engine flush its cache.
    Raises RuntimeError if the engine rejects an update or fails, but only after all weights were gathered, so that
    other ranks do not hang; the engine then has weights of two steps until the next update. Raises ValueError like
    `checkpoint.export`.
    """
    failures: list[Exception] = []

    def call(method: str, what: str, now: str = _MIXED_STEPS, **options: Any) -> None:
        if not hasattr(engine, method):
            return
        cause = None
        try:
            answer = getattr(engine, method)(**options)
            # `Engine` returns (success, message), its HTTP adapter a dict.
            if isinstance(answer, dict):
                answer = answer.get("success", True), answer.get("message", "")
            done, message = answer if isinstance(answer, tuple) else (True, "")
        except Exception as error:
            done, message, cause = False, f"{type(error).__name__}: {error}", error
        if not done:
            failures.append(RuntimeError(f"update_weights: the engine refused {what} ({message}); {now}"))
            failures[-1].__cause__ = cause

    def send(last: bool) -> None:
        if not failures:
            what = f"{bucket[0][0]} and {len(bucket) - 1} others"
            call("update_weights_from_tensor", what, named_tensors=bucket, load_format=None, flush_cache=last)

    bucket: list[tuple[str, torch.Tensor]] = []
    held = sent = 0
    weights = quantized_weights(model, format)
    call("begin_weight_update", "begin_weight_update", "no weight was sent")
    is_begun = not failures
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > bucket_bytes:
            send(last=False)
            bucket, held = [], 0
        bucket.append((name, tensor.detach()))
        held, sent = held + tensor.nbytes, sent + tensor.nbytes
    send(last=True)
    if is_begun:
        # Also after a failure, since an update that is not ended blocks the next one.
        call("end_weight_update", "end_weight_update")
    if failures:
        raise failures[0]
    return sent
