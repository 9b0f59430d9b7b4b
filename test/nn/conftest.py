"""Layers are computed by the reference on a CPU, except where kernels are tested."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def by_the_reference(request):
    if request.path.stem not in ("test_kernels", "test_permute"):
        request.getfixturevalue("no_interpreter")
