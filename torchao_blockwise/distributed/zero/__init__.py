"""Quantized Parameters whose masters an optimizer has, whole or split over ranks (ZeRO-1 and ZeRO-2), or as FSDP2 does.

optimizer.py    gradients ─ the wrapped optimizer ─▶ masters of this rank's range
weights.py      what ranks exchange: masters ─ cast, all-gather ─▶ payloads; gradients ─ reduce-scatter ─▶ means
groups.py       parameter groups, what is refused of them, and state dicts
"""

from torchao_blockwise.distributed.zero.optimizer import MasterWeightOptimizer

__all__ = ["MasterWeightOptimizer"]
