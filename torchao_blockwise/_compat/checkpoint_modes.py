"""The modes by which PyTorch's selective checkpointing sees operations; their names are not promised."""

from __future__ import annotations

from torch.utils import checkpoint

# In the first pass, and where backward computes again.
MODES: tuple[type, ...] = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode
