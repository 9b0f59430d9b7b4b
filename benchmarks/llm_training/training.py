"""Training one recipe: the loop, the held-out loss and what it cost."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common.peers import compile_options
from common.timing import on_side_stream
from torch import nn

from llm_training import checkpoint, products
from llm_training.config import RunConfig, UsageError
from llm_training.data import Corpus
from llm_training.model import Decoder, byte_loss, next_byte_loss
from llm_training.recipes import RECIPES, convert, perturb
from torchao_blockwise import weights_unchanged
from torchao_blockwise.diagnostics import memory_report
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import QuantizedTensor

BETAS = (0.9, 0.95)
FINAL_LR = 0.1  # of the peak
# Reading a loss waits for the GPU; on a CPU it costs nothing.
_STEPS_A_READ = {"cuda": 10}
_STEPS_NOT_TIMED = 5
# They compile kernels and create the optimizer's state, which a graph does not.
_STEPS_BEFORE_CAPTURE = 3


@dataclass
class Result:
    """The result of training one recipe.

    layers: what became of the linear layers and experts, in words.
    losses: mean training loss of each step, in nats per byte. seconds: its duration without evaluation and checkpoints.
    bf16_steps: how many of these are of the start in bf16.
    activation_bytes: saved for backward by one microbatch, no weights nor their copies among them.
    weight_bytes: the linear weights in the form that the GEMMs read. peak_bytes: None on a CPU.
    """

    recipe: str
    tokens_per_step: int
    layers: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bf16_steps: int = 0
    held_out_loss: float = math.nan
    activation_bytes: int = 0
    weight_bytes: int = 0
    peak_bytes: int | None = None

    @property
    def diverged(self) -> bool:
        return not all(map(math.isfinite, self.losses))

    @property
    def train_loss(self) -> float:
        """Mean training loss of the last twentieth of the steps, 10 at least."""
        return statistics.fmean(self.losses[-max(10, len(self.losses) // 20) :])

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of the median step, the first steps and those of the start left out."""
        own = self.seconds[self.bf16_steps :]
        return self.tokens_per_step / statistics.median(own[_STEPS_NOT_TIMED:] or own)


class Trainer:
    """A decoder with the weights that the seed decides, converted, and its optimizer: AdamW, over masters where
    Parameters are quantized themselves; matrices decay, norms do not.

    measures: whether the bytes of activations and weights are measured, before anything is compiled.
    """

    def __init__(self, recipe: str, config: RunConfig, device: torch.device, measures: bool = False):
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        with torch.device(device):
            self.model = Decoder(config)
        self.result = Result(recipe, config.tokens_per_step, convert(self.model, recipe, config.seed))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps_before_capture = _STEPS_BEFORE_CAPTURE
        # A graph reads the learning rate from memory.
        self._rate = torch.tensor(config.lr, device=device) if config.cuda_graph else None
        # Quantized Parameters have their first values, which become masters, until a GEMM has read them.
        self.optimizer = self._optimizer()
        if measures:
            self.result.activation_bytes = activation_bytes(self.model, config, device)
            self.result.weight_bytes = weight_bytes(self.model)
        if config.compile:
            for block in self.model.layers:
                block.compile(**compile_options(device))
        # Measuring drew random numbers where a recipe rounds stochastically, and counted tokens of experts.
        torch.manual_seed(config.seed)
        for router in self.model.routers():
            router.tokens.zero_()

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        options = {"lr": self.config.lr, "betas": BETAS, "fused": self.device.type == "cuda"}
        if self._rate is not None:
            options |= {"lr": self._rate, "capturable": True}
        if any(isinstance(p, QuantizedTensor) for p in parameters):
            return MasterWeightOptimizer(torch.optim.AdamW, self.model, groups, **options)
        return torch.optim.AdamW(groups, **options)

    def step(
        self,
        windows: torch.Tensor,
        step: int,
        part: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> torch.Tensor:
        """One optimizer update on windows that are on the device; the mean loss of its microbatches, 0-d.

        part: gives what each forward pass, each backward pass and the update run in, or the launch of their graph.
        """
        rate: Any = learning_rate(self.config, step)
        rate = rate if self._rate is None else self._rate.fill_(rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._rate is None:
            return self._update(windows, part)
        with part():
            return self._launch(windows)

    def _launch(self, windows: torch.Tensor) -> torch.Tensor:
        """`_update` from a CUDA graph, after a few steps on another stream, as PyTorch asks for."""
        if self._steps_before_capture:
            self._steps_before_capture -= 1
            return on_side_stream(lambda: self._update(windows), self.device)
        if self._graph is None:
            self._graph, self._windows = torch.cuda.CUDAGraph(), windows.clone()
            with torch.cuda.graph(self._graph):
                self._loss = self._update(self._windows)
        self._windows.copy_(windows)
        self._graph.replay()
        return self._loss.clone()

    def _update(
        self, windows: torch.Tensor, part: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        microbatches = windows.chunk(self.config.grad_accumulation)
        for microbatch in microbatches:
            with part(), torch.autocast(self.device.type, torch.bfloat16):
                loss = next_byte_loss(self.model, microbatch) / len(microbatches)
            with part():
                loss.backward()
            total += loss.detach()
        with part():
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for router in self.model.routers():
                router.balance()
        return total

    def save(self, path: Path, corpus: Corpus) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"losses": self.result.losses, "seconds": self.result.seconds}
        checkpoint.save(path, self.config, corpus.digest, self.device, **state)

    def load(self, path: Path, corpus: Corpus) -> None:
        state = checkpoint.load(path, self.config, corpus.digest, self.device)
        self.model.load_state_dict(state["model"])
        # How steps run is this run's choice: a start trained without a CUDA graph also serves runs that use one.
        for saved, own in zip(state["optimizer"]["param_groups"], self.optimizer.param_groups):
            saved |= {name: own[name] for name in ("lr", "fused", "capturable")}
        self.optimizer.load_state_dict(state["optimizer"])
        self.result.losses, self.result.seconds = state["losses"], state["seconds"]
        self.result.bf16_steps = self.config.bf16_steps

    def run(self, corpus: Corpus, until: int, save: Callable[[], object], every: int) -> None:
        """Steps from the last one done to `until`, saved after each `every` and at the end; none where `every` is 0.

        Stops where the loss is not finite.
        """
        # Here, so that what only times steps does without it.
        from tqdm import tqdm

        config, result = self.config, self.result
        first, sequences = len(result.losses), config.batch_size * config.grad_accumulation
        resumed = f"; resumed after step {first}" if first else ""
        print(f"{result.recipe:>6}: {result.layers}{resumed}", file=sys.stderr)
        # A log file gets a line now and then, a terminal a live bar.
        interval = 0.2 if sys.stderr.isatty() else 10
        bar = tqdm(total=until, initial=first, desc=f"{result.recipe:>6}", unit="step", mininterval=interval)
        unread, start = [], time.perf_counter()
        with bar:
            for step in range(first, until):
                unread.append(self.step(corpus.batch(config.seed, step, sequences).to(self.device), step))
                done = step + 1
                saves = every and (done % every == 0 or done == until)
                if saves or done == until or done % _STEPS_A_READ.get(self.device.type, 1) == 0:
                    losses = torch.stack(unread).tolist()
                    seconds = (time.perf_counter() - start) / len(losses)
                    good = list(map(math.isfinite, losses))
                    kept = len(losses) if all(good) else good.index(False) + 1
                    result.losses += losses[:kept]
                    result.seconds += [seconds] * kept
                    speed = f"{config.tokens_per_step / seconds:,.0f} tokens/s"
                    bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed}", refresh=False)
                    bar.update(len(losses))
                    if result.diverged:
                        return
                    if saves:
                        save()
                    unread, start = [], time.perf_counter()


def train(
    recipe: str,
    config: RunConfig,
    corpus: Corpus,
    device: torch.device,
    folder: Path | None = None,
    *,
    checkpoint_every: int = 0,
    start: Path | None = None,
    draw: int = 0,
) -> Result:
    """Train `recipe` from the seed's weights, or from its checkpoint in `folder`, and evaluate it in its own precision.

    start: the state that `train_start` saved, to begin with. draw: which change by one bit it gets; see `perturb`.
    Raises UsageError for a start of another configuration or other data, and for recipes that cannot begin with one.
    """
    if start and not RECIPES[recipe].options.get("master_weights", True):
        raise UsageError(f"{recipe}: its optimizer has masters, which bf16 has not; give it no bf16_steps")
    with products.computed_in(config.products):
        gc.collect()
        torch.compiler.reset()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        trainer = Trainer(recipe, config, device, measures=True)
        result = trainer.result
        path = checkpoint.path_of(folder, recipe) if folder else None
        if path and path.exists():
            trainer.load(path, corpus)
        elif start:
            trainer.load(start, corpus)
            perturb(trainer.model, draw)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.run(corpus, config.steps, lambda: trainer.save(path, corpus), checkpoint_every)
        if device.type == "cuda":
            result.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        if not result.diverged:
            result.held_out_loss = evaluate(trainer.model, config, corpus, device)
        return result


def train_start(config: RunConfig, corpus: Corpus, device: torch.device, path: Path) -> None:
    """Train the first steps in bf16, and leave the state at `path`. Raises UsageError where they diverge."""
    trainer = Trainer("bf16", config, device)
    steps = config.bf16_steps
    trainer.run(corpus, steps, lambda: trainer.save(path, corpus), every=steps)
    if trainer.result.diverged:
        raise UsageError(f"bf16_steps {steps}: bf16 diverged at step {len(trainer.result.losses)}; lower --lr")


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warmup to config.lr, then a cosine down to a tenth of it at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def evaluate(model: nn.Module, config: RunConfig, corpus: Corpus, device: torch.device) -> float:
    """Mean loss over every held-out window, in the precision that the model trains in."""
    model.eval()
    total = 0.0
    with weights_unchanged(model):
        for windows in corpus.held_out.split(config.batch_size):
            with torch.autocast(device.type, torch.bfloat16):
                total += next_byte_loss(model, windows.long().to(device)).item() * len(windows)
    model.train()
    return total / len(corpus.held_out)


def activation_bytes(model: nn.Module, config: RunConfig, device: torch.device) -> int:
    """Bytes that one microbatch saves for backward, run eagerly.

    Copies of the weights do not grow with the batch, activations do: the difference between two sequences and one is
    a sequence's activations.
    """

    def saved(sequences: int) -> int:
        tokens = torch.zeros(sequences, config.seq_len, dtype=torch.int64, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            report = memory_report(model, tokens, loss=lambda logits: byte_loss(logits, tokens))
        return report.measured.saved

    return (saved(2) - saved(1)) * config.batch_size


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the linear weights and the experts' as the GEMMs read them.

    2 an element for the copy that bf16 autocast makes; the quantized operand, scales included, where converted.
    """
    total = 0
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    for weight in (*weights, *(p for p in model.parameters() if p.dim() == 3)):
        if (config := getattr(weight, "config", None)) is None:
            total += 2 * weight.numel()
        else:
            total += config.weight_format.nbytes(*weight.shape, scale_per_matrix=config.scale_per_expert)
    return total
