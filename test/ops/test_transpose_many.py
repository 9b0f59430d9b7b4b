"""ops.transpose_many: the transpose of each, whatever the list mixes."""

from __future__ import annotations

import torch
from shard_cases import FORMATS, SHAPES, backends, quantize

from torchao_blockwise import ops
from torchao_blockwise.testing import assert_operands_equal, random_tensor


@backends
def test_transpose_many_is_transpose_of_each(backend, device):
    operands = [quantize(random_tensor(*s, device=device), f, torch.bfloat16) for s in SHAPES for f in FORMATS]
    columns = [s[-1] for s in SHAPES for _ in FORMATS]
    got = ops.transpose_many(operands, columns=columns, backend=backend)
    for x, width, result in zip(operands, columns, got):
        want = ops.transpose(x, columns=width, backend="reference")
        assert_operands_equal(result, want)
        assert result.global_scale is x.global_scale
    assert ops.transpose_many([], backend=backend) == []
