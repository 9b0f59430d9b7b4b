"""A Llama-style decoder over bytes: RMSNorm, RoPE, causal attention, SwiGLU, dense or a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_training.config import VOCABULARY, RunConfig

_ROPE_BASE = 10_000.0
_NORM_EPS = 1e-5
# 0.02 at width 1024, and the same variance of a product at any other.
_INIT_STD = 0.64


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in the dtype of x, so that under autocast the residual stream stays bf16."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _NORM_EPS)


class Projections(nn.Module):
    """Linear layers without bias that read one input: one layer for all parts, or with `separate` one for each.

    parts: name -> width. readers: names of the layers.
    """

    def __init__(self, dim: int, merged: str, parts: dict[str, int], separate: bool):
        super().__init__()
        self.widths = list(parts.values())
        self.readers = tuple(parts) if separate else (merged,)
        for name, width in zip(self.readers, self.widths if separate else [sum(self.widths)]):
            self.add_module(name, nn.Linear(dim, width, bias=False))

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [.., dim] -> each part [.., width]."""
        outs = [getattr(self, name)(x) for name in self.readers]
        return outs if len(outs) > 1 else outs[0].split(self.widths, dim=-1)


class Attention(Projections):
    """Causal self-attention with rotary positions; heads share keys and values where there are fewer of these."""

    def __init__(self, config: RunConfig):
        head_dim = config.dim // config.heads
        kv_heads = config.kv_heads or config.heads
        heads = {"q_proj": config.heads, "k_proj": kv_heads, "v_proj": kv_heads}
        super().__init__(config.dim, "qkv", {name: n * head_dim for name, n in heads.items()}, config.separate)
        self.head_dim = head_dim
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [B, S, dim]; cos, sin: [S, head_dim]."""
        # Each [B, heads, S, head_dim].
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self.project(x))
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        return self.output(attended.transpose(1, 2).flatten(2))


class MLP(Projections):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: RunConfig, width: int = 1):
        hidden = width * config.hidden
        super().__init__(config.dim, "gate_up", dict.fromkeys(("gate_proj", "up_proj"), hidden), config.separate)
        self.down = nn.Linear(hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x)
        return self.down(F.silu(gate) * up)


class Router(nn.Module):
    """The top_k experts of each token: softmax in fp32, the chosen ones' probabilities normalized to their weights.

    Experts are chosen by logit plus a bias, which `balance` moves towards those that had too few tokens; the weights
    know no bias. A Parameter and no `nn.Linear`: conversion leaves it in high precision.
    Source: Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664).
    """

    def __init__(self, config: RunConfig):
        super().__init__()
        self.top_k, self.rate = config.top_k, config.balance_rate
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("tokens", torch.zeros(config.experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, dim] -> weights f32 and experts' numbers, each [T, top_k]."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        chosen = (logits + self.bias).topk(self.top_k, -1).indices
        # The softmax over all, normalized over the chosen, is that over the chosen.
        return logits.gather(-1, chosen).softmax(-1), chosen

    @torch.no_grad()
    def count(self, group_ends: torch.Tensor) -> None:
        self.tokens += group_ends.diff(prepend=group_ends.new_zeros(1))

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias of each expert by `rate` against its tokens' difference to the mean, and count again."""
        self.bias += self.rate * (self.tokens.mean() - self.tokens).sign()
        self.tokens.zero_()


class MixtureOfExperts(nn.Module):
    """Σ over a token's experts of weight · expert(x), and what the shared experts give, which are one MLP."""

    def __init__(self, config: RunConfig):
        super().__init__()
        # Here, so that dense models need no torchao.
        from torchao_blockwise.nn import SwiGLUExperts

        self.router = Router(config)
        self.experts = SwiGLUExperts(config.experts, config.dim, config.hidden)
        self.shared = MLP(config, config.shared_experts) if config.shared_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao_blockwise.nn import permute, unpermute

        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat)
        tokens, source, group_ends = permute(flat, chosen, len(self.router.bias))
        if self.training:
            self.router.count(group_ends)
        out = unpermute(self.experts(tokens, group_ends), source, self.router.top_k, weights).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: RunConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = MixtureOfExperts(config) if config.experts else MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Decoder layers one after the other, each recomputed in backward where `checkpointing` is true."""

    def __init__(self, config: RunConfig):
        super().__init__()
        self.checkpointing = False
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        cos, sin = rotary(config.seq_len, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, S, dim], S at most seq_len."""
        positions = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            if self.checkpointing and self.training:
                x = checkpoint(layer, x, *positions, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *positions)
        return x


class Decoder(Stack):
    """Bytes [B, S] to logits [B, S, 256]."""

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.checkpointing = config.activation_checkpointing
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.norm = RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, VOCABULARY, bias=False)
        std = _INIT_STD * config.dim**-0.5
        # The embedding draws first, as in runs of results that are there.
        for name, weight in sorted(self.named_parameters(), key=lambda item: not item[0].startswith("embedding")):
            if weight.dim() >= 2:
                # The projections that end a residual branch: smaller, so that depth does not grow the stream.
                ends_branch = name.endswith(("output.weight", "down.weight", "experts.down"))
                nn.init.normal_(weight, std=std / (2 * config.layers) ** 0.5 if ends_branch else std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [B, S] int64."""
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.lm_head(self.norm(super().forward(x)))

    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]


def byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; logits: [B, S, 256], targets: [B, S] int64."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of each byte given those before it; windows: [B, S + 1] int64."""
    return byte_loss(model(windows[:, :-1]), windows[:, 1:])


def rotary(positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, each [positions, head_dim] f32, halves repeated."""
    frequency = _ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(positions), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim/2) of x [B, heads, S, head_dim] by their position's angle, in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)
