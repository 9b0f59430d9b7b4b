"""Quantized Parameters whose masters an optimizer has, whole or split over ranks (ZeRO-1 and ZeRO-2), or as FSDP2 does.

gradients.py    whole gradients of each rank ─ reduce-scatter ─▶ the mean of this rank's range
optimizer.py    gradients ─ the wrapped optimizer ─▶ masters of this rank's range
weights.py      masters ─ cast ─▶ payload entries ─ all-gather ─▶ whole payloads
groups.py       parameter groups, and what is refused of them; states.py: state dicts
"""

from torchao_blockwise.distributed.zero.optimizer import MasterWeightOptimizer

__all__ = ["MasterWeightOptimizer"]
