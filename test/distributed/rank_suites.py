"""The suites that run over ranks. All cases of as many processes run in one pool of them, suite by suite.

A suite is a module with

- CASES: {processes of its pool: (cases of the default tier, cases that are slow)}; a case is a tuple of arguments,
- start(rank, ranks): called in each process, gives `run(*case)`, which raises where something is wrong,
- ranks_of(*case), if a case may take the first ranks of the pool only; on_gpus(*case), if it may run on GPUs;
- NEEDS: the packages without which it is skipped.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
from ranks import join, run_in_turn

# Behind those that leave something behind: a process group that is broken, and accelerate that takes CPUs for GPUs.
SUITES = (
    "mesh_cases",
    "primary_weight_checks",
    "fusion_run",
    "monitor_run",
    "writers_over_ranks",
    "master_weight_checks",
    "accelerate_run",
)


def params() -> list:
    """(suite, processes, *case) of every case."""
    made = []
    for name in SUITES:
        suite = importlib.import_module(name)
        missing = [package for package in getattr(suite, "NEEDS", ()) if find_spec(package) is None]
        skipped = [pytest.mark.skip(reason=f"needs {package}") for package in missing]
        for processes, tiers in suite.CASES.items():
            for cases, marks in zip(tiers, ((), (pytest.mark.slow,))):
                made += [pytest.param((name, processes, *case), marks=(*marks, *skipped)) for case in cases]
    return made


def _answer(case, question: str, default):
    suite, _, *arguments = case
    return getattr(importlib.import_module(suite), question, lambda *case: default)(*arguments)


def size_of(case) -> int:
    return _answer(case, "ranks_of", case[1])


def on_gpus(case) -> bool:
    return _answer(case, "on_gpus", False)


def run(rank: int, ranks: int, port: int, file: str, cases) -> None:
    join(rank, ranks, port, seconds=180)
    suites = {name: importlib.import_module(name).start(rank, ranks) for name in dict.fromkeys(c[0] for c in cases)}
    run_in_turn(lambda case: suites[case[0]](*case[2:]), cases, size_of, rank, file)
