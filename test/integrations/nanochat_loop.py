"""A training loop with the structure of nanochat's, over the ranks of the default process group.

Its linear layers cast fp32 weights to the dtype of the activations. Muon trains the matrices of the blocks and AdamW
the embedding and the head. Each rank reduces gradients to its share, updates that, and gathers the rest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# It traces tensor subclasses as inductor does, and builds no kernels.
COMPILER = "aot_eager"
VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH, ROWS = 96, 128, 4, 2, 32, 4


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x):
    """Rotary positions of x [rows, tokens, heads, features]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]), 10_000.0 ** -(torch.arange(half) / half))
    cos, sin = (table[None, :, None].to(x.dtype) for table in (angles.cos(), angles.sin()))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = Linear(WIDTH, 4 * WIDTH, bias=False), Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = norm(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k = norm(rotated(q)), norm(rotated(k))
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(norm(x)).relu().square())


class GPT(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.lm_head = Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)

    def forward(self, tokens, targets):
        x = norm(self.embed(tokens).bfloat16())
        for block in self.blocks:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(norm(x)).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.compile(fullgraph=True, backend=COMPILER)
def muon_update(weights, gradients, momentum, lr: float, decay: float):
    """Update stacked weights [matrices, N, K] in place by orthogonalized momentum, with cautious weight decay."""
    momentum.lerp_(gradients, 0.05)
    x = gradients.lerp(momentum, 0.95).bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = (x.mT if tall else x).float() * max(1, weights.shape[-2] / weights.shape[-1]) ** 0.5
    weights.sub_(lr * x + lr * decay * weights * (x * weights >= 0))


class StackedMuon:
    """Matrices of one shape, stacked: a rank updates its chunk of the stack in one compiled call."""

    def __init__(self, matrices: list[nn.Parameter], lr: float):
        self.matrices, self.lr = matrices, lr
        self.chunk = -(-len(matrices) // dist.get_world_size())
        self.mine = matrices[self.chunk * dist.get_rank() :][: self.chunk]
        self.momentum = torch.zeros(len(self.mine), *matrices[0].shape)

    @torch.no_grad()
    def step(self) -> None:
        shape = self.matrices[0].shape
        gradients = reduced(torch.stack([p.grad for p in self.matrices]), self.chunk)
        updated = torch.zeros(self.chunk, *shape)
        if self.mine:
            self.update(gradients[: len(self.mine)])
            updated[: len(self.mine)].copy_(torch.stack(list(self.stack)))
        torch._foreach_copy_(self.matrices, list(gathered(updated)[: len(self.matrices)].unbind(0)))

    def update(self, gradients: torch.Tensor) -> None:
        self.stack = torch.stack(self.mine)
        muon_update(self.stack, gradients, self.momentum, self.lr, 0.1)


class TorchMuon(StackedMuon):
    """The same by `torch.optim.Muon` on the rank's own Parameters, with a compiled step."""

    def __init__(self, matrices: list[nn.Parameter], lr: float):
        super().__init__(matrices, lr)
        self.stack = self.mine
        self.optimizer = torch.optim.Muon(self.mine, lr=lr, weight_decay=0.1)
        self.compiled = torch.compile(self.optimizer.step, backend=COMPILER)

    def update(self, gradients: torch.Tensor) -> None:
        for p, gradient in zip(self.mine, gradients):
            p.grad = gradient
        self.compiled()


class ShardedAdamW:
    """AdamW on a rank's rows of each matrix, with a learning rate for each."""

    def __init__(self, rates: dict[nn.Parameter, float]):
        self.matrices = list(rates)
        self.rows = [nn.Parameter(p.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()) for p in rates]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(self.rows, rates.values())]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), weight_decay=0.0)
        self.compiled = torch.compile(self.optimizer.step, backend=COMPILER)

    @torch.no_grad()
    def step(self) -> None:
        for p, rows in zip(self.matrices, self.rows):
            rows.grad = reduced(p.grad, len(rows))
        self.compiled()
        for p, rows in zip(self.matrices, self.rows):
            p.copy_(gathered(rows.detach()))


def reduced(gradients: torch.Tensor, chunk: int) -> torch.Tensor:
    """This rank's chunk of the mean over ranks, along the first dimension."""
    count = dist.get_world_size()
    padded = F.pad(gradients, (0, 0) * (gradients.dim() - 1) + (0, chunk * count - len(gradients)))
    mine = torch.empty_like(padded[:chunk])
    dist.reduce_scatter_tensor(mine, padded / count)
    return mine


def gathered(chunk: torch.Tensor) -> torch.Tensor:
    whole = chunk.new_empty(len(chunk) * dist.get_world_size(), *chunk.shape[1:])
    dist.all_gather_into_tensor(whole, chunk.contiguous())
    return whole


def optimizers_of(model: GPT, muon: type[StackedMuon]) -> list:
    matrices: dict[torch.Size, list] = {}
    for p in model.blocks.parameters():
        matrices.setdefault(p.shape, []).append(p)
    rates = {model.embed.weight: 0.02, model.lm_head.weight: 0.004}
    return [*(muon(group, lr=0.02) for group in matrices.values()), ShardedAdamW(rates)]


def losses_of(model: GPT, muon: type[StackedMuon], steps: int, batches) -> list[float]:
    """The mean loss over ranks in each step. batches: step -> tokens [ROWS, LENGTH + 1] of this rank."""
    optimizers, losses = optimizers_of(model, muon), []
    for step in range(steps):
        tokens = batches(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses
