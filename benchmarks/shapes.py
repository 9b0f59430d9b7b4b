"""Which shapes a benchmark runs: (tokens, out_features, in_features) of linear layers.

peers       the shapes that others were measured at, `large` those of whole layers among them
tracker     the dense MLPs of DeepSeek-V3 16B and 671B, at the tokens of torchao's tracker of blockwise FP8
models      the layers of train_llm's 125m and 1b, at the tokens of their microbatches
default     these, and ragged, very small and large ones
all         every layer of DeepSeek-V3 16B and 671B and Llama 8B and 70B, at every number of tokens
llama_8b    the layers of one of these models, likewise
4096x7168x2048
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NamedTuple

from llm.config import PRESETS

TOKENS = (64, 4096, 4097, 16384, 32768)
# Model -> the weights [out_features, in_features] of its linear layers. Source: the models' published configurations,
# config.json on their pages; DeepSeek-V3 16B is DeepSeek-V2-Lite's.
# DeepSeek's attention projects to low-rank latents first (kv_a, q_a) and from them to heads (kv_b, q_b).
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "deepseek_v3_16b": {
        "attention.q": (3072, 2048),
        "attention.kv_a": (576, 2048),
        "attention.kv_b": (4096, 512),
        "attention.output": (2048, 2048),
        "mlp.gate": (10944, 2048),
        "mlp.down": (2048, 10944),
        "shared_experts.gate": (2816, 2048),
        "shared_experts.down": (2048, 2816),
        "expert.gate": (1408, 2048),
        "expert.down": (2048, 1408),
    },
    "deepseek_v3_671b": {
        "attention.q_a": (1536, 7168),
        "attention.q_b": (24576, 1536),
        "attention.kv_a": (576, 7168),
        "attention.kv_b": (32768, 512),
        "attention.output": (7168, 16384),
        "mlp.gate": (18432, 7168),
        "mlp.down": (7168, 18432),
        "expert.gate": (2048, 7168),
        "expert.gate_up": (4096, 7168),
        "expert.down": (7168, 2048),
    },
    "llama_8b": {
        "attention.q": (4096, 4096),
        "attention.k": (1024, 4096),
        "mlp.gate": (14336, 4096),
        "mlp.down": (4096, 14336),
    },
    "llama_70b": {
        "attention.q": (8192, 8192),
        "attention.k": (1024, 8192),
        "mlp.gate": (28672, 8192),
        "mlp.down": (8192, 28672),
    },
}


class Shape(NamedTuple):
    """Tokens, and the weight [out_features, in_features] that they go through."""

    tokens: int
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


PEERS = tuple(
    Shape(*shape)
    for shape in (
        (4096, 2048, 7168),
        (4096, 7168, 2048),
        (4096, 18432, 7168),
        (4096, 7168, 18432),
        (4096, 4096, 7168),
        (16384, 14336, 4096),
    )
)
# Of those, where whole layers were measured.
LARGE = (PEERS[2], PEERS[3], PEERS[5])
_DENSE = ("deepseek_v3_16b", "deepseek_v3_671b")
TRACKER = tuple(Shape(4096, *LAYERS[model][layer]) for model in _DENSE for layer in ("mlp.gate", "mlp.down"))


def _of_preset(name: str) -> list[Shape]:
    """qkv, output, gate_up and down of a dense preset of train_llm."""
    config = PRESETS[name]
    weights = ((3 * config.dim, config.dim), (config.dim, config.dim))
    weights += ((2 * config.hidden, config.dim), (config.dim, config.hidden))
    return [Shape(config.batch_size * config.seq_len, *weight) for weight in weights]


MODELS = (*_of_preset("125m"), *_of_preset("1b"))
# Few tokens, tokens that fill no tile, features that fill no block, and a long batch.
DEFAULT = (
    *PEERS,
    *(Shape(*s) for s in ((64, 18432, 7168), (4097, 18432, 7168), (4096, 10944, 2048), (4096, 576, 7168))),
    Shape(32768, 4096, 4096),
)
SMOKE = (Shape(48, 256, 384), Shape(33, 64, 128))
_FIXED = {"peers": PEERS, "large": LARGE, "tracker": TRACKER, "models": MODELS, "default": DEFAULT, "smoke": SMOKE}


def name_of(shape: Shape) -> str:
    """The layers with this weight, or nothing: `deepseek_v3_671b mlp.down`."""
    weight = (shape.out_features, shape.in_features)
    return ", ".join(
        f"{model} {layer}" for model, layers in LAYERS.items() for layer, s in layers.items() if s == weight
    )


def select(names: Iterable[str], tokens: Iterable[int] | None = None) -> list[Shape]:
    """The shapes of these names, each once; `tokens` replaces theirs, a layer of a model has TOKENS by default.

    Raises ValueError for a name that is none.
    """
    tokens = list(tokens) if tokens else None
    chosen: dict[Shape, None] = {}
    for name in names:
        for shape in _shapes_of(name, tokens or TOKENS):
            counts = tokens or [shape.tokens]
            chosen.update(dict.fromkeys(shape._replace(tokens=count) for count in counts))
    return list(chosen)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--shapes and --tokens; `chosen` reads them."""
    names = ", ".join([*_FIXED, "all", *LAYERS])
    parser.add_argument("--shapes", nargs="+", type=argument, help=f"tokens x out x in, or of {names}", metavar="SHAPE")
    parser.add_argument("--tokens", nargs="+", type=int, help="these numbers of tokens instead of the shapes' own")


def chosen(args: argparse.Namespace, default: Iterable[str]) -> list[Shape]:
    """The shapes that the command line names."""
    return select(args.shapes or (["smoke"] if args.smoke else default), args.tokens)


def suffix(args: argparse.Namespace) -> str:
    """Of results' names: one group of layers that is named alone has files of its own."""
    return f"_{args.shapes[0]}" if args.shapes in (["tracker"], ["models"]) else ""


def argument(text: str) -> str:
    """`text` where it names shapes, as an argparse type."""
    try:
        _shapes_of(text, TOKENS)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _shapes_of(name: str, tokens: Iterable[int]) -> Iterable[Shape]:
    if name in _FIXED:
        return _FIXED[name]
    if name == "all" or name in LAYERS:
        layers = [shape for model in (LAYERS if name == "all" else [name]) for shape in LAYERS[model].values()]
        return [Shape(count, *layer) for layer in layers for count in tokens]
    parts = name.split("x")
    if len(parts) == 3 and all(part.isdecimal() and int(part) > 0 for part in parts):
        return [Shape(*map(int, parts))]
    raise ValueError(f"no shape {name!r}; give tokens x out x in, or one of {', '.join([*_FIXED, 'all', *LAYERS])}")
