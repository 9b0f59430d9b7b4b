"""Shapes, routings, rooflines and errors, of which the benchmarks are made."""

from __future__ import annotations

import math

import pytest
import torch
from common import driver, errors, roofline, shapes
from common.shapes import ROUTINGS, Experts, group_ends

from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter")


def chosen(named: dict, *argv: str, smoke: bool = False) -> list:
    args = driver.parser("", (named, "large")).parse_args(argv)
    args.smoke = smoke
    shapes.choose(args)
    return args.shapes


def test_shapes_are_chosen_by_name_or_size_once_each(capsys):
    first, second, third = shapes.LINEAR["large"]
    assert chosen(shapes.LINEAR, "--shapes", "16384x14336x4096", "large") == [third, first, second]
    assert chosen(shapes.LINEAR) == shapes.LINEAR["large"]
    assert chosen(shapes.LINEAR, smoke=True) == shapes.LINEAR["smoke"]
    assert chosen(shapes.MIXTURES, "--shapes", "5x4x3x2") == [Experts(5, 4, 3, 2)]
    for text in ("mixtral", "5x4x3", "5x4x3x0", "5x4x3xa"):
        with pytest.raises(SystemExit):
            chosen(shapes.MIXTURES, "--shapes", text)
        assert f"no shape '{text}'; give tokens x experts x hidden x dim" in capsys.readouterr().err


@pytest.mark.parametrize("count", (1, 3, 128), ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_an_expert(routing, count):
    ends = group_ends(routing, 1000, count, torch.device("cpu"))
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32 and ends[-1] == 1000 and (sizes >= 0).all()
    if count > 1:
        spread = (sizes.max() / sizes.float().mean()).item()
        assert {"balanced": spread < 1.1, "skewed": spread > 1.5, "empty": (sizes == 0).sum() >= count // 2}[routing]


def test_a_floor_is_the_greater_of_bytes_and_operations():
    ceilings = roofline.Ceilings(copy=4.0, bf16=800.0, fp8=1250.0)
    assert ceilings.floor_us(4 * 10**12) == pytest.approx(1e6)
    assert ceilings.floor_us(0, 80 * 10**12, "bf16") == pytest.approx(1e5)
    assert ceilings.floor_us(8 * 10**6, 10**6) == pytest.approx(2.0)


def test_errors_are_relative_to_what_was_expected(monkeypatch):
    expected = torch.randn(7, 5, dtype=torch.bfloat16)
    actual = expected.float() * 1.01
    monkeypatch.setattr(errors, "_PIECE", 8)
    assert errors.relative_error(actual.t(), expected.t()) == pytest.approx(relative_error(actual, expected))
    assert errors.relative_error(expected, expected) == 0 == errors.relative_error(expected[:0], expected[:0])
    actual[6, 4] = math.nan
    assert math.isnan(errors.relative_error(actual, expected))
    for error in (math.nan, 0.2):
        with pytest.raises(errors.Wrong, match=f"relative error {error:.2g} above 0.1"):
            errors.check(error, 0.1)
