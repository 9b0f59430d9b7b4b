"""Collectives on quantized tensors: their payload and scales travel as bits, one collective for each inner tensor.

`distribute_tensor` sends a layer's shards from one rank to all, so that they begin alike.
"""

from __future__ import annotations

from typing import Any

import torch

from torchao_blockwise import _compat
from torchao_blockwise._compat.torch_types import Operation
from torchao_blockwise.tensors.quantized import QuantizedTensor, as_bits, implements


def _scatter(
    func: Operation, outputs: list[QuantizedTensor], inputs: list[list[QuantizedTensor]], *options: Any
) -> tuple[list[QuantizedTensor], torch.ScriptObject]:
    (output,) = outputs
    # Only the rank that sends has inputs.
    parts = [[as_bits(t) for t in x._tensors()] for x in (inputs[0] if inputs else ())]
    targets = [as_bits(t) for t in output._tensors()]
    works = []
    for i, target in enumerate(targets):
        works.append(func([target], [[part[i] for part in parts]] if inputs else [], *options)[1])
    return outputs, _last(works)


def _broadcast(
    func: Operation, tensors: list[QuantizedTensor], *options: Any
) -> tuple[list[QuantizedTensor], torch.ScriptObject]:
    (x,) = tensors
    return tensors, _last([func([as_bits(t)], *options)[1] for t in x._tensors()])


def _last(works: list[torch.ScriptObject]) -> torch.ScriptObject:
    """The last of several handles, once all others are through: a caller waits for one."""
    for work in works[:-1]:
        _compat.wait_for(work)
    return works[-1]


if torch.distributed.is_available():
    implements(torch.ops.c10d.scatter_.default)(_scatter)
    implements(torch.ops.c10d.broadcast_.default)(_broadcast)
