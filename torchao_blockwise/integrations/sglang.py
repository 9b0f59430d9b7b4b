"""SGLang: the quantized weights of a model in training, sent in buckets to an engine on the GPUs of this host.

    update_weights(engine, model)

Source of the interface: SGLang 0.5.23, srt/entrypoints/EngineBase.py (`begin_weight_update`,
`update_weights_from_tensor`, `end_weight_update`) and http_server_engine.py; engines before it know no begin and end.
"""

from __future__ import annotations

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
        model call this, and gather in lockstep. Where it has `begin_weight_update` and `end_weight_update`, both are
        called: between the two it holds weights as files have them, and at the end it lays them out for its kernels.
    bucket_bytes: of a call, held in addition to the model; a larger tensor goes by itself. Only the last call
        lets the engine drop what it has cached.
    Raises RuntimeError where the engine refuses or fails: it then holds weights of two steps, until the next update.
    That is raised when all is gathered, as other ranks gather too. ValueError as `checkpoint.export`.
    """
    failures: list[Exception] = []

    def ask(method: str, what: str, now: str = _OF_TWO_STEPS, **options: Any) -> None:
        if not hasattr(engine, method):
            return
        try:
            answer = getattr(engine, method)(**options)
            # `Engine` gives (done, message), its HTTP adapter a dict of these.
            if isinstance(answer, dict):
                answer = answer.get("success", True), answer.get("message", "")
            done, message = answer if isinstance(answer, tuple) else (True, "")
            if not done:
                failures.append(RuntimeError(f"update_weights: the engine refused {what} ({message}); {now}"))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            failures.append(RuntimeError(f"update_weights: the engine refused {what} ({said}); {now}"))
            failures[-1].__cause__ = error

    def send(last: bool) -> None:
        if not failures:
            what = f"{bucket[0][0]} and {len(bucket) - 1} others"
            ask("update_weights_from_tensor", what, named_tensors=bucket, load_format=None, flush_cache=last)

    bucket: list[tuple[str, torch.Tensor]] = []
    held = sent = 0
    weights = quantized_weights(model, format)
    ask("begin_weight_update", "begin_weight_update", "no weight was sent")
    is_begun = not failures
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > bucket_bytes:
            send(last=False)
            bucket, held = [], 0
        bucket.append((name, tensor.detach()))
        held, sent = held + tensor.nbytes, sent + tensor.nbytes
    send(last=True)
    if is_begun:
        # Of a failed update as well: one that is open refuses the next.
        ask("end_weight_update", "end_weight_update")
    if failures:
        raise failures[0]
    return sent
