"""Faults in the Hopper kernel of GEMMs: in some order of the partitions each must fail or give another product.

Races, deadlocks and accesses out of bounds, which show that the simulator looks for them. Rows, columns and groups that
are not those that they should be need no special order: test_gluon_gemm.py sees them.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import gluon_simulator as simulator
import pytest
import torch
from gluon_gemm import case, decoded, is_right, pipeline, product, simulate

MODULES = {"pipeline": pipeline, "decoded": decoded}


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

    def differs(self, monkeypatch, copied) -> bool:
        """Whether the kernel gives a wrong product in some order, with `copied` in the place of the module."""
        if self.module == "pipeline":
            launcher = simulate(monkeypatch, copied.matmul_kernel)
        else:
            monkeypatch.setattr(pipeline, "accumulate_decoded", copied.accumulate_decoded)
            launcher = simulate(monkeypatch)
        launcher.programs = self.programs
        for of in (case(kind, self.routing, n, k) for kind in self.kinds for n, k in self.sizes):
            for launcher.seed in range(self.seeds):
                if not is_right(product(of, torch.bfloat16, self.build), of):
                    return True
        return False


# More blocks than stages, several tiles a program, with and without copies of the output.
PLAIN = Trial("pipeline", ("one_row",), programs=1, routing=((500,), 0), sizes=((256, 2000), (257, 2000)), seeds=5)
GROUPED = Trial("pipeline")
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
        "            free_stage_after(a_scale, 2, stage, zero)\n            # Here",
        "            free_stage(stage)\n            # Here",
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
    "a wave is staged before a copy that left later": (
        WHOLE,
        '        if B.copy_out and B.along == "m":\n            # All copies',
        "        if False:\n            # All copies",
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
    "a consumer without work frees nothing": (
        GROUPED, "        if LIVE == 0:\n            free_stage(stage)\n", "        if LIVE == 0:\n"
    ),
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
