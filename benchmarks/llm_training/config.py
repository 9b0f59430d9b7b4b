"""Configuration of a run: presets, and the one flat configuration that decides its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

VOCABULARY = 256  # a token is a byte


class UsageError(Exception):
    """A request that cannot be met; its text is the one line the user sees."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that the curves depend on, except the data and the device.

    steps count optimizer updates; batch_size counts sequences a microbatch; lr is the peak of warmup and cosine.
    experts: how many MLPs of width `hidden` a layer has, of which a token takes top_k; 0 for a dense model.
    shared_experts: how many more every token takes. balance_rate: by how much a step favors an expert with few tokens.
    separate: whether q, k and v, and gate and up, are separate layers, as in transformers, and not one.
    products: what a CPU computes bf16 GEMMs in, "fp32" where it is slow in bf16; see `llm_training.products`.
    bf16_steps: how many of the steps, the first ones, are in bf16, the same for all recipes.
    cuda_graph: whether a step is launched from a CUDA graph; the curves do not depend on it.
    Raises UsageError for values that cannot train.
    """

    preset: str
    dim: int
    layers: int
    heads: int
    hidden: int
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    warmup: int
    held_out_sequences: int
    grad_accumulation: int = 1
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 0
    separate: bool = False
    compile: bool = False
    activation_checkpointing: bool = False
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    balance_rate: float = 0.01
    products: str = "bf16"
    bf16_steps: int = 0
    cuda_graph: bool = False
    # As many heads of keys and values as of queries.
    kv_heads: ClassVar[int] = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "seq_len", "grad_accumulation", "held_out_sequences"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "bf16_steps"):
            if not 0 <= getattr(self, name) < self.steps:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{name} must be from 0 to steps - 1 = {self.steps - 1}, got {getattr(self, name)}; lower {option}"
                )
        if not 0 < self.lr < float("inf"):
            raise UsageError(f"lr must be above 0, got {self.lr}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top_k must be from 1 to experts = {self.experts}, got {self.top_k}")

    @property
    def parameters(self) -> int:
        """Number of parameters of the decoder."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Number of those that take part in a token: of the experts top_k and the shared ones."""
        return self._parameters(self.top_k)

    def _parameters(self, experts: int) -> int:
        mlps = experts + self.shared_experts if self.experts else 1
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden * mlps + self.dim * self.experts + 2 * self.dim
        return self.layers * block + self.dim + 2 * VOCABULARY * self.dim

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer update sees."""
        return self.batch_size * self.grad_accumulation * self.seq_len


# Widths are multiples of 128, the FP8 block. `cpu`: all three recipes in 2 to 4 minutes on two cores. The large ones
# have the layers of the models of that name; a byte vocabulary makes them smaller. They fit 16, 40 and 80 GB.
# `6m` to `50m` are those of studies, sizes at which runs are cheap.
# `moe-*` are mixtures of experts: `moe-tiny` for two cores and a few minutes, the others for 24 and 80 GB.
_LONG = {"steps": 1000, "warmup": 100, "grad_accumulation": 2}
_STUDY = {"steps": 16000, "warmup": 400, "batch_size": 16, "seq_len": 1024, "held_out_sequences": 256}
_CPU = {"steps": 80, "warmup": 16, "batch_size": 8, "seq_len": 128, "lr": 1.5e-3, "held_out_sequences": 64}
_PRESETS = (
    RunConfig("tiny", 128, 2, 2, 256, steps=8, warmup=2, batch_size=2, seq_len=64, lr=2e-3, held_out_sequences=4),
    RunConfig("cpu", 256, 4, 4, 640, **_CPU),
    RunConfig("6m", 256, 7, 4, 768, **_STUDY, lr=2e-3),
    RunConfig("12m", 384, 7, 6, 1024, **_STUDY, lr=1.8e-3),
    RunConfig("25m", 512, 8, 8, 1408, **_STUDY, lr=1.5e-3),
    RunConfig("50m", 640, 10, 10, 1792, **_STUDY, lr=1.2e-3),
    RunConfig("125m", 768, 12, 12, 2048, **_LONG, batch_size=16, seq_len=1024, lr=1e-3, held_out_sequences=256),
    RunConfig("350m", 1024, 24, 16, 2816, **_LONG, batch_size=16, seq_len=1024, lr=6e-4, held_out_sequences=256),
    RunConfig("1b", 2048, 16, 16, 8192, **_LONG, batch_size=8, seq_len=2048, lr=3e-4, held_out_sequences=128),
    RunConfig("moe-tiny", 256, 3, 4, 256, **_CPU, experts=8, top_k=2, shared_experts=1, balance_rate=0.05),
    RunConfig(
        "moe-400m", 768, 12, 12, 768, **_LONG, batch_size=16, seq_len=1024, lr=8e-4, held_out_sequences=256,
        experts=16, top_k=2, shared_experts=1,
    ),
    RunConfig(
        "moe-2b", 1024, 16, 16, 1024, **_LONG, batch_size=8, seq_len=2048, lr=4e-4, held_out_sequences=128,
        experts=32, top_k=4, shared_experts=1,
    ),
)  # fmt: skip
PRESETS = {config.preset: config for config in _PRESETS}


def override(preset: str, **values) -> RunConfig:
    """The preset with every value that is not None replaced; a warmup left out shrinks with the steps."""
    base = PRESETS[preset]
    values = {name: value for name, value in values.items() if value is not None}
    if "warmup" not in values and "steps" in values:
        values["warmup"] = max(0, min(base.warmup, values["steps"] // 10))
    return replace(base, **values)


def difference(saved: dict, now: dict) -> list[str]:
    """`field: saved -> now` for each field that changes the curves and in which a saved configuration differs."""
    names = sorted((saved.keys() | now.keys()) - {"cuda_graph"})
    return [f"{n}: {saved.get(n)} -> {now.get(n)}" for n in names if saved.get(n) != now.get(n)]
