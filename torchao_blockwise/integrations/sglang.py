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
    weights, update = quantized_weights(model, format), _Update(engine)
    bucket: list[tuple[str, torch.Tensor]] = []
    held = sent = 0
    update.begin()
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > bucket_bytes:
            update.send(bucket, last=False)
            bucket, held = [], 0
        bucket.append((name, tensor.detach()))
        held, sent = held + tensor.nbytes, sent + tensor.nbytes
    update.send(bucket, last=True)
    update.end()
    return sent


class _Update:
    """One update of an engine, or of none; after a failure it is asked no more but to end what was begun."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.is_begun = False
        self.failed: Exception | None = None

    def begin(self) -> None:
        if hasattr(self.engine, "begin_weight_update"):
            self.failed = _failed("begin_weight_update", "no weight was sent", self.engine.begin_weight_update)
            self.is_begun = self.failed is None

    def send(self, bucket: list[tuple[str, torch.Tensor]], *, last: bool) -> None:
        if self.engine is not None and self.failed is None:
            options = {"named_tensors": bucket, "load_format": None, "flush_cache": last}
            what = f"{bucket[0][0]} and {len(bucket) - 1} others"
            self.failed = _failed(what, _OF_TWO_STEPS, self.engine.update_weights_from_tensor, options)

    def end(self) -> None:
        """Of a failed one as well: one that is open refuses the next."""
        if self.is_begun:
            ended = _failed("end_weight_update", _OF_TWO_STEPS, self.engine.end_weight_update)
            self.failed = self.failed or ended
        if self.failed is not None:
            raise self.failed


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
