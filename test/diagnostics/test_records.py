"""Reports: which layers stand out, the printed table, and what another recipe would lose."""

import math

import pytest
from expecttest import assert_expected_inline

from torchao_blockwise.diagnostics import GradientReport, Recommendation, Report, TensorReport
from torchao_blockwise.diagnostics.records import recommend


def tensor(layer, tensor="x", direction="rowwise", recipe="fp8", trains=True, *, sqnr=31.0, underflow=0.0, nonfinite=0):
    return TensorReport(
        layer, tensor, direction, recipe, trains, 100, nonfinite, 1.0, 0.0, underflow, 0.5, (-3.0, 2.0), {}, sqnr, 0.99
    )


def report(*tensors, ratios=(), recipe="fp8", first=None) -> Report:
    gradients = [GradientReport(layer, recipe, True, ratio) for layer, ratio in dict(ratios).items()]
    return Report(7, tuple(tensors), (*gradients, GradientReport("", "", True, 12.5)), first)


LAYERS = [tensor(f"layers.{i}", sqnr=31 + i / 10) for i in range(5)]


def names(*tensors, **options) -> list[str]:
    return [recommendation.layer for recommendation in recommend(report(*tensors, **options))]


@pytest.mark.parametrize("kind", (("x", "rowwise"), ("w", "both"), ("dy", "columnwise")))
def test_a_layer_with_twice_the_error_of_the_median_stands_out(kind):
    others = [tensor(f"layers.{i}", *kind, sqnr=20.0) for i in range(4)]
    assert names(*others, tensor("bad", *kind, sqnr=14.0)) == []
    name = "w" if kind[0] == "w" else " ".join(kind)
    expected = [Recommendation("bad", f"{name} has 13.9 dB SQNR, the median layer 20.0")]
    assert recommend(report(*others, tensor("bad", *kind, sqnr=13.9))) == expected


def test_tensors_are_compared_with_their_like():
    """That dy loses more than x in every layer makes no layer stand out; exact tensors are no measure for others."""
    assert names(*LAYERS, *(tensor(f"layers.{i}", "dy", sqnr=12.0) for i in range(5))) == []
    exact = [tensor(f"layers.{i}", "dy", sqnr=math.inf) for i in range(4)]
    usual = [tensor(f"usual.{i}", "dy", sqnr=32.0) for i in range(3)]
    assert names(*exact) == names(*exact, usual[0]) == []
    assert names(*exact, *usual, tensor("bad", "dy", sqnr=25.0)) == ["bad"]


def test_other_reasons_the_worst_first():
    """NaN, gradients below their noise, and elements that are lost."""
    bad, lost = tensor("nan", sqnr=math.nan, nonfinite=3), tensor("lost", underflow=51.0)
    found = recommend(report(*LAYERS, lost, bad, ratios={"layers.1": 1.73, "layers.2": 1.74, "layers.3": 0.5}))
    assert found == [
        Recommendation("nan", "x rowwise has 3 NaN or Inf"),
        Recommendation("layers.3", "its gradient is 0.50 × its quantization noise, below √3"),
        Recommendation("layers.1", "its gradient is 1.73 × its quantization noise, below √3"),
        Recommendation("lost", "x rowwise loses 51 % of its elements to zero, the median layer 0 %"),
    ]
    assert names(*LAYERS, tensor("bad", underflow=49.0)) == []
    assert names(*(tensor(f"layers.{i}", underflow=26.0) for i in range(5)), lost) == []


def test_another_recipe():
    asked = [tensor(f"layers.{i}", recipe="nvfp4", trains=False, sqnr=20 - 3 * (i == 2) * 3) for i in range(5)]
    both = report(*LAYERS, *asked)
    assert [r.layer for r in recommend(both, "nvfp4")] == ["layers.2"] and recommend(both) == []
    assert both.what_if("nvfp4") == {f"layers.{i}": 11 if i == 2 else 20 for i in range(5)}
    # What trains by it is part of the answer too.
    assert both.what_if("fp8")["layers.4"] == pytest.approx(31.4)


def test_text_and_data():
    written = report(*LAYERS[:2], tensor("layers.1", "dy", sqnr=math.nan), ratios={"layers.1": 3.0}, first=("a", "dy"))
    assert_expected_inline(
        str(written),
        """\
step 7; NaN or Inf first in a dy
layer     recipe  worst tensor  SQNR dB  underflow %  saturated %  gradient / noise
--------  ------  ------------  -------  -----------  -----------  ----------------
layers.1  fp8     dy rowwise        nan         0.00         0.50              3.00
layers.0  fp8     x rowwise       31.00         0.00         0.50               nan
--------  ------  ------------  -------  -----------  -----------  ----------------
all                                                                           12.50""",
    )
    data = written.to_dict()
    assert data["step"] == 7 and data["tensors"][0]["layer"] == "layers.0"
    assert data["gradients"][0] == {"layer": "layers.1", "recipe": "fp8", "trains": True, "to_noise": 3.0}
