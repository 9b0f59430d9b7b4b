"""FSDP2 gathers weights quantized: what runs where, in the order in which a shard goes through it.

hooks.py             where FSDP2 is wrapped: `fully_shard` of quantized Parameters, and where a pass begins
root.py              what a pass begins with: the weights below one root, agreed upon once, cast together
masters.py           a master weight: its part for the cast, and what it sends after it
quantized.py         a Parameter that is quantized itself: its rows, and their cast after a load
tensors/fsdp.py      the gather: FSDP2 asks the shards themselves for what they send, and for the whole weight
"""

from torchao_blockwise.distributed.fsdp.hooks import sync_weight_scales

__all__ = ["sync_weight_scales"]
