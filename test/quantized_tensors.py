"""Quantized tensors of every kind for tests, and their comparison."""

import pytest
from torch import nn

from torchao_blockwise import BlockwiseFP8TrainingConfig, NVFP4TrainingConfig
from torchao_blockwise.testing import assert_bitwise_equal

CONFIG = BlockwiseFP8TrainingConfig(master_weights=False)
CONFIGS = {"e4m3": CONFIG, "e2m1": NVFP4TrainingConfig(master_weights=False)}
SHAPES = ((256, 384), (2, 128, 256), (3, 2, 16, 16), (129, 127), (1, 1), (0, 128), (128, 0), (2, 0, 16))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def with_config(from_hp, w):
    return from_hp(w, config=CONFIGS[from_hp(w).fmt.element.name])


def assert_same(a, b, *, is_parameter: bool | None = None) -> None:
    """Two tensors of one kind with the same payload and metadata."""
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and a.fmt is b.fmt and a.config == b.config
    assert a.requires_grad == b.requires_grad
    if is_parameter is not None:
        assert isinstance(a, nn.Parameter) == is_parameter
    for x, y in zip(a.parts().values(), b.parts().values()):
        assert_bitwise_equal(x, y)
