"""What a run is: presets, and the one flat configuration that decides its numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

VOCABULARY = 256  # a token is a byte


class UsageError(Exception):
    """A request that cannot be met; its text is the one line the user sees."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that the curves depend on, but for the data and the device.

    steps count optimizer updates; batch_size counts sequences a microbatch; lr is the peak of warmup and cosine.
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
    tied_head: bool = False
    compile: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self):
        for name in ("steps", "batch_size", "seq_len", "grad_accumulation", "held_out_sequences"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            most = self.steps - 1
            raise UsageError(f"warmup must be from 0 to steps - 1 = {most}, got {self.warmup}; lower --warmup")
        if not self.lr > 0:
            raise UsageError(f"lr must be above 0, got {self.lr}")

    @property
    def parameters(self) -> int:
        """Number of parameters of the decoder."""
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * block + self.dim + (1 if self.tied_head else 2) * VOCABULARY * self.dim

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer update sees."""
        return self.batch_size * self.grad_accumulation * self.seq_len


# Widths are multiples of 128, the FP8 block. `cpu`: all three recipes in about 3 minutes on two cores. The large ones
# have the layers of the models of that name; a byte vocabulary makes them smaller. They fit 16, 40 and 80 GB.
_LONG = {"steps": 1000, "warmup": 100, "grad_accumulation": 2}
_PRESETS = (
    RunConfig("tiny", 128, 2, 2, 256, steps=8, warmup=2, batch_size=2, seq_len=64, lr=2e-3, held_out_sequences=4),
    RunConfig("cpu", 256, 4, 4, 640, steps=128, warmup=25, batch_size=8, seq_len=128, lr=1.5e-3, held_out_sequences=64),
    RunConfig("125m", 768, 12, 12, 2048, **_LONG, batch_size=16, seq_len=1024, lr=1e-3, held_out_sequences=256),
    RunConfig("350m", 1024, 24, 16, 2816, **_LONG, batch_size=16, seq_len=1024, lr=6e-4, held_out_sequences=256),
    RunConfig("1b", 2048, 16, 16, 8192, **_LONG, batch_size=8, seq_len=2048, lr=3e-4, held_out_sequences=128),
)
PRESETS = {config.preset: config for config in _PRESETS}


def override(preset: str, **values) -> RunConfig:
    """The preset with every value that is not None replaced; a warmup left out shrinks with the steps."""
    base = PRESETS[preset]
    values = {name: value for name, value in values.items() if value is not None}
    if "warmup" not in values and "steps" in values:
        values["warmup"] = max(0, min(base.warmup, values["steps"] // 10))
    return replace(base, **values)


def difference(saved: dict, config: RunConfig) -> list[str]:
    """`field: saved -> now` for each field in which a saved configuration differs."""
    now = asdict(config)
    names = sorted(saved.keys() | now.keys())
    return [f"{n}: {saved.get(n)} -> {now.get(n)}" for n in names if saved.get(n) != now.get(n)]
