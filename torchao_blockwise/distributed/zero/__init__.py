"""An optimizer with the master weights of quantized Parameters, whole, split by ZeRO-1 or ZeRO-2, or split by FSDP2.

optimizer.py    gradients ─ the wrapped optimizer ─▶ masters of this rank's range
weights.py      collectives: masters ─ cast, all-gather ─▶ payloads; gradients ─ reduce-scatter ─▶ means
groups.py       checks of parameter groups, and state dicts
"""

from torchao_blockwise.distributed.zero.optimizer import MasterWeightOptimizer

__all__ = ["MasterWeightOptimizer"]
