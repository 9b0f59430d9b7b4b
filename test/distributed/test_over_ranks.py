"""FSDP2, tensor and expert parallelism, ZeRO and DDP over ranks: bitwise identical to one device."""

from __future__ import annotations

import pytest
import rank_suites
from helpers import selected_cases
from ranks import spawn_cases


def case_id(case) -> str:
    suite, _, *arguments = case
    return "-".join((suite, *(str(x).replace("tensor_parallel_", "").replace(" ", "") for x in arguments)))


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    """Return, of each rank, what it raised in each selected case."""
    left: list[dict] = [{} for _ in range(4)]
    for processes in (2, 4):
        cases = [case for case in selected_cases(request) if case[1] == processes]
        folder = tmp_path_factory.mktemp(f"of_{processes}_ranks")
        of_ranks = spawn_cases(rank_suites.run, processes, folder, cases, rank_suites.size_of, rank_suites.on_gpus)
        for results, of_rank in zip(left, of_ranks):
            results.update(of_rank)
    return left


@pytest.mark.parametrize("case", rank_suites.params(), ids=case_id)
def test_over_ranks(case, raised):
    results = [of_rank.get(case, "not reached") for of_rank in raised[: rank_suites.size_of(case)]]
    failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result is not None]
    assert not failures, "\n".join(failures)
