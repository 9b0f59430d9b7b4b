"""Measure which backend is fastest for each product of a model's layers on this GPU, and let AUTO know.

    python -m torchao_blockwise.tune                                        # layers of DeepSeek-V3 and Llama
    python -m torchao_blockwise.tune --model-shapes 4096,4096 14336,4096    # weights [N, K] of your own layers

Writes a table into $TORCHAO_BLOCKWISE_TABLES, else ~/.cache/torchao_blockwise, where every process that starts later
finds it. Numbers of tokens in between, and layers of nearly the same shape, need no entries of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from torchao_blockwise.ops.matmul import choice
from torchao_blockwise.tuning.products import RECIPES
from torchao_blockwise.tuning.shapes import LAYERS, features_of
from torchao_blockwise.tuning.tables import TOKENS, products_of, tune, write_table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchao_blockwise.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--models", nargs="+", choices=LAYERS, help="layers of these models; all by default")
    what.add_argument("--model-shapes", nargs="+", type=_shape, metavar="N,K", help="weights [N, K]")
    parser.add_argument("--tokens", nargs="+", type=_positive, default=TOKENS, metavar="T", help=f"default {TOKENS}")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["fp8"], help="default fp8")
    parser.add_argument("--folder", type=Path, help="where to write the table, instead of where AUTO looks")
    parser.add_argument("--device", help="cuda (default), or cpu, to try the command out")
    args = parser.parse_args(argv)
    if args.device is None and not torch.cuda.is_available():
        parser.exit(2, "tune: needs a CUDA GPU, whose kernels it times; none found\n")
    device = torch.device(args.device or "cuda")
    try:
        # Rather than after minutes of measuring.
        folder = args.folder or choice.user_folder()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"tune: cannot write the table: {error}; choose another --folder\n")
    products = products_of(args.model_shapes or features_of(args.models), args.tokens, args.recipes)
    print(f"{choice.device_name(device)}: {len(products)} products")
    entries = tune(products, device)
    path, kept = write_table(folder, device, entries)
    print(f"wrote {path}: {len(entries)} entries, and {kept} that were there")
    return 0 if entries else 1


def _shape(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"must be N,K, the shape of a weight, got {text!r}")
    n, k = map(_positive, parts)
    return n, k


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
