"""docs/optimizers.md says what each case gives."""

from __future__ import annotations

import optimizer_cases
import pytest
from optimizer_cases import CASES, WAYS

pytestmark = [
    pytest.mark.usefixtures("no_interpreter", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),
]
# Only one compiled case runs by default. (name, way) is one option, so that all eager cases do.
CELLS = [
    pytest.param((name, way), id=f"{name}-{way}", marks=pytest.mark.slow if compiled and name != "SGD" else ())
    for name in CASES
    for way, (_, compiled) in WAYS.items()
]


@pytest.mark.parametrize("cell", CELLS)
def test_the_page_says_what_a_case_gives(cell):
    name, way = cell
    pytest.importorskip(CASES[name].package)
    assert optimizer_cases.on_the_page()[name][1:-1][list(WAYS).index(way)] == optimizer_cases.outcome(name, way)


def test_the_page_has_the_cases_and_their_versions():
    page = optimizer_cases.on_the_page()
    assert page == {name: optimizer_cases.described(name, row[1:-1]) for name, row in page.items()}
    assert list(page) == list(CASES)
