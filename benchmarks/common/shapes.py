"""Which shapes a benchmark runs: of linear layers, and of a mixture's experts with the tokens that each has.

(tokens, out_features, in_features) of linear layers:
    peers       the shapes that others were measured at, `large` those of whole layers among them
    tracker     the dense MLPs of DeepSeek-V3 16B and 671B, at the tokens of torchao's tracker of blockwise FP8
    default     `peers`, and ragged, very small and large ones
    4096x7168x2048
(tokens, experts, hidden, dim) of experts are those of one GPU, of large models a part in expert parallelism: `ep8` has
an eighth of the experts. Tokens are counted as experts see them, top_k times each.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from llm_training.config import PRESETS


class Shape(NamedTuple):
    """Tokens, and the weight [out_features, in_features] that they go through."""

    tokens: int
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Experts(NamedTuple):
    """Tokens of all experts together, experts, and the MLP of each: dim -> hidden -> dim."""

    tokens: int
    experts: int
    hidden: int
    dim: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def weights(self) -> dict[str, tuple[int, int, int]]:
        """[experts, out_features, in_features] of both weights, gate and up as one."""
        return {"gate_up": (self.experts, 2 * self.hidden, self.dim), "down": (self.experts, self.dim, self.hidden)}


PEERS = [
    Shape(4096, 2048, 7168),
    Shape(4096, 7168, 2048),
    Shape(4096, 18432, 7168),
    Shape(4096, 7168, 18432),
    Shape(4096, 4096, 7168),
    Shape(16384, 14336, 4096),
]
LINEAR = {
    "peers": PEERS,
    # Where whole layers were measured.
    "large": [PEERS[2], PEERS[3], PEERS[5]],
    "tracker": [Shape(4096, *weight) for weight in ((10944, 2048), (2048, 10944), (18432, 7168), (7168, 18432))],
    # Few tokens, tokens that fill no tile, features that fill no block, and a long batch.
    "default": [
        *PEERS, Shape(64, 18432, 7168), Shape(4097, 18432, 7168), Shape(4096, 10944, 2048), Shape(4096, 576, 7168),
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
    # Of train_llm, a microbatch of it.
    "models": [
        Experts(c.batch_size * c.seq_len * c.top_k, c.experts, c.hidden, c.dim)
        for c in (PRESETS["moe-400m"], PRESETS["moe-2b"])
    ],
    "smoke": [Experts(40, 3, 128, 128), Experts(33, 8, 64, 96)],
}
MIXTURES["all"] = MIXTURES["large"] + MIXTURES["models"]


def add_shapes(to: argparse.ArgumentParser, named: Mapping[str, list], default: str | Sequence[str]) -> None:
    """--shapes, which `chosen` reads: names of `named`, or sizes as one writes them."""
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
    to.set_defaults(named=named, default_shapes=[shape for name in default for shape in parse(name)])


def chosen(args: argparse.Namespace) -> tuple[list, str]:
    """The shapes that the command line names, each once, and the suffix of results' names.

    One of these groups of layers that is named alone has separate files.
    """
    named, default = args.named, args.default_shapes
    del args.named, args.default_shapes
    if not args.shapes:
        return named["smoke"] if args.smoke else default, ""
    suffix = next((f"_{name}" for name in ("tracker", "models") if args.shapes == [named.get(name)]), "")
    return list(dict.fromkeys(itertools.chain.from_iterable(args.shapes))), suffix


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
