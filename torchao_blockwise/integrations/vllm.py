"""vLLM: a source for its weight transfer that provides the quantized weights of a model in training.

    engine = Engine.trainer_init(init_info, client=client, source=weight_source(model))
    engine.send_weights()  # after a step, on all ranks

`Engine` is one of vLLM's trainer engines, for NCCL or IPC.

Source of the interface: vLLM 0.33, distributed/weight_transfer/base.py (`WeightSource`, `ParamMeta`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import quantized_weights

_BASE = "vllm.distributed.weight_transfer.base"


def weight_source(model: nn.Module, format: str = "fp8_block") -> Any:
    """Return a vLLM `WeightSource` over `checkpoint.quantized_weights`, with the names that files have.

    Each iteration yields the current weights one by one, unsharded. If the model is sharded, all ranks must iterate in
    lockstep, and every rank gets every weight. Tensors without dims are reshaped to one dim, since vLLM packs no
    others. The engine must have been started with a quantized checkpoint of the same format, as `checkpoint.export`
    writes it: vLLM then treats the weights as it treats files, fuses layers, and converts them to the layout of its
    kernels.
    Raises ImportError if vLLM is missing or has no weight transfer; ValueError like `checkpoint.export`.
    """
    try:
        base = importlib.import_module(_BASE)
        source, described = base.WeightSource, base.ParamMeta
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"weight_source needs a version of vLLM that has WeightSource in {_BASE}; install vllm, or pass "
            "checkpoint.quantized_weights(model) to your engine yourself"
        ) from error
    weights = quantized_weights(model, format)

    def metadata(self: Any) -> list[Any]:
        return [described(name, dtype, shape or (1,)) for name, (dtype, shape) in weights.metadata().items()]

    def tensors(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, x if x.dim() else x.reshape(1)) for name, x in _in_order(iter(weights)))

    return type("QuantizedSource", (source,), {"metadata": cached_property(metadata), "iter_full": tensors})()


def _in_order(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs; on each stream, a pair waits for all earlier work.

    vLLM's packed transfer requests them on several streams in turn, which do not wait for each other. A weight's scales
    may be requested on another stream than its payload, with which they were computed; and the stream of training may
    still be computing the weights.
    """
    before: Any = torch.cuda.default_stream() if torch.cuda.is_available() else None
    while True:
        if before is not None and (now := torch.cuda.current_stream()) != before:
            now.wait_stream(before)
            before = now
        pair = next(pairs, None)
        if pair is None:
            return
        yield pair
