"""Where FSDP2 calls this package, and `sync_weight_scales`, which programs call.

When? A rank cannot see that another's values changed, and a collective that only some ranks enter hangs them all. So no
rank decides by what it sees: shards are quantized where each forward pass of a root begins, and where `unshard()` is
called by hand. It is left out in backward, and inside `weights_unchanged` after the first time, which the program, the
same on all ranks, says. What an earlier pass left gathered is let go of, and gathered anew.
"""

from __future__ import annotations

import torch
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.distributed.fsdp.quantized import shard_of
from torchao_blockwise.distributed.fsdp.root import root_of
from torchao_blockwise.tensors import QuantizedTensor


def sync_weight_scales(model: nn.Module) -> None:
    """Make the scales and the payload of all sharded master weights of `model` match their values; a collective.

    One MAX all-reduce of int32 amaxes, 4 bytes a block, for all weights of a shard group together. It runs by itself
    where a forward pass or `unshard()` begins; call it, on all ranks, where values were changed by hand between the
    forward pass and the gathers of its backward pass, and once where no model was converted in this process: weights
    made by hand. A model without FSDP2 has nothing to do.
    Raises ValueError if ranks differ in their weights, configs or dtypes, RuntimeError if a rank does not come, naming
    the rank and the weight.
    """
    torch_fsdp.install()
    found = dict.fromkeys(map(torch_fsdp.state_of, model.modules()))
    states = [state for state in found if state is not None]
    # Before the first forward pass no state knows its root: those go together.
    fresh = tuple(state for state in states if torch_fsdp.scope_of(state) is None)
    scopes = [torch_fsdp.scope_of(state) or (fresh[0], fresh) for state in states]
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for owner, below in dict.fromkeys(scopes):
        root_of(owner, below, names).sync()


def _before_gathers(state: torch_fsdp.State) -> None:
    if not _compat.in_backward():
        root_of(*(torch_fsdp.scope_of(state) or (state, (state,)))).begin_pass()


torch_fsdp.at_install(torch_fsdp.shard_parameters, QuantizedTensor, shard_of)
torch_fsdp.at_install(torch_fsdp.watch, _before_gathers)
