"""Faults in the Hopper kernel of GEMMs: in some order of the partitions each must fail or give another product."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import gluon_simulator as simulator
import pytest
import torch
from gluon_gemm import case, decoded, is_right, order, pipeline, product, simulate
from grouped_products import Case

MODULES = {"pipeline": pipeline, "order": order, "decoded": decoded}


class Trial(NamedTuple):
    """The GEMMs, builds and orders in which a fault is looked for."""

    module: str  # that has the fault
    kinds: tuple[str, ...] = ("m", "k")
    build: str = "256x128"
    # Few, so that the ring goes round often.
    programs: int = 2
    routing: str | tuple = ((33, 0, 129), 100)
    sizes: tuple[tuple[int, int], ...] = ((200, 520),)  # n, k
    seeds: int = 6

    def cases(self):
        for kind in self.kinds:
            for n, k in self.sizes:
                yield case(kind, self.routing, n, k)
                if self.module == "decoded":
                    # A group that has nothing, with a scale of NaN.
                    empty = case(kind, ((0,), 40), 40, 72)
                    yield with_scale_of_nan(empty)

    def differs(self, monkeypatch, copied) -> bool:
        """Whether the kernel gives a wrong product in some order, with `copied` in the place of the module."""
        if self.module == "pipeline":
            launcher = simulate(monkeypatch, copied.matmul_kernel)
        else:
            names = {"order": ("load_entry", "locate_tile", "turns_of_program"), "decoded": ("accumulate_decoded",)}
            for name in names[self.module]:
                monkeypatch.setattr(pipeline, name, getattr(copied, name))
            launcher = simulate(monkeypatch)
        launcher.programs = self.programs
        for of in self.cases():
            for launcher.seed in range(self.seeds):
                if not is_right(product(of, torch.bfloat16, self.build), of):
                    return True
        return False


def with_scale_of_nan(of: Case) -> Case:
    copied = object.__new__(Case)
    vars(copied).update(vars(of), a=of.a._replace(global_scale=torch.full((), float("nan"))))
    return copied


# More blocks than stages, several tiles a program, with and without copies of the output.
PLAIN = Trial("pipeline", ("one_row",), programs=1, routing=((500,), 0), sizes=((256, 2000), (257, 2000)), seeds=5)
GROUPED, TILES = Trial("pipeline"), Trial("order")
DECODED = Trial("decoded", ("decoded_m", "decoded_k"), routing=((70, 0, 130, 16, 96), 40), seeds=4)
ONE_WAVE, WHOLE = GROUPED._replace(build="128x128"), GROUPED._replace(routing="whole")

# name: (where it is looked for, what is replaced, by what)
FAULTS = {
    "a stage is freed before it is read": (
        PLAIN,
        "            second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])\n"
        "            free_stage_after(a_scale, 2, stage, zero)\n",
        "            free_stage_after(a_scale, 2, stage, zero)\n"
        "            second, acc0 = warpgroup_mma_wait(0, deps=[second, acc0])\n",
    ),
    # Seen on an H200: rows scaled by what a later block brought.
    "a stage is freed before its scales have come": (
        PLAIN,
        "            free_stage_after(a_scale, 2, stage, zero)\n            # Waiting here",
        "            free_stage(stage)\n            # Waiting here",
    ),
    "the producer does not wait": (
        PLAIN, "            wait_for_stage(stage, phase)\n            bar", "            bar"
    ),
    "a consumer does not wait for a tile": (
        PLAIN, "    mbarrier.wait(full.index(stage), phase, pred=first < last)\n", ""
    ),
    "a consumer does not wait for a block": (
        PLAIN,
        "mbarrier.wait(full.index(following), its_phase, pred=k + 1 < last)\n            second, b_factor",
        "second, b_factor",
    ),
    "a consumer waits for a block too many": (
        PLAIN,
        "its_phase, pred=k + 1 < last)\n            second, b_factor",
        "its_phase)\n            second, b_factor",
    ),
    "a barrier expects too few bytes": (PLAIN, "expect(bar, B.copied_bytes)", "expect(bar, B.copied_bytes - 512)"),
    "a barrier expects too many bytes": (PLAIN, "expect(bar, B.copied_bytes)", "expect(bar, B.copied_bytes + 512)"),
    "a barrier counts one consumer": (
        PLAIN, "make_barriers(B.stages, _WARPS * B.consumers)", "make_barriers(B.stages, _WARPS)"
    ),
    "the phase never turns": (PLAIN, "stage, phase = following, its_phase", "stage = following"),
    "output is staged before the last copy left": (
        PLAIN, "tma.store_wait(B.waves - 1)\n", "tma.store_wait(B.waves)\n"
    ),
    "the program ends before its copies": (PLAIN, "    if B.copy_out:\n        tma.store_wait(0)\n", ""),
    "columns behind the output are written": (PLAIN, "mask = own[:, None] & (columns < N)[None, :]", "mask = None"),
    "b is the first group's": (
        GROUPED, "b_row = part * N + column if B", 'b_row = column if B.along == "m" else column if B'
    ),
    "b's scales are the first group's": (GROUPED, "block_n += part * gl.cdiv(N, B.block)", "pass"),
    "the copy engine writes into the next group": (
        GROUPED, "elif row >= start and row + _WAVE <= end:", "elif row >= start and row < end:"
    ),
    "stores run into the next group": (GROUPED, "own = rows < end\n", "own = rows < end + 1\n"),
    "a ragged wave is not written": (GROUPED, "elif row < end:", "elif end < 0:"),
    "all groups write to the first's gradient": (GROUPED, "base = part * M", "base = 0"),
    "the entry is of the tile before": (GROUPED, "= load_entry(tile + step,", "= load_entry(tile,"),
    "copies are of the tile before": (
        GROUPED, "is copied.\n        entry = load_entry(tile,", "\n        entry = load_entry(tile - step,"
    ),
    "a wave is staged before a copy that left later": (
        WHOLE,
        '        if B.copy_out and B.along == "m":\n            # Wait for all copies',
        "        if False:\n            # Wait for all copies",
    ),
    "waves are staged in one place": (
        WHOLE, "out_ring.index(CONSUMER * B.waves + 1)", "out_ring.index(CONSUMER * B.waves)"
    ),
    "a stage is freed before the rows' scales of its only wave have come": (
        ONE_WAVE,
        "free_stage_after(a_scale, 2, stage, zero)\n                else",
        "free_stage(stage)\n                else",
    ),
    "a stage is freed before the columns' scales of its only wave have come": (
        ONE_WAVE, "free_stage_after(block_scale, B.tile_n // 4, stage, zero)", "free_stage(stage)"
    ),
    "rows before a group are written": (GROUPED, "own &= rows >= start", "own = own"),
    "a wave that begins before its group is copied whole": (GROUPED, "elif row >= start and row", "elif row"),
    "a wave that is used is left out": (
        GROUPED, "if B.all_live or row + WAVE * _WAVE + LAST < end:", "if B.all_live:"
    ),
    "consumers take the same waves": (GROUPED, "row += B.stride * _WAVE", "row += _WAVE"),
    "a consumer without work frees nothing": (
        GROUPED, "        if LIVE == 0:\n            free_stage(stage)\n", "        if LIVE == 0:\n"
    ),
    "rows of no group are multiplied": (TILES, "gl.where(part < 0, 0, blocks)", "blocks"),
    "a group's tiles are counted from the first group's": (
        TILES, "_tile_of(tile) - first_row * tiles_n", "_tile_of(tile)"
    ),
    "a group's rows begin at the first group's": (TILES, "row = begin + (", "row = ("),
    "a group's tokens begin at the first's": (
        TILES, "first, last, _ = entry\n", "first, last, _ = entry\n        first = first * 0\n"
    ),
    "a group's last block is left out": (
        TILES, "first, last, _ = entry\n", "first, last, _ = entry\n        last = last - 1\n"
    ),
    "the last round is not gone back": (
        TILES, "rounds + (_tile_of(rounds) < tiles)", "rounds + (_tile_of(0) < tiles % gl.num_programs(0))"
    ),
    "a quotient that is one off stays": (TILES, "quotient, rest = quotient + missed, rest - missed * by", "pass"),
    "entries behind the schedule are read": (
        TILES._replace(programs=12),
        ", entries)\n        return gl.load(entry)",
        ", 9**9)\n        return gl.load(entry)",
    ),
    "empty groups get no zeros": (
        TILES, "(1 if B.accumulate else 0)", "1"
    ),
    "a group's last stage is multiplied whole": (
        DECODED, 'if B.along == "k":\n        end', "if False:\n        end"
    ),
    "a group's last blocks are left out": (DECODED, "if end + i < last:", "if False:"),
    "a block of the next group is multiplied": (DECODED, "if end + i < last:", "if end + i < last + 1:"),
    "a stage is freed while it is multiplied": (DECODED, "0, B.depth, LIVE, a_ring", "0, B.depth, 2 * LIVE, a_ring"),
    "the stage after is freed": (
        DECODED,
        "if k > first:\n                free_stage(_previous_stage(stage, B.stages)",
        "if k > first:\n                free_stage(stage",
    ),
    "the last stage is not freed": (DECODED, "        if first < end:\n", "        if last < 0:\n"),
    "a stage is freed by who has read none": (
        DECODED,
        "        if first < end:\n            free_stage(_previous_stage(stage, B.stages)",
        "        if True:\n            free_stage(stage",
    ),
    "the last products are not waited for": (DECODED, "warpgroup_mma_wait(0, deps=[acc0, acc1])", "(acc0, acc1)"),
    "a consumer without work frees nothing decoded": (
        DECODED,
        "        if LIVE == 0:\n            free_stage(stage)\n",
        "        if LIVE == 0:\n            pass\n",
    ),
    "the second wave is the first": (DECODED, "WAVE + B.stride, B)", "WAVE, B)"),
    "tensor scales are left out": (DECODED, "acc0 * scale", "acc0"),
    "what is empty is scaled": (DECODED, "gl.where(first < last, scale, 0.0)", "scale"),
    "a stage is read before it is full": (
        DECODED,
        "        mbarrier.wait(full.index(stage), phase)\n        if LIVE == 0:",
        "        if LIVE == 0:",
    ),
}  # fmt: skip


@functools.cache
def check_control(trial: Trial) -> None:
    """The kernel without a fault passes in every order that those with one are tried in."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        assert not trial.differs(patch, simulator.without_fault(MODULES[trial.module], Path(folder)))


@pytest.mark.parametrize(("trial", "old", "new"), FAULTS.values(), ids=FAULTS)
def test_the_simulator_sees(monkeypatch, tmp_path, trial, old, new):
    check_control(trial)
    faulty = simulator.with_fault(MODULES[trial.module], old, new, tmp_path)
    with contextlib.suppress(simulator.SimulationError):
        assert trial.differs(monkeypatch, faulty)
