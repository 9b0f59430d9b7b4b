"""The Hopper kernels of grouped products, simulated on any machine."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import gluon_simulator as simulator
import pytest
import torch
from grouped_cases import FORMATS, OPERANDS, TOLERANCE, Expected, ends_of, relative_error
from grouped_gluon import BUILDS, add_product, every_build, every_routing, pipeline, product, simulate, tables, tiles

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.ops.groups.ends import clamped_ends


@pytest.fixture
def simulated(monkeypatch):
    return simulate(monkeypatch)


@functools.cache
def case(along: str, routing: str, n: int, k: int):
    """(a, b, group_ends, tokens, what is expected): made once for all builds and orders, which leave them alone."""
    # One with tiles that are copied whole.
    group_ends, tokens = (torch.tensor([520], dtype=torch.int32), 520) if routing == "whole" else ends_of(routing)
    a, b = OPERANDS[along](group_ends, tokens, n, k)
    return a, b, group_ends, tokens, Expected.of(a, b, group_ends, along)


# --- products ---------------------------------------------------------------------------------------------------------


@every_routing
@every_build
def test_simulated_product_along_m(simulated, build, routing):
    a, b, group_ends, _, expected = case("m", routing, 130, 400)
    out = product(a, b, group_ends, "m", build=BUILDS[build])
    assert expected.error(out) < TOLERANCE[torch.float32]
    # Bits, so that -0 and NaN are seen.
    assert not out[group_ends[-1] :].view(torch.int32).any()


@every_routing
@every_build
def test_simulated_product_along_k(simulated, build, routing):
    a, b, group_ends, _, expected = case("k", routing, 130, 272)
    out = product(a, b, group_ends, "k", build=BUILDS[build])
    assert expected.error(out) < TOLERANCE[torch.float32]
    assert not out[group_ends.diff(prepend=group_ends.new_zeros(1)) == 0].view(torch.int32).any()


# (along, n, k, dtype): the output's rows are as long as n along "m", and as k along "k", where n counts them. Along "m"
# the length of K is test_simulated_product_along_m's.
OUTPUTS = [("m", n, 257, torch.bfloat16) for n in (136, 131, 192)]
OUTPUTS += [("k", n, k, torch.bfloat16) for n in (136, 131, 192) for k in (264, 257)]
OUTPUTS += [("m", 136, 264, torch.float16), ("k", 131, 264, torch.float16)]


@every_build
@pytest.mark.parametrize(("along", "n", "k", "dtype"), OUTPUTS, ids=str)
def test_simulated_output_by_the_copy_engine_and_by_stores(simulated, along, n, k, dtype, build):
    """Rows of 16 bits that fill 16 bytes are copied out, but for what ends inside a wave; others are stored."""
    group_ends, tokens = ends_of("tail")
    a, b = OPERANDS[along](group_ends, tokens, n, k)
    a = a._replace(scale=a.scale / 100)
    out = product(a, b, group_ends, along, dtype, BUILDS[build])
    assert out.dtype is dtype
    assert relative_error(out, a, b, group_ends, along) < TOLERANCE[dtype]


@every_routing
@every_build
def test_simulated_product_adds_to_gradients(simulated, build, routing):
    group_ends, tokens = ends_of(routing)
    a, b = OPERANDS["k"](group_ends, tokens, 72, 144)
    start = 100 * torch.randn(group_ends.numel(), 72, 144)
    empty = group_ends.diff(prepend=group_ends.new_zeros(1)) == 0
    start[empty, 0, :2] = torch.tensor([-0.0, float("nan")])
    out = start.clone()
    add_product(out, a, b, group_ends, BUILDS[build])
    assert torch.equal(out[empty].view(torch.int32), start[empty].view(torch.int32))
    if not empty.all():
        out[empty] = start[empty] = 0.0
        assert relative_error(out, a, b, group_ends, "k", start) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("along", FORMATS)
@pytest.mark.parametrize("routing", ("tail", "empty", "long and short"))
@every_build
def test_simulated_product_by_tables_made_before(simulated, monkeypatch, build, routing, along):
    """One object for all heights of tiles and both directions, of the tokens without padding."""
    group_ends, tokens = ends_of(routing)
    a, b = OPERANDS[along](group_ends, tokens, 130, 272)
    made = ops.make_groups(group_ends, tokens, FP8_1X128, backend="reference")
    wanted = product(a, b, group_ends, along, build=BUILDS[build])
    added = torch.ones_like(wanted)
    if along == "k":
        add_product(added, a, b, group_ends, BUILDS[build])
    monkeypatch.setattr(tables, "launch", None)
    assert torch.equal(product(a, b, made, along, build=BUILDS[build]), wanted)
    if along == "k":
        again = torch.ones_like(wanted)
        add_product(again, a, b, made, BUILDS[build])
        assert torch.equal(again, added)


@functools.cache
def in_one_order(along: str):
    """(a, b, groups with their tables, their product in one order of the partitions)."""
    group_ends, tokens = ends_of("long and short")
    a, b = OPERANDS[along](group_ends, tokens, 264, 300)
    groups = ops.make_groups(group_ends, tokens, FP8_1X128, backend="reference")
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        return a, b, groups, product(a, b, groups, along, torch.bfloat16, BUILDS["256x128"])


@pytest.mark.parametrize("along", FORMATS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_any_order_of_the_partitions_gives_the_same_bits(simulated, programs, seed, along):
    a, b, groups, wanted = in_one_order(along)
    simulated.programs, simulated.seed = programs, 1000 * (seed + 1)
    for build in ("256x128", "256x128-pair"):
        assert torch.equal(product(a, b, groups, along, torch.bfloat16, BUILDS[build]), wanted)


@pytest.mark.parametrize("along", FORMATS)
@pytest.mark.parametrize("ends", [(200, 100, 300), (-5, 130, 131), (60, 2**31 - 1, 0), (-(2**31), -1, -7)], ids=str)
def test_malformed_ends_reach_no_other_memory(simulated, ends, along):
    """As a GPU takes them, which does not look at their values; the simulator refuses what lies outside of tensors."""
    tokens = 300
    malformed = torch.tensor(ends, dtype=torch.int32)
    meant = clamped_ends(malformed, tokens)
    a, b = OPERANDS[along](meant, tokens, 130, 257)
    out = product(a, b, malformed, along, build=BUILDS["64x64"])
    assert torch.equal(out, product(a, b, meant, along, build=BUILDS["64x64"]))
    assert relative_error(out, a, b, meant, along) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("along", FORMATS)
def test_nan_and_inf_stay_in_their_group(simulated, along):
    group_ends, tokens = ends_of("ragged")
    a, b = OPERANDS[along](group_ends, tokens, 140, 300)
    first, last = (70, 71) if along == "m" else (128, 256)
    (a.qdata[first:last] if along == "m" else a.qdata[:, first:last]).view(torch.uint8).fill_(0x7F)
    out = product(a, b, group_ends, along, build=BUILDS["256x128"])
    bad = torch.zeros(out.shape, dtype=torch.bool)
    bad[70 if along == "m" else 1] = True
    assert torch.equal(out.isnan(), bad)


@every_build
@pytest.mark.parametrize("along", FORMATS)
def test_shared_memory_suffices(simulated, along, build):
    group_ends, tokens = ends_of("aligned")
    for dtype in (torch.bfloat16, torch.float32):
        product(*OPERANDS[along](group_ends, tokens, 128, 128), group_ends, along, dtype, BUILDS[build])
    # 227 KiB, less what barriers and the compiler take.
    assert max(simulated.shared) <= 226 * 1024


FAULTS = {
    "b is the first group's": ("b_row = part * N + column if B", 'b_row = column if B.along == "m" else column if B'),
    "b's scales are the first group's": ("block_n += part * gl.cdiv(N, B.block)", "pass"),
    "rows of no group are multiplied": ("gl.where(part < 0, 0, blocks)", "blocks"),
    "the copy engine writes into the next group": (
        "elif row >= start and row + _WAVE <= end:",
        "elif row >= start and row < end:",
    ),
    "stores run into the next group": ("own = rows < end\n", "own = rows < end + 1\n"),
    "a ragged wave is not written": ("elif row < end:", "elif end < 0:"),
    "a group's tiles are counted from the first group's": ("_tile_of(tile) - first_row * tiles_n", "_tile_of(tile)"),
    "a group's rows begin at the first group's": ("row = begin + (", "row = ("),
    "all groups write to the first's gradient": ("base = part * M", "base = 0"),
    "a group's tokens begin at the first's": (
        "first, last, _ = entry\n",
        "first, last, _ = entry\n        first = first * 0\n",
    ),
    "a group's last block is left out": (
        "first, last, _ = entry\n",
        "first, last, _ = entry\n        last = last - 1\n",
    ),
    "the last round is not gone back": (
        "rounds + (_tile_of(rounds) < tiles)",
        "rounds + (_tile_of(0) < tiles % gl.num_programs(0))",
    ),
    "the entry is of the tile before": ("= load_entry(tile + step,", "= load_entry(tile,"),
    "copies are of the tile before": (
        "is copied.\n        entry = load_entry(tile,",
        "\n        entry = load_entry(tile - step,",
    ),
    "a quotient that is one off stays": ("quotient, rest = quotient + missed, rest - missed * by", "pass"),
    "a wave is staged before a copy that left later": (
        '        if B.copy_out and B.along == "m":\n            # All copies',
        "        if False:\n            # All copies",
    ),
    "waves are staged in one place": ("out_ring.index(CONSUMER * B.waves + 1)", "out_ring.index(CONSUMER * B.waves)"),
    "entries behind the schedule are read": (
        ", entries)\n        return gl.load(entry)",
        ", 9**9)\n        return gl.load(entry)",
    ),
    "empty groups get no zeros": ("(1 if B.accumulate else 0)", "1"),
    "a stage is freed before the rows' scales of its only wave have come": (
        "free_stage_after(a_scale, 2, stage, zero, B.ctas)\n                else",
        "free_stage(stage, B.ctas)\n                else",
    ),
    "a stage is freed before the columns' scales of its only wave have come": (
        "free_stage_after(block_scale, B.tile_n // 4, stage, zero, B.ctas)",
        "free_stage(stage, B.ctas)",
    ),
    "rows before a group are written": ("own &= rows >= start", "own = own"),
    "a wave that begins before its group is copied whole": ("elif row >= start and row", "elif row"),
    "a wave that is used is left out": ("if B.all_live or row + WAVE * _WAVE + LAST < end:", "if B.all_live:"),
    "consumers take the same waves": ("row += B.stride * _WAVE", "row += _WAVE"),
    "a consumer without work frees nothing": (
        "        if LIVE == 0:\n            free_stage(stage, B.ctas)\n",
        "        if LIVE == 0:\n",
    ),
}


SEEDS = range(6)


class Trial(NamedTuple):
    """What a fault is looked for in."""

    module: str  # that has the fault: "tiles" or "pipeline"
    build: str = "256x128"
    # Few, so that the ring goes round often.
    programs: int = 2
    routing: str = "tail"

    def differs(self, monkeypatch, copied) -> bool:
        """Whether the kernel gives another product in some order, with `copied` in the place of the module."""
        if self.module == "tiles":
            for name in ("load_entry", "locate_tile", "turns_of_program"):
                monkeypatch.setattr(pipeline, name, getattr(copied, name))
            launcher = simulate(monkeypatch)
        else:
            launcher = simulate(monkeypatch, copied.grouped_matmul_fp8_kernel)
        launcher.programs = self.programs
        for along in FORMATS:
            # More blocks than stages, so that the ring goes round.
            a, b, group_ends, tokens, expected = case(along, self.routing, 200, 520)
            # No module with a fault makes tables.
            groups = ops.make_groups(group_ends, tokens, FP8_1X128, backend="reference")
            for seed in SEEDS:
                launcher.seed = seed
                out = product(a, b, groups, along, torch.bfloat16, BUILDS[self.build])
                if expected.error(out) > TOLERANCE[torch.bfloat16]:
                    return True
        return False


@functools.cache
def check_control(trial: Trial) -> None:
    """The kernel without a fault passes in every order that those with one are tried in."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        module = {"tiles": tiles, "pipeline": pipeline}[trial.module]
        assert not trial.differs(patch, simulator.without_fault(module, Path(folder)))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_sees(monkeypatch, tmp_path, fault):
    """The kernel with one fault: it must fail or give another product."""
    old, new = FAULTS[fault]
    in_tiles = old in Path(tiles.__file__).read_text()
    trial = Trial("tiles" if in_tiles else "pipeline")
    if "only wave" in fault:
        trial = trial._replace(build="128x128")
    if "staged" in fault:
        trial = trial._replace(routing="whole")
    if "behind the schedule" in fault:
        trial = trial._replace(programs=6)
    check_control(trial)
    faulty = simulator.with_fault(tiles if in_tiles else pipeline, old, new, tmp_path)
    with contextlib.suppress(simulator.SimulationError):
        assert trial.differs(monkeypatch, faulty)
