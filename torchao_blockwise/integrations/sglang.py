"""SGLang: the quantized weights of a model in training, sent in buckets to an engine on the GPUs of this host.

    update_weights(engine, model)

Source of the interface: SGLang 0.5.23, srt/entrypoints/EngineBase.py (`begin_weight_update`,
`update_weights_from_tensor`, `end_weight_update`) and http_server_engine.py; engines before it know no begin and end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import quantized_weights

__all__ = ["update_weights"]

BUCKET_BYTES = 512 * 2**20
_OF_TWO_STEPS = "its weights are now of two steps, so send them again before it generates"


def update_weights(
    engine: Any, model: nn.Module, format: str = "fp8_block", *, bucket_bytes: int = BUCKET_BYTES
) -> int:
    """Send `checkpoint.quantized_weights` of `model` to an SGLang engine; returns the bytes of its tensors.

    engine: has `update_weights_from_tensor(named_tensors, load_format=None, flush_cache=True)`, as `sglang.Engine` and
        its HTTP adapter do for tensors of this host's GPUs; None on ranks that have none. All ranks that share the
        model call this, and gather in lockstep. One that has `begin_weight_update` and `end_weight_update` is told by
        them: between the two it holds weights as files have them, and at the end it lays them out for its kernels.
    bucket_bytes: of a call, so of what is held beside the model; a larger tensor goes alone. The last call alone lets
        the engine drop what it has cached.
    Raises RuntimeError where the engine refuses or fails: it then holds weights of two steps, until the next update.
    That is raised when all is gathered, as other ranks gather too. ValueError as `checkpoint.export`.
    """
    weights = quantized_weights(model, format)
    bucket: list[tuple[str, torch.Tensor]] = []
    held = sent = 0
    has_begin, failed = hasattr(engine, "begin_weight_update"), None
    if has_begin:
        failed = _failed("begin_weight_update", "no weight was sent", engine.begin_weight_update)
    is_begun = has_begin and failed is None

    def send(last: bool) -> Exception | None:
        """Why the engine did not take the bucket; after a failure, or without an engine, it is not asked."""
        if engine is None or failed is not None:
            return failed
        options = {"named_tensors": bucket, "load_format": None, "flush_cache": last}
        what = f"{bucket[0][0]} and {len(bucket) - 1} others"
        return _failed(what, _OF_TWO_STEPS, engine.update_weights_from_tensor, options)

    for name, tensor in weights:
        if bucket and held + tensor.nbytes > bucket_bytes:
            failed = send(last=False)
            bucket, held = [], 0
        bucket.append((name, tensor.detach()))
        held, sent = held + tensor.nbytes, sent + tensor.nbytes
    failed = send(last=True)
    if is_begun:
        # Of a failed update as well: one that is open refuses the next.
        ended = _failed("end_weight_update", _OF_TWO_STEPS, engine.end_weight_update)
        failed = failed or ended
    if failed is not None:
        raise failed
    return sent


def _failed(what: str, now: str, call: Callable[..., Any], options: dict[str, Any] | None = None) -> Exception | None:
    """Why an engine did not do it, or None."""
    cause = None
    try:
        refusal = _refusal_in(call(**(options or {})))
    except Exception as error:
        refusal, cause = f"{type(error).__name__}: {error}", error
    if refusal is None:
        return None
    failed = RuntimeError(f"update_weights: the engine refused {what} ({refusal}); {now}")
    failed.__cause__ = cause
    return failed


def _refusal_in(answer: Any) -> str | None:
    """What an engine says against it, or None: `Engine` gives (done, message), its HTTP adapter a dict of these."""
    if isinstance(answer, dict):
        answer = answer.get("success", True), answer.get("message", "")
    done, message = answer if isinstance(answer, tuple) else (True, "")
    return None if done else str(message)
