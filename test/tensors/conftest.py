"""Tensors are computed by the reference on a CPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def by_the_reference(no_interpreter):
    pass
