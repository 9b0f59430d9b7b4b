"""tune_quantize: every way gives a cell, wrong bits and failures are said, and the kernels' tables are left alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
import tune_quantize

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu")


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_prints_every_way_of_every_case(capsys):
    assert tune_quantize.main(["--smoke"]) == 0
    header, _, *rows = rows_of(capsys.readouterr().out)
    assert header == ["case", "way", "48x272"]
    ways = [(case, way.name) for case, ways in tune_quantize.WAYS.items() for way in ways]
    assert [(case, way.removesuffix(" *")) for case, way, _ in rows] == ways
    assert len(set(ways)) == len(ways)
    assert all(float(share) >= 0 for _, _, share in rows)


def test_marks_the_one_way_of_a_case_that_the_package_uses(capsys):
    tune_quantize.main(["--smoke", "--shapes", "16x16"])
    marked = [case for case, way, _ in rows_of(capsys.readouterr().out)[2:] if way.endswith(" *")]
    assert marked == list(tune_quantize.WAYS)


@pytest.mark.parametrize("case", tune_quantize.WAYS)
def test_a_way_holds_while_it_runs_and_no_longer(case):
    modules = {way.module for way in tune_quantize.WAYS[case]}
    before = [{name: value for name, value in vars(m).items() if name.isupper()} for m in modules]
    for way in tune_quantize.WAYS[case]:
        with tune_quantize.tables(way):
            assert tune_quantize.is_set(way)
        assert [{name: value for name, value in vars(m).items() if name.isupper()} for m in modules] == before


def test_wrong_bits_and_failures_are_said_and_not_timed(monkeypatch):
    first, second, third, *_ = tune_quantize.WAYS["columnwise"]
    make = tune_quantize.job

    def job(*arguments):
        work = make(*arguments)
        original = work.ours(())["ours"]

        def run(*x, **options):
            if tune_quantize.is_set(second):
                raise RuntimeError("out of registers")
            result = original(*x, **options)
            if not tune_quantize.is_set(third):
                return result
            return result._replace(columnwise=result.columnwise._replace(scale=result.columnwise.scale * 2))

        return dataclasses.replace(work, ours=lambda inputs: {"ours": run})

    monkeypatch.setattr(tune_quantize, "job", job)
    cells = tune_quantize.measure("columnwise", (16, 16), torch.device("cpu"), 1.0, 0.001)
    assert float(cells[first.name]) >= 0
    assert cells[second.name] == "RuntimeError: out of registers"
    assert cells[third.name] == "WRONG, bits differ from the reference's; not timed"
