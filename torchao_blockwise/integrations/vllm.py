"""vLLM: the quantized weights of a model in training, as a source of its weight transfer.

    engine = Engine.trainer_init(config, init_info, client=client, source=weight_source(model))
    engine.send_weights()  # after a step, on all ranks

`Engine` is one of vLLM's trainer engines, of NCCL or IPC.

Source of the interface: vLLM, distributed/weight_transfer/base.py (`WeightSource`, `ParamMeta`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchao_blockwise.checkpoint import quantized_weights

_BASE = "vllm.distributed.weight_transfer.base"


def weight_source(model: nn.Module, format: str = "fp8_block") -> Any:
    """A `WeightSource` of vLLM's over `checkpoint.quantized_weights`: what trained, under the names of its files.

    Each pass gives the weights of that moment, whole, one by one; where ranks share the model all go through it in
    lockstep. The engine must have been started with a quantized checkpoint of the same format, as `checkpoint.export`
    writes it.
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

    class QuantizedSource(source):  # type: ignore[misc, valid-type]  # known when it runs
        def metadata(self) -> list[Any]:
            return [described(name, dtype, shape) for name, (dtype, shape) in weights.metadata().items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(weights)

    return QuantizedSource()
