"""Which tiles and warps the quantize and transpose kernels run fastest with on this GPU.

For each case of bench_quantize and each shape: every way that the tables of the kernels can select, checked against the
reference's bits, then timed side by side. Prints one table: the share of the copy bandwidth measured in the same run
that the bytes which must move make; `*` is what the package uses. Nothing is written: what is better goes into the
kernels' tables by hand.

    python benchmarks/tune_quantize.py [--shapes 4096x7168 16384x4096] [--only columnwise both] [--smoke]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import driver
import torch
from bench_quantize import CASES, job
from environment import device_name
from errors import reason
from report import markdown
from roofline import measure_ceilings
from timing import Timing, input_sets, time_runs

from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.quantization import kernels_gluon as gluon_kernels
from torchao_blockwise.ops.quantization import kernels_triton as quantize_kernels
from torchao_blockwise.ops.quantization import quantize_op
from torchao_blockwise.ops.transposition import kernels_triton as transpose_kernels

SHAPES, SMOKE_SHAPES = ((4096, 7168), (16384, 4096), (16384, 14336)), ((48, 272),)


class Way(NamedTuple):
    """One way to compute a case: a backend, and a table of its kernels with another value."""

    name: str
    backend: Backend
    module: ModuleType
    table: str
    value: Any


def triton_tile(table: str, rows: int, columns: int, warps: int) -> Way:
    """A Triton kernel with another tile; what is for rows off 16 bytes stays."""
    tile = rows, columns, warps, *getattr(quantize_kernels, table)[3:]
    return Way(f"{rows}x{columns}, {warps} warps", Backend.TRITON, quantize_kernels, table, tile)


def gluon_tile(table: str, columns: int, warps: int) -> Way:
    what = "a read: Gluon" if table == "BOTH" else f"Gluon, {_BLOCK}x{columns}"
    return Way(f"{what}, {warps} warps", Backend.GLUON, gluon_kernels, table, (columns, warps))


def transpose_tiles(tiles: dict[int, tuple[int, int, int]]) -> Way:
    """The transpose with these tiles: from so many elements on -> rows, columns, warps."""
    name = "; ".join(
        f"from {least >> 20} Mi elements " * bool(least) + f"{rows}x{columns}, {warps} warps"
        for least, (rows, columns, warps) in tiles.items()
    )
    return Way(name, Backend.TRITON, transpose_kernels, "_QUADS_TILES", tiles)


_BLOCK = FP8_1X128.block[1]
# Case -> the ways to compute it.
WAYS: dict[str, list[Way]] = {
    "rowwise": [
        triton_tile("_FP8_ROWWISE_TILE", rows, 128, warps)
        for rows, warps in ((32, 4), (16, 2), (32, 2), (64, 4), (64, 8), (32, 8), (8, 1))
    ],
    "columnwise": [
        *(gluon_tile("COLUMNWISE", *build) for build in ((64, 4), (64, 2), (128, 4), (128, 8))),
        *(
            triton_tile("_FP8_COLUMNWISE_TILE", 128, columns, warps)
            for columns, warps in ((64, 4), (64, 2), (64, 8), (128, 4), (128, 8), (32, 2), (32, 4), (32, 1))
        ),
    ],
    "both": [
        triton_tile("_FP8_COLUMNWISE_TILE", 128, 64, 4),
        triton_tile("_FP8_COLUMNWISE_TILE", 128, 128, 4),
        *(gluon_tile("BOTH", _BLOCK, warps) for warps in (4, 8, 16)),
    ],
    "weight": [triton_tile("_FP8_SQUARE_TILE", 128, 128, warps) for warps in (8, 4, 16)],
    "transpose": [
        transpose_tiles(transpose_kernels._QUADS_TILES),
        *(
            transpose_tiles({0: tile})
            for tile in ((256, 128, 4), (256, 256, 8), (128, 128, 4), (128, 128, 2), (128, 256, 4))
        ),
    ],
}


@contextlib.contextmanager
def tables(way: Way) -> Iterator[None]:
    """The kernels with this table."""
    before = getattr(way.module, way.table)
    try:
        setattr(way.module, way.table, way.value)
        quantize_kernels._build.cache_clear()
        yield
    finally:
        setattr(way.module, way.table, before)
        quantize_kernels._build.cache_clear()


def is_set(way: Way) -> bool:
    """Whether its kernels have its table now."""
    return getattr(way.module, way.table) == way.value


def in_use(case: str, way: Way) -> bool:
    """Whether the package computes the case in this way on Hopper: AUTO takes the first backend that has the case."""
    backends = {other.backend for other in WAYS[case]}
    return is_set(way) and way.backend is next(row.backend for row in quantize_op.table if row.backend in backends)


def measure(case: str, shape: tuple[int, int], device: torch.device, copy: float, seconds: float) -> dict[str, str]:
    """{way: its share of the copy bandwidth, or what is wrong with it}."""
    work = job(case, *shape, "fp8", device)
    sets = input_sets(work.make, device, work.nbytes)
    compute = work.ours(sets[0])["ours"]
    runs, cells = {}, {}
    for way in WAYS[case]:
        # By name: another backend would be timed in its place. Without a GPU there is the reference alone.
        backend = way.backend if device.type == "cuda" else None

        def run(*arguments, way=way, backend=backend):
            with tables(way):
                return compute(*arguments, backend=backend)

        try:
            work.check(run(*sets[0]), sets[0], None)
            runs[way.name] = run, sets
        except Exception as error:
            cells[way.name] = reason(error)
    for name, timing in time_runs(runs, device, seconds=seconds).items():
        cells[name] = timing if isinstance(timing, str) else share(timing, work.nbytes, copy)
    return cells


def share(timing: Timing, nbytes: int, copy: float) -> str:
    eager = "" if timing.captured or not torch.cuda.is_available() else " (not captured)"
    return f"{nbytes / (timing.us * 1e6 * copy):.2f}{eager}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=_shape, help="rows x columns of the input")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, briefly, on a CPU too: to try the script")
    args, device = driver.parse(parser, argv)
    shapes = args.shapes or (SMOKE_SHAPES if args.smoke else SHAPES)
    copy = measure_ceilings(device, smoke=args.smoke).copy
    print(f"{device_name(device)}: share of the copy bandwidth, {copy:.2f} TB/s\n")
    print(markdown(["case", "way", *(f"{rows}x{columns}" for rows, columns in shapes)], [], left=2))
    for case in args.only:
        columns = [measure(case, shape, device, copy, 0.001 if args.smoke else 0.03) for shape in shapes]
        for way in WAYS[case]:
            cells = " | ".join(column[way.name] for column in columns)
            print(f"| {case} | {way.name}{' *' * in_use(case, way)} | {cells} |", flush=True)
    return 0


def _shape(text: str) -> tuple[int, int]:
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be rows x columns, as 4096x7168, got {text!r}") from None
    return rows, columns


if __name__ == "__main__":
    sys.exit(main())
