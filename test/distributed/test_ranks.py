"""Where ranks run: on GPUs what fits there, on the CPU the rest, and what lies behind a failure in new processes."""

from __future__ import annotations

import pytest
import ranks
from rank_checks import nothing_raises, one_computes_alone, one_crashes

# Name → how many ranks it needs.
SIZES = {"one": 1, "two": 2, "four": 4, "cpu alone": 2, "fails": 2, "behind": 2}


def spawn_cases(monkeypatch, folder, cases, gpus: int):
    """(what ranks left, what was spawned) where a rank is one that ends at the case that fails."""
    spawned = []

    def spawn(worker, count, place, chosen, device_type):
        spawned.append((device_type, count, list(chosen)))
        done = chosen[: chosen.index("fails") + 1] if "fails" in chosen else chosen
        return [{case: device_type for case in done if rank < SIZES[case]} for rank in range(count)]

    monkeypatch.setattr(ranks, "spawn", spawn)
    monkeypatch.setattr(ranks, "gpus", lambda: gpus)
    left = ranks.spawn_cases("worker", 4, folder, cases, SIZES.get, lambda case: case != "cpu alone")
    return left, spawned


@pytest.mark.parametrize("gpus", (0, 1, 2, 3, 8))
def test_cases_run_on_gpus_where_they_fit(gpus, monkeypatch, tmp_path):
    cases = ["four", "one", "cpu alone", "two"]
    left, spawned = spawn_cases(monkeypatch, tmp_path, cases, gpus)
    there = [case for case in cases if SIZES[case] <= gpus and case != "cpu alone"]
    expected = [("cuda", min(gpus, 4), there), ("cpu", 4, [case for case in cases if case not in there])]
    assert spawned == [(kind, count, chosen) for kind, count, chosen in expected if chosen]
    for rank, of_rank in enumerate(left):
        assert of_rank == {case: "cuda" if case in there else "cpu" for case in cases if rank < SIZES[case]}


def test_what_lies_behind_a_failure_runs_in_new_processes(monkeypatch, tmp_path):
    left, spawned = spawn_cases(monkeypatch, tmp_path, ["one", "fails", "behind", "two"], 0)
    assert [chosen for _, _, chosen in spawned] == [["one", "fails", "behind", "two"], ["behind", "two"]]
    assert left[1] == dict.fromkeys(("fails", "behind", "two"), "cpu")


def test_who_sits_a_case_out_waits_as_long_as_it_takes(tmp_path):
    assert ranks.spawn(one_computes_alone, 2, tmp_path, ["long", "again"], 1)[0] == {"long": None, "again": None}


def test_of_a_crash_one_learns_the_signal_and_where_each_rank_was(tmp_path):
    waited, crashed = ranks.spawn(one_crashes, 2, tmp_path, ["crashes", "behind"])
    assert "did not end: process 1 terminated with signal SIGSEGV" in crashed["crashes"]
    assert "Fatal Python error: Segmentation fault" in crashed["crashes"]
    for left in (waited, crashed):
        assert "in computes_or_crashes" in left["crashes"] and "behind" not in left


@pytest.mark.parametrize("in_turn", (True, False))
def test_where_nothing_was_raised_the_case_says_so(in_turn, tmp_path):
    (left,) = ranks.spawn(nothing_raises, 1, tmp_path, in_turn)
    assert "DID NOT RAISE" in "".join(left.values())
