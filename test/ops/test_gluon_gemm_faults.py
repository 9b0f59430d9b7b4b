"""The Hopper kernel of GEMMs in orders of its partitions in which races, deadlocks and other faults show.

Faults of each kind show that the simulator looks for them: in some order each must fail or give another product. Wrong
rows, columns and groups need no special order: test_gluon_gemm.py sees them.
"""

import contextlib
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
TRIALS = {"plain": PLAIN, "grouped": GROUPED, "decoded": DECODED}
TRIALS |= {"one wave": GROUPED._replace(build="128x128"), "whole": GROUPED._replace(routing="whole")}

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
    "a barrier expects too few bytes": (PLAIN, "expect(bar, B.copied_bytes)", "expect(bar, B.copied_bytes - 512)"),
    "a barrier counts one consumer": (
        PLAIN, "make_barriers(B.stages, _WARPS * B.consumers)", "make_barriers(B.stages, _WARPS)"
    ),
    "output is staged before the last copy left": (
        PLAIN, "tma.store_wait(B.waves - 1)\n", "tma.store_wait(B.waves)\n"
    ),
    "the program ends before its copies": (PLAIN, "    if B.copy_out:\n        tma.store_wait(0)\n", ""),
    "columns behind the output are written": (PLAIN, "mask = own[:, None] & (columns < N)[None, :]", "mask = None"),
    "the last products are not waited for": (DECODED, "warpgroup_mma_wait(0, deps=[acc0, acc1])", "(acc0, acc1)"),
    "a stage is read before it is full": (
        DECODED,
        "        mbarrier.wait(full.index(stage), phase)\n        if LIVE == 0:",
        "        if LIVE == 0:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_the_kernel_is_right_in_every_order_that_shows_a_fault(monkeypatch, trial):
    assert not trial.differs(monkeypatch, MODULES[trial.module])


@pytest.mark.parametrize(("trial", "old", "new"), FAULTS.values(), ids=FAULTS)
def test_the_simulator_sees(monkeypatch, tmp_path, trial, old, new):
    faulty = simulator.with_fault(MODULES[trial.module], old, new, tmp_path)
    with contextlib.suppress(simulator.SimulationError):
        assert trial.differs(monkeypatch, faulty)
