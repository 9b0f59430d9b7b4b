"""A training loop with the structure of litgpt's: Lightning Fabric accumulates, clips, saves and resumes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

VOCABULARY, WIDTH, HEADS, GROUPS, DEPTH, LENGTH, ROWS = 96, 128, 4, 2, 2, 32, 4
ACCUMULATED, CLIP = 2, 1.0


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight.to(x.dtype), 1e-5)


def rotary_tables(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(length), 10_000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Block(nn.Module):
    """Grouped-query attention with one matrix for q, k and v, and SwiGLU."""

    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.size, bias=True)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc_1, self.fc_2 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = qkv.split((HEADS, GROUPS, GROUPS), 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.fc_1(h)) * self.fc_2(h))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, table in zip(("cos", "sin"), rotary_tables(LENGTH, WIDTH // HEADS)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))


def fit(fabric: Fabric, model: GPT, steps: int, batches, checkpoint: Path | None = None, save_at: int = 0):
    """Train up to `steps` optimizer steps, from `checkpoint` if it exists; return the model and the mean losses.

    batches: microbatch -> tokens [ROWS, LENGTH + 1] of this rank. save_at: the step after which to save.
    """
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if checkpoint is not None and not save_at:
        fabric.load(checkpoint, state)
    losses = []
    for step in range(state["step"], steps):
        total = 0.0
        for micro in range(ACCUMULATED):
            tokens = batches(ACCUMULATED * step + micro)
            with fabric.no_backward_sync(model, enabled=micro < ACCUMULATED - 1):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
                fabric.backward(loss / ACCUMULATED)
            total = total + loss.detach() / ACCUMULATED
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(total, reduce_op="mean").item())
        state["step"] = step + 1
        if state["step"] == save_at:
            fabric.save(checkpoint, state)
    return model, losses
