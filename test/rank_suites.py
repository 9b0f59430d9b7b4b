"""Suites that run over ranks. A test file names its POOLS of suites; a pool of processes runs all their cases in turn.

A suite is a module with

- CASES: {processes of its pool: (cases of the default tier, cases that are slow)}; a case is a tuple of arguments,
- start(rank, ranks): called in each process, if there is one; may return `run(*case)`, which raises where something is
  wrong. By default a case is the name of a function of the suite and what it takes after the rank,
- ranks_of(*case), if a case may take only the first ranks of the pool; on_gpus(*case), if it may run on GPUs.
"""

import importlib
from collections.abc import Iterable

import pytest
import torch.distributed as dist
from ranks import gpus, join, run_in_turn, spawn_cases


def cases_of(pools: Iterable[dict[str, tuple]]):
    """Parametrize a test by (suite, processes, *arguments) of every case of pools {suite: what importorskip takes}."""
    made = []
    for name, needs in (pair for pool in pools for pair in pool.items()):
        try:
            if not dist.is_available():
                pytest.skip("needs torch.distributed")
            for need in needs:
                pytest.importorskip(*need, exc_type=ImportError)
        except pytest.skip.Exception as skipped:
            made.append(pytest.param((name, 0), marks=pytest.mark.skip(reason=str(skipped))))
            continue
        for processes, tiers in importlib.import_module(name).CASES.items():
            for cases, marks in zip(tiers, ((), pytest.mark.slow)):
                made += [pytest.param((name, processes, *case), marks=marks) for case in cases]
    return pytest.mark.parametrize("case", made, ids=_id_of)


def _id_of(case: tuple) -> str:
    suite, _, *arguments = case
    return "-".join((suite, *(str(x).replace("tensor_parallel_", "").replace(" ", "") for x in arguments)))


def _answer(case, question: str, default):
    suite, _, *arguments = case
    return getattr(importlib.import_module(suite), question, lambda *case: default)(*arguments)


def size_of(case) -> int:
    return _answer(case, "ranks_of", case[1])


def _runs(case) -> bool:
    """Whether the case runs here: on a CPU, or on as many GPUs as it has ranks."""
    return not gpus() or (size_of(case) <= gpus() and _answer(case, "on_gpus", False))


def raised_by_ranks(request, tmp_path_factory) -> list[dict]:
    """Return, of each rank, what it raised in each selected case of the module that requests it."""
    left: list[dict] = [{} for _ in range(4)]
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = [case for case in (item.callspec.params.get("case") for item in items) if case and _runs(case)]
    for pool in request.module.POOLS:
        for processes in range(1, 5):
            cases = [case for case in selected if case[0] in pool and case[1] == processes]
            folder = tmp_path_factory.mktemp(f"of_{processes}_ranks")
            for results, of_rank in zip(left, spawn_cases(_run, processes, folder, cases)):
                results.update(of_rank)
    return left


def check(case, raised: list[dict]) -> None:
    """No rank of the case has raised anything."""
    if not _runs(case):
        pytest.skip("needs a CPU, or more GPUs")
    results = [of_rank.get(case, "not reached") for of_rank in raised[: size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)


def _run(rank: int, ranks: int, port: int, file: str, cases) -> None:
    join(rank, ranks, port, seconds=180)
    suites = {name: _started(importlib.import_module(name), rank, ranks) for name in dict.fromkeys(c[0] for c in cases)}
    run_in_turn(lambda case: suites[case[0]](*case[2:]), cases, size_of, rank, file)


def _started(suite, rank: int, ranks: int):
    run = suite.start(rank, ranks) if hasattr(suite, "start") else None
    return run or (lambda check, *arguments: getattr(suite, check)(rank, *arguments))
