"""Which shapes a benchmark runs: of linear layers, of a mixture's experts, and of tokens that are sent to experts.

"tracker" has the dense MLPs of DeepSeek-V3 16B and 671B, at the tokens of torchao's tracker of blockwise FP8. Experts
are those of one GPU: `ep8` has an eighth of a model's. Tokens are counted as experts see them, top_k times each.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


class Shape(NamedTuple):
    """Tokens, and the weight [out_features, in_features] that they go through."""

    tokens: int
    out_features: int
    in_features: int
    __str__ = _text


class Experts(NamedTuple):
    """Tokens of all experts together, experts, and the MLP of each: dim -> hidden -> dim."""

    tokens: int
    experts: int
    hidden: int
    dim: int
    __str__ = _text

    @property
    def weights(self) -> dict[str, tuple[int, int, int]]:
        """[experts, out_features, in_features] of both weights, of which gate_up is gate and up together."""
        return {"gate_up": (self.experts, 2 * self.hidden, self.dim), "down": (self.experts, self.dim, self.hidden)}


class Routing(NamedTuple):
    """Tokens, experts that each takes, experts, and width of a token."""

    tokens: int
    top_k: int
    experts: int
    dim: int
    __str__ = _text


_MEASURED = [
    Shape(4096, 2048, 7168),
    Shape(4096, 7168, 2048),
    Shape(4096, 18432, 7168),
    Shape(4096, 7168, 18432),
    Shape(4096, 4096, 7168),
    Shape(16384, 14336, 4096),
]
LINEAR = {
    "large": [_MEASURED[2], _MEASURED[3], _MEASURED[5]],
    "tracker": [Shape(4096, *weight) for weight in ((10944, 2048), (2048, 10944), (18432, 7168), (7168, 18432))],
    # Few tokens, tokens that fill no tile, features that fill no block, and a long batch.
    "default": [
        *_MEASURED, Shape(64, 18432, 7168), Shape(4097, 18432, 7168), Shape(4096, 10944, 2048), Shape(4096, 576, 7168),
        Shape(32768, 4096, 4096),
    ],
    "smoke": [Shape(48, 256, 384), Shape(33, 64, 128)],
}  # fmt: skip
MODELS = {
    "deepseek_v3_16b": [Experts(32768, 64, 1408, 2048)],
    "deepseek_v3_16b_ep8": [Experts(16384, 8, 1408, 2048)],
    "deepseek_v3_671b_ep8": [Experts(32768, 32, 2048, 7168)],
    "deepseek_v3_671b_ep32": [Experts(32768, 8, 2048, 7168)],
    "mixtral_8x7b": [Experts(16384, 8, 14336, 4096)],
    "qwen3_30b_a3b": [Experts(32768, 128, 768, 2048)],
}
MIXTURES = MODELS | {
    "large": [shape for shapes in MODELS.values() for shape in shapes],
    "smoke": [Experts(40, 3, 128, 128), Experts(33, 8, 64, 96)],
}
# With a microbatch of moe-400m and moe-2b of train_llm.
MIXTURES["all"] = [*MIXTURES["large"], Experts(32768, 16, 768, 768), Experts(65536, 32, 1024, 1024)]
# DeepSeek-V3 671B and 16B, Mixtral 8×7B, Qwen3-MoE 30B, and few tokens.
ROUTED = {
    "default": [
        Routing(4096, 8, 256, 7168), Routing(8192, 6, 64, 2048), Routing(8192, 2, 8, 4096), Routing(4096, 8, 128, 2048),
        Routing(64, 8, 256, 7168),
    ],
    "smoke": [Routing(24, 2, 4, 160)],
}  # fmt: skip


def add_shapes(to: argparse.ArgumentParser, named: Mapping[str, list], default: str | Sequence[str]) -> None:
    """Add --shapes, which `choose` reads: names of `named`, or sizes such as 4096x7168x2048."""
    kind = type(named["smoke"][0])

    def parse(text: str) -> list:
        parts = text.split("x")
        if text in named:
            return named[text]
        if len(parts) == len(kind._fields) and all(part.isdecimal() and int(part) > 0 for part in parts):
            return [kind(*map(int, parts))]
        wanted = f"{' x '.join(kind._fields)}, or one of {', '.join(named)}"
        raise argparse.ArgumentTypeError(f"no shape {text!r}; give {wanted}")

    default = [default] if isinstance(default, str) else default
    what = f"{' x '.join(kind._fields)}, or of {', '.join(named)}; default {' '.join(default)}"
    to.add_argument("--shapes", nargs="+", type=parse, metavar="SHAPE", help=what)
    to.set_defaults(smoke_shapes=named["smoke"], default_shapes=[shape for name in default for shape in parse(name)])


def choose(args: argparse.Namespace) -> None:
    """Make `args.shapes` a list of the shapes that the command line names, each once."""
    default = args.smoke_shapes if args.smoke else args.default_shapes
    args.shapes = list(dict.fromkeys(itertools.chain.from_iterable(args.shapes or [default])))
    del args.smoke_shapes, args.default_shapes


def _skewed(experts: int) -> list[float]:
    # Zipf's law, the largest experts anywhere.
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).tolist()
    return [1 / (1 + rank) for rank in order]


# How the numbers of tokens of the experts are to each other; every second expert has none in "empty".
ROUTINGS = {
    "balanced": lambda experts: [1.0] * experts,
    "skewed": _skewed,
    "empty": lambda experts: [float(expert % 2) for expert in range(experts)] if experts > 1 else [1.0],
}


def group_ends(routing: str, tokens: int, experts: int, device: torch.device) -> torch.Tensor:
    """int32 [experts]: where each expert's tokens end; the last end is `tokens`."""
    shares = torch.tensor(ROUTINGS[routing](experts), dtype=torch.float64).cumsum(0)
    return (shares / shares[-1] * tokens).round().to(device, torch.int32)
