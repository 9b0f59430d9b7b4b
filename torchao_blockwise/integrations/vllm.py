"""vLLM: the quantized weights of a model in training, as a source of its weight transfer.

    engine = Engine.trainer_init(init_info, client=client, source=weight_source(model))
    engine.send_weights()  # after a step, on all ranks

`Engine` is one of vLLM's trainer engines, of NCCL or IPC.

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
    """A `WeightSource` of vLLM's over `checkpoint.quantized_weights`: what trained, under the names of its files.

    Each pass gives the weights of that moment, whole, one by one; where ranks share the model all go through it in
    lockstep, and every rank has every weight. A tensor without dims is given one, as vLLM packs no other. The engine
    must have been started with a quantized checkpoint of the same format, as `checkpoint.export` writes it: vLLM then
    takes weights as it takes files, joins layers that it runs together, and lays them out again for its kernels.
    Raises ImportError without vLLM, or where it has no weight transfer; ValueError as `checkpoint.export`.
    """
    try:
        base = importlib.import_module(_BASE)
        source, described = base.WeightSource, base.ParamMeta
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"weight_source: needs a vLLM that has WeightSource in {_BASE}; install vllm, or hand "
            "checkpoint.quantized_weights(model) to your engine yourself"
        ) from error
    weights = quantized_weights(model, format)

    def metadata(self: Any) -> list[Any]:
        return [described(name, dtype, shape or (1,)) for name, (dtype, shape) in weights.metadata().items()]

    def tensors(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, x if x.dim() else x.reshape(1)) for name, x in _in_order(iter(weights)))

    return type("QuantizedSource", (source,), {"metadata": cached_property(metadata), "iter_full": tensors})()


def _in_order(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, each after all work for those before it, on whatever streams they are asked for.

    vLLM's packed transfer asks for them on several streams in turn, none of which waits for another. A weight's scales
    may be asked for on another stream than its payload, which they were computed with; and training's own stream may
    still compute the weights.
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
