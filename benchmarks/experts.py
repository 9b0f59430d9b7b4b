"""Which experts a benchmark runs, and how many tokens each of them has.

Sizes are those of one GPU, of large models a part in expert parallelism: `ep8` has an eighth of the experts. Tokens
are counted as experts see them, top_k times each.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

import torch
from llm.config import PRESETS


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
        return {
            "gate_up": (self.experts, 2 * self.hidden, self.dim),
            "down": (self.experts, self.dim, self.hidden),
        }


MODELS = {
    "deepseek_v3_16b": Experts(32768, 64, 1408, 2048),
    "deepseek_v3_16b_ep8": Experts(16384, 8, 1408, 2048),
    "deepseek_v3_671b_ep8": Experts(32768, 32, 2048, 7168),
    "deepseek_v3_671b_ep32": Experts(32768, 8, 2048, 7168),
    "mixtral_8x7b": Experts(16384, 8, 14336, 4096),
    "qwen3_30b_a3b": Experts(32768, 128, 768, 2048),
}
# Of train_llm, a microbatch of it.
PRESET_MODELS = {
    f"train_llm_{name}": Experts(c.batch_size * c.seq_len * c.top_k, c.experts, c.hidden, c.dim)
    for name, c in PRESETS.items()
    if name in ("moe-400m", "moe-2b")
}
_NAMED = {name: [shape] for name, shape in (MODELS | PRESET_MODELS).items()}
_NAMED |= {"large": [*MODELS.values()], "models": [*PRESET_MODELS.values()]}
_NAMED["all"] = _NAMED["large"] + _NAMED["models"]
SMOKE = (Experts(40, 3, 128, 128), Experts(33, 8, 64, 96))


def parse(text: str) -> list[Experts]:
    """The experts of a name, or of tokens x experts x hidden x dim; as an argparse type."""
    if text in _NAMED:
        return _NAMED[text]
    parts = text.split("x")
    if len(parts) == 4 and all(part.isdecimal() and int(part) > 0 for part in parts):
        return [Experts(*map(int, parts))]
    names = ", ".join(_NAMED)
    raise argparse.ArgumentTypeError(f"no experts {text!r}; give tokens x experts x hidden x dim, or one of {names}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--shapes and --routings; `chosen` reads the shapes."""
    parser.add_argument(
        "--shapes", nargs="+", type=parse, metavar="SHAPE",
        help=f"tokens x experts x hidden x dim, or of {', '.join(_NAMED)}; default large",
    )  # fmt: skip
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default all")


def chosen(args: argparse.Namespace) -> list[Experts]:
    """The experts that the command line names, each once."""
    named = args.shapes or [SMOKE if args.smoke else MODELS.values()]
    return list(dict.fromkeys(itertools.chain.from_iterable(named)))


def suffix(args: argparse.Namespace) -> str:
    """Of results' names: train_llm's models, named alone, have files of their own."""
    return "_models" if args.shapes == [_NAMED["models"]] else ""


def _balanced(experts: int) -> list[float]:
    return [1.0] * experts


def _skewed(experts: int) -> list[float]:
    # Zipf's law, the largest experts anywhere.
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).tolist()
    return [1 / (1 + rank) for rank in order]


def _empty(experts: int) -> list[float]:
    return [float(expert % 2) for expert in range(experts)] if experts > 1 else [1.0]


# How the numbers of tokens of the experts are to each other; every second expert has none in "empty".
ROUTINGS = {"balanced": _balanced, "skewed": _skewed, "empty": _empty}


def group_ends(routing: str, tokens: int, experts: int, device: torch.device) -> torch.Tensor:
    """int32 [experts]: where each expert's tokens end; the last end is `tokens`."""
    shares = torch.tensor(ROUTINGS[routing](experts), dtype=torch.float64).cumsum(0)
    return (shares / shares[-1] * tokens).round().to(device, torch.int32)
