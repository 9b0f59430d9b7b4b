"""The Hopper kernel of plain and grouped GEMMs for tests: its builds and operands, launched or simulated."""

import functools
from dataclasses import replace

import gluon_simulator as simulator
import grouped_products
import pytest
import torch
from grouped_products import Case, with_nan

from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops.gemm import builds
from torchao_blockwise.ops.groups.ends import as_groups

gluon = pytest.importorskip("torchao_blockwise.ops.gemm.kernels_gluon")
pipeline = pytest.importorskip("torchao_blockwise.ops.gemm.gluon_pipeline")
tables = pytest.importorskip("torchao_blockwise.ops.groups.tables.kernels_triton")
decode = gluon.decode

# kind: (along, formats of a and b)
KINDS = {
    "square": ("", (FP8_1X128, FP8_128X128)),
    "one_row": ("", (FP8_1X128, FP8_1X128)),
    "m": ("m", (FP8_1X128, FP8_128X128)),
    "k": ("k", (FP8_1X128, FP8_1X128)),
    "square_k": ("k", (FP8_1X128, FP8_128X128)),
    "decoded_m": ("m", (NVFP4_1X16, NVFP4_16X16)),
    "decoded_k": ("k", (NVFP4_1X16, NVFP4_1X16)),
}
GROUPED = tuple(kind for kind, (along, _) in KINDS.items() if along)
# Of kinds that add to a gradient.
ADDING = ("square", "one_row", "k", "square_k", "decoded_k")
kinds = pytest.mark.parametrize("kind", KINDS)
grouped_kinds = pytest.mark.parametrize("kind", GROUPED)
ROUTINGS = {
    **{name: routing for name, routing in grouped_products.ROUTINGS.items() if name != "no_tokens"},
    "many_experts": ((3, 0, 1, 7, 2) * 5, 2),
    # Tiles of 256 tokens and more; groups that end everywhere in a stage of 64, some in one.
    "long_and_short": ((5, 400, 60, 140), 0),
    "blocks_of_a_stage": ((64, 16, 32, 48, 80, 1), 0),
    # With tiles that are copied whole.
    "whole": ((520,), 0),
}
# (M, N, K) of plain GEMMs.
SHAPES = [(1, 1, 1), (64, 256, 128), (65, 130, 129), (300, 272, 400), (7, 576, 1100), (513, 257, 640)]
BUILDS = dict(zip(("256x128", "128x128", "64x64"), builds.BUILDS))
BUILDS["64x64-splits"] = replace(BUILDS["64x64"], splits=4)
# What groups take.
GROUPED_BUILDS = tuple(BUILDS)[:3]


@functools.cache
def case(kind: str, routing: str | tuple, n: int = 136, k: int = 200, device: str = "cpu") -> Case:
    """Made once for all builds and orders, which leave it as it is; a holds NaN in the rows of no group.

    routing: its name, or (sizes of groups, tokens of no group).
    """
    along, pair = KINDS[kind]
    made = Case(along, pair, ROUTINGS[routing] if isinstance(routing, str) else routing, device, n, k)
    if along == "m":
        made.a = with_nan(made.a, slice(sum(made.sizes), None))
    return made


def product(case: Case, dtype=torch.float32, build="256x128", ends=None, bias=None) -> torch.Tensor:
    build = BUILDS.get(build)
    if not case.along:
        return gluon.matmul(case.a, case.b, dtype, bias, build)
    groups = as_groups(case.ends if ends is None else ends)
    return gluon.grouped_matmul(case.a, case.b, groups, case.along, dtype, build)


def add_product(out: torch.Tensor, case: Case, build="256x128", ends=None) -> None:
    groups = as_groups(case.ends if ends is None else ends) if case.along else None
    gluon.add_matmul(out, case.a, case.b, groups, BUILDS[build])


def simulate(monkeypatch) -> simulator.Launcher:
    """Let GEMMs launch their kernel in the simulator."""
    launcher = simulator.Launcher(pipeline.matmul_kernel, outputs=(6, 7))
    monkeypatch.setattr(gluon, "matmul_kernel", launcher)
    monkeypatch.setattr(gluon, "multiprocessors", launcher.multiprocessors)
    for name in ("row_schedule", "group_schedule"):
        monkeypatch.setattr(gluon, name, by_triton(getattr(tables, name)))
    monkeypatch.setattr(gluon, "decode", decode_once)
    return launcher


def by_triton(function):
    """`function` of a NamedTuple of tensors: where there is a GPU, Triton's kernels run there, the simulator here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def run(tensors, *args):
        moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors]
        return function(type(tensors)(*moved), *args).cpu()

    return run


# All builds and orders of a kernel are tried on few operands.
decode_once = functools.cache(by_triton(decode))
