"""What the benchmarks are made of: shapes, routings, floors, pictures and errors."""

from __future__ import annotations

import argparse
import math

import errors
import experts
import pytest
import roofline
import shapes
import torch
from experts import MODELS, ROUTINGS, Experts, group_ends
from timing import Timing

from torchao_blockwise.testing import relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


# --- shapes and routings ----------------------------------------------------------------------------------------------


def test_the_shapes_of_the_specification_are_there():
    every = shapes.select(["all"])
    assert {s.tokens for s in every} == {64, 4096, 16384, 32768, 4097} and len(every) == len(set(every))
    weights = {(s.out_features, s.in_features) for s in every}
    assert {(10944, 2048), (576, 7168), (18432, 7168), (14336, 4096), (28672, 8192)} <= weights
    assert {shapes.name_of(s) != "" for s in every} == {True}
    assert shapes.name_of(shapes.Shape(1, 7168, 18432)) == "deepseek_v3_671b mlp.down"


def test_shapes_are_selected_by_name_or_number_once_each():
    assert shapes.select(["16384x14336x4096", "peers"]) == [shapes.PEERS[5], *shapes.PEERS[:5]]
    assert [s.tokens for s in shapes.select(["4096x2048x7168", "64x2048x7168"], tokens=[7, 8])] == [7, 8]
    llama = shapes.select(["llama_8b"], tokens=[64])
    assert len(llama) == 4 and {s.tokens for s in llama} == {64}
    with pytest.raises(ValueError, match="no shape '4096x7168'; give tokens x out x in"):
        shapes.select(["4096x7168"])


def test_experts_are_those_of_the_models():
    deepseek = MODELS["deepseek_v3_671b_ep8"]
    assert deepseek.weights == {"gate_up": (32, 4096, 7168), "down": (32, 7168, 2048)}
    assert experts.parse("mixtral_8x7b") == [Experts(16384, 8, 14336, 4096)]
    assert experts.parse("5x4x3x2") == [Experts(5, 4, 3, 2)] and len(experts.parse("all")) == len(MODELS)
    for text in ("mixtral", "5x4x3", "5x4x3x0", "5x4x3xa"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"no experts '{text}'; give tokens x experts x hidden"):
            experts.parse(text)


@pytest.mark.parametrize("count", (1, 3, 128), ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_an_expert(routing, count):
    ends = group_ends(routing, 1000, count, CPU)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32 and ends[-1] == 1000 and (sizes >= 0).all()
    if count > 1:
        spread = (sizes.max() / sizes.float().mean()).item()
        assert {"balanced": spread < 1.1, "skewed": spread > 1.5, "empty": (sizes == 0).sum() >= count // 2}[routing]


# --- rooflines --------------------------------------------------------------------------------------------------------

CEILINGS = roofline.Ceilings(copy=4.0, bf16=800.0, fp8=1250.0)


def test_a_floor_is_the_greater_of_bytes_and_operations():
    assert CEILINGS.floor_us(4 * 10**12) == pytest.approx(1e6)
    assert CEILINGS.floor_us(0, 125 * 10**12) == pytest.approx(1e5)
    assert CEILINGS.floor_us(0, 80 * 10**12, "bf16") == pytest.approx(1e5)
    assert CEILINGS.floor_us(8 * 10**6, 10**6) == pytest.approx(2.0)


def test_ceilings_follow_from_times(monkeypatch, device):
    def time_runs(runs, device, seconds):
        assert all(run(*sets[0]) is not None for run, sets in runs.values())
        return {"copy": Timing.of([1.0]), "bf16": Timing.of([2.0]), "fp8": fp8}

    monkeypatch.setattr(roofline, "time_runs", time_runs)
    flops, fp8 = 2 * roofline._SMOKE_WIDTH**3, Timing.of([0.5])
    ceilings = roofline.measure_ceilings(torch.device(device), smoke=True)
    assert ceilings.copy == pytest.approx(2 * 2**20 / 1e6)
    assert (ceilings.bf16, ceilings.fp8) == pytest.approx((flops / 2e6, flops / 0.5e6))
    fp8 = "no such hardware"
    assert roofline.measure_ceilings(torch.device(device), smoke=True).fp8 == pytest.approx(flops / 2e6)


def test_the_picture_is_drawn_whatever_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    series = [roofline.Series("ours", [(1.0, 0.5), (100.0, 3.0)], True), roofline.Series("none", [], False)]
    roofs = {"sloped": (0.1, 4.0), "flat": (math.inf, 5.0)}
    assert roofline.draw(tmp_path / "a.png", "t", "s", series, roofs, ("x", "y"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not roofline.draw(tmp_path / "b.png", "t", "s", series[1:], roofs, ("x", "y"))


def test_series_are_rows_that_agree_and_peers(monkeypatch):
    class Results:
        ceilings, device_name = CEILINGS, "a GPU"
        rows = (
            {"case": "a", "MiB": 1.0, "TB/s": 2.0, "us": 3.0, "peers us": {"p": 6.0}},
            {"case": "b", "MiB": 4.0, "TB/s": 3.0, "us": 1.0},
            {"case": "a", "MiB": 8.0, "TB/s": 2.5, "us": 1.0},
        )

    drawn = roofline.picture(Results, "things", "case")
    assert drawn["series"] == [
        ("a", [(1.0, 2.0), (8.0, 2.5)], True),
        ("b", [(4.0, 3.0)], True),
        ("p", [(1.0, 1.0)], False),
    ]
    assert drawn["roofs"] == {"device copy": (math.inf, 4.0)} and drawn["labels"] == ("MiB that must move", "TB/s")


def test_errors_are_relative_to_what_was_expected(monkeypatch):
    expected = torch.randn(7, 5, dtype=torch.bfloat16)
    actual = expected.float() * 1.01
    monkeypatch.setattr(errors, "_PIECE", 8)
    assert errors.relative_error(actual, expected) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(actual.t(), expected.t()) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(expected, expected) == 0 == errors.relative_error(expected[:0], expected[:0])
    actual[6, 4] = math.nan
    assert math.isnan(errors.relative_error(actual, expected))
    with pytest.raises(ValueError, match=r"shapes differ, got \[5, 7\] and \[7, 5\]"):
        errors.relative_error(actual.t(), expected)
    for error in (math.nan, 0.2):
        with pytest.raises(errors.Wrong, match=f"relative error {error:.2g} above 0.1"):
            errors.check(error, 0.1)
