"""Drawing random bits for one backward pass of a layer: what was never drawn before, and the device keeps count."""

from __future__ import annotations

import torch

from torchao_blockwise import _compat
from torchao_blockwise.formats import Draws, Place
from torchao_blockwise.ops.backend import Backend, Implementation
from torchao_blockwise.ops.registry import Operation

_USE = 2


def draws_for(
    key: torch.Tensor | None, gradient: torch.Tensor, places: tuple[Place, Place] | None = None
) -> Draws | None:
    """Random bits for both copies of a `gradient`, by a key (seed, stream, use, first expert), whose `use` advances.

    key: int64 [4] on the gradient's device; None for no random bits, which are None then.
    places: of the rowwise and the columnwise copy in those of the whole; None for all of them.
    """
    if key is None:
        return None
    taken = take_key_op(key, gradient)
    return Draws(taken) if places is None else Draws(taken, *places)


def _take(key: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    taken = key.clone()
    with _compat.keeping_version(key):
        key.select(0, _USE).add_(1)
    return taken


# The schema does not say that `key` changes. Else no pass of a layer could run while another one's backward is to come:
# autograd refuses what was saved and changed. A compiler may do with it what it does with what reads a generator; it
# stays in the backward graph, as it takes the gradient. The count is no value that anything else reads.
take_key_op = Operation(
    "take_key(Tensor key, Tensor gradient) -> Tensor",
    table=[Implementation(Backend.AUTO, _take)],
    fake=lambda key, gradient: key.new_empty(key.shape),
)
