"""The smallest models, and some text, for tests of train_llm.py."""

from dataclasses import replace

import pytest
import torch
from llm_training.config import PRESETS

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]
# The smallest mixture of experts that all of this runs on.
MOE = replace(TINY, experts=4, top_k=2, shared_experts=1, hidden=128, balance_rate=0.05)
MODELS = pytest.mark.parametrize("config", (TINY, MOE), ids=("dense", "moe"))
TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(400)).encode()
