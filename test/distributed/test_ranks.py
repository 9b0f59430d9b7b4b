"""Cases over ranks that wait for each other, crash, or raise nothing."""

from __future__ import annotations

import ranks
from wrong_ranks import nothing_raises, one_computes_alone, one_crashes


def test_who_sits_a_case_out_waits_as_long_as_it_takes(tmp_path):
    assert ranks.spawn(one_computes_alone, 2, tmp_path, ["long", "again"], 1)[0] == {"long": None, "again": None}


def test_of_a_crash_one_learns_the_signal_and_where_each_rank_was(tmp_path):
    waited, crashed = ranks.spawn(one_crashes, 2, tmp_path, ["crashes", "behind"])
    assert "did not end: process 1 terminated with signal SIGSEGV" in crashed["crashes"]
    assert "Fatal Python error: Segmentation fault" in crashed["crashes"]
    for left in (waited, crashed):
        assert "in computes_or_crashes" in left["crashes"] and "behind" not in left


def test_where_nothing_was_raised_the_case_says_so(tmp_path):
    (left,) = ranks.spawn(nothing_raises, 1, tmp_path)
    assert "DID NOT RAISE" in "".join(left.values())
