"""The Hopper kernels of grouped products and their builds for tests, launched or simulated."""

from __future__ import annotations

import gluon_simulator as simulator
import pytest
import torch
from grouped_cases import ROUTINGS

from torchao_blockwise.formats import Operand
from torchao_blockwise.ops.gemm.builds import BUILDS as ALL_BUILDS
from torchao_blockwise.ops.groups.ends import as_groups

gluon = pytest.importorskip("torchao_blockwise.ops.gemm.grouped.kernels_gluon")
pipeline = pytest.importorskip("torchao_blockwise.ops.gemm.gluon_pipeline")
tiles = pytest.importorskip("torchao_blockwise.ops.gemm.gluon_order")
tables = pytest.importorskip("torchao_blockwise.ops.groups.tables.kernels_triton")
decode = gluon.decode
_decoded: dict = {}
every_routing = pytest.mark.parametrize("routing", ROUTINGS)
BUILDS = dict(zip(("256x128-pair", "256x128", "128x128", "64x64"), ALL_BUILDS))
every_build = pytest.mark.parametrize("build", BUILDS)


def product(a, b, groups, along: str, dtype=torch.float32, build=None):
    return gluon.grouped_matmul(a, b, as_groups(groups), along, dtype, build)


def add_product(out, a, b, groups, build) -> None:
    gluon.add_grouped_matmul(out, a, b, as_groups(groups), build)


def simulate(monkeypatch, kernel=pipeline.grouped_matmul_fp8_kernel) -> simulator.Launcher:
    launcher = simulator.Launcher(kernel, output=6)
    monkeypatch.setattr(gluon, kernel.fn.__name__, launcher)
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


def decode_once(x: Operand) -> torch.Tensor:
    """`decode` by Triton, in memory of its own: all builds, orders and faults of a kernel are tried on few operands."""
    key = (
        x.format_name,
        *((part.shape, part.dtype, part.reshape(-1).view(torch.uint8).numpy().tobytes()) for part in x.tensors),
    )
    if key not in _decoded:
        _decoded[key] = by_triton(decode)(x)
    return _decoded[key].clone()
