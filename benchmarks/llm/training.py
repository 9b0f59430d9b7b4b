"""Training one recipe: the loop, the held-out loss and what it cost."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llm import checkpoint, products, ranks
from llm.config import RunConfig, UsageError
from llm.data import Corpus
from llm.memory import saved_bytes, weight_bytes
from llm.model import Decoder, next_byte_loss
from llm.recipes import convert, perturb
from torchao_blockwise import unconvert, weights_unchanged
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import QuantizedTensor

BETAS = (0.9, 0.95)
FINAL_LR = 0.1  # of the peak
# Reading a loss waits for the GPU; on a CPU it costs nothing.
_STEPS_A_READ = {"cuda": 10}
_STEPS_NOT_TIMED = 5


@dataclass
class Result:
    """What training one recipe gave.

    layers: what became of the linear layers and experts, in words.
    losses: mean training loss of each step, in nats a byte; seconds: its duration, evaluation and checkpoints left out.
    bf16_steps: how many of these are of the start in bf16.
    evaluated_in: held-out loss of the trained master weights in other recipes, each run eagerly.
    activation_bytes: saved for backward by one microbatch, no weights nor their copies among them; None under FSDP2.
    weight_bytes: the linear weights in the form that the GEMMs read. peak_bytes: None on a CPU.
    """

    recipe: str
    tokens_per_step: int
    layers: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bf16_steps: int = 0
    held_out_loss: float = math.nan
    evaluated_in: dict[str, float] = field(default_factory=dict)
    activation_bytes: int | None = None
    weight_bytes: int = 0
    peak_bytes: int | None = None

    @property
    def diverged(self) -> bool:
        """Whether the last training loss was not finite; training stops there."""
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


def build(config: RunConfig, device: torch.device) -> Decoder:
    """The decoder with the weights that the seed decides."""
    torch.manual_seed(config.seed)
    with torch.device(device):
        return Decoder(config)


def train(
    recipe: str,
    config: RunConfig,
    corpus: Corpus,
    device: torch.device,
    folder: Path | None = None,
    *,
    checkpoint_every: int = 0,
    resume: bool = False,
    evaluate_in: Sequence[str] = (),
    starts: Path | None = None,
) -> Result:
    """Train `recipe` from the seed's weights, or from its checkpoint in `folder`, and evaluate it in its own precision.

    evaluate_in: recipes in which the trained weights are evaluated as well.
    starts: where the state after `config.bf16_steps` is, or else is left for other recipes once it is trained.
    Stops early where the loss is not finite.
    Raises UsageError for a start of another configuration or other data, and for recipes that cannot begin with one.
    """
    with products.computed_in(config.products):
        start = None
        if config.bf16_steps:
            if recipe.endswith("_parameters"):
                raise UsageError(f"{recipe}: its optimizer has masters, which bf16 has not; leave --bf16-steps out")
            start = checkpoint.start_of(starts or folder, config.seed)
            if not start.exists():
                _train_start(config, corpus, device, start)
        return _train(recipe, config, corpus, device, folder, checkpoint_every, resume, evaluate_in, start)


def _train_start(config: RunConfig, corpus: Corpus, device: torch.device, path: Path) -> None:
    """Train the first steps in bf16, and leave the state at `path`. Raises UsageError where they diverge."""
    model = build(config, device)
    optimizer = make_optimizer(model, config, device)
    if config.compile:
        compile_blocks(model, device)
    result = Result("bf16", config.tokens_per_step, layers="the start of all recipes")

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(path, config, corpus.digest, device, **state, losses=result.losses, seconds=result.seconds)

    torch.manual_seed(config.seed)
    _run_steps(model, optimizer, config, corpus, device, result, config.bf16_steps, save, config.bf16_steps)
    if result.diverged:
        raise UsageError(f"--bf16-steps {config.bf16_steps}: bf16 diverged at step {len(result.losses)}; lower --lr")


def _train(recipe, config, corpus, device, folder, checkpoint_every, resume, evaluate_in, start) -> Result:
    before = _allocated(device)
    model = build(config, device)
    # Each rank rounds stochastically by bits of its own.
    result = Result(recipe, config.tokens_per_step, layers=convert(model, recipe, config.seed + ranks.number()))
    if not config.ranks:
        # Quantized Parameters have their first values, which become masters, until a product has read them.
        optimizer = make_optimizer(model, config, device)
        result.activation_bytes = activation_bytes(model, config, device)
    result.weight_bytes = weight_bytes(model)
    if config.compile:
        compile_blocks(model, device)
    if config.ranks:
        ranks.shard(model)
        optimizer = make_optimizer(model, config, device)
    # Measuring drew random numbers where a recipe rounds stochastically, and counted tokens of experts.
    torch.manual_seed(config.seed)
    for router in model.routers():
        router.tokens.zero_()
    path = None if folder is None else checkpoint.path_of(folder, recipe)
    resumes = resume and path is not None and path.exists()
    if resumes or start is not None:
        option = "--resume" if resumes else "--bf16-steps"
        state = checkpoint.load(path if resumes else start, config, corpus.digest, device, option)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        result.losses, result.seconds, result.bf16_steps = state["losses"], state["seconds"], config.bf16_steps
        if recipe == "bf16_perturbed" and not resumes:
            perturb(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def save():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"losses": result.losses, "seconds": result.seconds}
        checkpoint.save(path, config, corpus.digest, device, **state)

    _run_steps(model, optimizer, config, corpus, device, result, checkpoint_every, save, config.steps)
    if device.type == "cuda":
        result.peak_bytes = torch.cuda.max_memory_allocated(device) - before
    if not result.diverged:
        result.held_out_loss = evaluate(model, config, corpus, device)
        for other in evaluate_in:
            convert(unconvert(model), other, config.seed)
            with torch.compiler.set_stance("force_eager"):
                result.evaluated_in[other] = evaluate(model, config, corpus, device)
    return result


def _allocated(device: torch.device) -> int:
    """Bytes on the GPU that earlier recipes left behind."""
    gc.collect()
    torch.compiler.reset()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _run_steps(model, optimizer, config, corpus, device, result, checkpoint_every, save, until) -> None:
    """Steps from len(result.losses) to `until`, appended to `result`."""
    # Here, so that what only times steps does without it.
    from tqdm import tqdm

    first = len(result.losses)
    resumed = f"; resumed after step {first}" if first else ""
    quiet = ranks.number() > 0
    if not quiet:
        print(f"{result.recipe:>6}: {result.layers}{resumed}", file=sys.stderr)
    # A log file gets a line now and then, a terminal a live bar.
    interval = 0.2 if sys.stderr.isatty() else 10
    bar = tqdm(total=until, initial=first, desc=f"{result.recipe:>6}", unit="step", mininterval=interval, disable=quiet)
    unread, start = [], time.perf_counter()
    with bar:
        for step in range(first, until):
            unread.append(train_step(model, optimizer, config, corpus, device, step))
            done = step + 1
            saves = checkpoint_every and (done % checkpoint_every == 0 or done == until)
            if saves or done == until or done % _STEPS_A_READ.get(device.type, 1) == 0:
                losses = (ranks.sum_over_ranks(torch.stack(unread)) / max(1, ranks.count())).tolist()
                seconds = (time.perf_counter() - start) / len(losses)
                result.losses += losses
                result.seconds += [seconds] * len(losses)
                speed = config.tokens_per_step / seconds
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
                bar.update(len(losses))
                if result.diverged:
                    first_bad = next(i for i, loss in enumerate(result.losses) if not math.isfinite(loss))
                    del result.losses[first_bad + 1 :], result.seconds[first_bad + 1 :]
                    return
                if saves:
                    save()
                unread, start = [], time.perf_counter()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    corpus: Corpus,
    device: torch.device,
    step: int,
) -> torch.Tensor:
    """One optimizer update; the mean loss of its microbatches as a 0-d tensor on the device."""
    windows = corpus.batch(config.seed, step, config.batch_size * config.grad_accumulation).to(device)
    return train_on(windows, model, optimizer, config, step)


def train_on(
    windows: torch.Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    step: int,
    part: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> torch.Tensor:
    """`train_step` on windows that are on the device already.

    part: gives what each forward pass, each backward pass and the update run in.
    """
    device = windows.device
    total = torch.zeros((), device=device)
    microbatches = ranks.own(windows.chunk(config.grad_accumulation))
    for microbatch in microbatches:
        with part(), torch.autocast(device.type, torch.bfloat16):
            loss = next_byte_loss(model, microbatch) / len(microbatches)
        with part():
            loss.backward()
        total += loss.detach()
    with part():
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
        for router in model.routers():
            router.balance()
    return total


def compile_blocks(model: Decoder, device: torch.device) -> None:
    """Compile each block for its shapes; without a GPU only as far as graphs go, for which no compiler is needed."""
    how = {"backend": "inductor" if device.type == "cuda" else "aot_eager", "dynamic": False}
    for index, block in enumerate(model.layers):
        if ranks.count():
            # Behind a module of its own, whose hooks FSDP2 runs around what is compiled.
            model.layers[index] = torch.compile(block, **how)
        else:
            block.compile(**how)


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warmup to config.lr, then a cosine down to a tenth of it at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    return config.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, config: RunConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, over masters where Parameters are quantized themselves; matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options = {"lr": config.lr, "betas": BETAS, "fused": device.type == "cuda"}
    if any(isinstance(p.to_local() if isinstance(p, DTensor) else p, QuantizedTensor) for p in parameters):
        return MasterWeightOptimizer(torch.optim.AdamW, model, groups, **options)
    return torch.optim.AdamW(groups, **options)


@torch.no_grad()
def evaluate(model: nn.Module, config: RunConfig, corpus: Corpus, device: torch.device) -> float:
    """Mean loss over every held-out window, in the precision that the model trains in."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    batches = corpus.held_out.split(config.batch_size)
    # Ranks read as many each, because each pass of one is a pass of all.
    shared = len(batches) % max(1, ranks.count()) == 0
    with weights_unchanged(model):
        for windows in ranks.own(batches) if shared else batches:
            with torch.autocast(device.type, torch.bfloat16):
                total += next_byte_loss(model, windows.long().to(device)).item() * len(windows)
    model.train()
    return (ranks.sum_over_ranks(total) if shared else total).item() / len(corpus.held_out)


def activation_bytes(model: nn.Module, config: RunConfig, device: torch.device) -> int:
    """Bytes that one microbatch saves for backward, run eagerly.

    Copies of the weights do not grow with the batch, activations do: the difference between two sequences and one is
    a sequence's activations.
    """
    totals = []
    for sequences in (1, 2):
        windows = torch.zeros(sequences, config.seq_len + 1, dtype=torch.int64, device=device)
        with torch.autocast(device.type, torch.bfloat16), saved_bytes(model) as saved:
            next_byte_loss(model, windows)
        totals.append(sum(saved.values()))
    return (totals[1] - totals[0]) * config.batch_size
