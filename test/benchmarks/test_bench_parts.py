"""What the benchmarks are made of: shapes, routings, floors, pictures and errors."""

from __future__ import annotations

import argparse
import math

import errors
import experts
import layers
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


def test_groups_of_shapes_have_results_of_their_own():
    """The tracker's linears, forth and back, and the layers of train_llm's presets."""
    assert set(shapes.select(["tracker"])) == {
        (4096, 10944, 2048), (4096, 2048, 10944), (4096, 18432, 7168), (4096, 7168, 18432),
    }  # fmt: skip
    models = shapes.select(["models"])
    assert {(16384, 2304, 768), (16384, 768, 768), (16384, 4096, 768), (16384, 768, 2048)} < set(models)
    assert (16384, 2048, 8192) in models and len(models) == 8
    parse = argparse.ArgumentParser()
    shapes.add_arguments(parse)
    named = {
        text: shapes.suffix(parse.parse_args(["--shapes", *text.split()])) for text in ("models", "large", "16x32x64")
    }
    assert named == {"models": "_models", "large": "", "16x32x64": ""} and shapes.suffix(parse.parse_args([])) == ""
    assert experts.parse("models") == [Experts(32768, 16, 768, 768), Experts(65536, 32, 1024, 1024)]
    assert experts.suffix(argparse.Namespace(shapes=[experts.parse("models")])) == "_models"
    assert experts.suffix(argparse.Namespace(shapes=[experts.parse("large")])) == ""


def test_experts_are_those_of_the_models():
    deepseek = MODELS["deepseek_v3_671b_ep8"]
    assert deepseek.weights == {"gate_up": (32, 4096, 7168), "down": (32, 7168, 2048)}
    assert experts.parse("mixtral_8x7b") == [Experts(16384, 8, 14336, 4096)]
    assert experts.parse("5x4x3x2") == [Experts(5, 4, 3, 2)] and len(experts.parse("large")) == len(MODELS)
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


def test_a_speedup_is_the_products_and_what_quantizes_their_operands():
    # 8 s in bf16; 5.12 s in fp8 and 1 s of bytes.
    assert CEILINGS.speedup(6400 * 10**12, 4 * 10**12) == pytest.approx(8 / 6.12)
    assert roofline.specification("NVIDIA H200").copy == 4.8
    assert roofline.specification("NVIDIA H100 80GB HBM3").copy == 3.35
    assert roofline.specification("NVIDIA H100 PCIe") is None


def test_the_share_of_a_speedup_that_is_reached(monkeypatch):
    class Results:
        ceilings, device_name = CEILINGS, "NVIDIA H200"

    t, n, k = 256, 512, 384
    work = layers.Work({}, None, None, 0, 6 * t * n * k, {}, layers.quantized_bytes(t, (n, k)))
    got = layers.reached(work, "fp8", 1.5, Results)
    # bf16 read and both copies with their scales written, of x, of dy and, for each copy anew, of the weight.
    activations = t * (n + k) * (2 + 2 * (1 + 4 / 128))
    weight = 2 * n * k * (2 + 1 + 4 / 128**2)
    assert work.quantized_bytes["fp8"] == activations + weight
    assert work.quantized_bytes["fp8_primary"] == activations + 2 * n * k * (1 + 4 / 128**2)
    assert got["roofline x (measured)"] == CEILINGS.speedup(work.flops, work.quantized_bytes["fp8"])
    assert got["reached (measured)"] == pytest.approx(1.5 / got["roofline x (measured)"])
    assert got["reached (spec)"] == pytest.approx(1.5 / got["roofline x (spec)"])
    assert layers.reached(work, "nvfp4", 1.5, Results) == {}
    Results.device_name = "a CPU"
    assert set(layers.reached(work, "fp8", 1.5, Results)) == {"roofline x (measured)", "reached (measured)"}


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
