"""Tokens in groups and their quantized copies for tests: each group as if it were alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    NVFP4_1X16,
    BlockFormat,
    Copies,
    Operand,
)
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.testing import assert_operands_equal, random_tensor, with_special_values

# (group ends, tokens)
GROUPS = {
    "one": ([130], 130),
    "ragged": ([5, 140, 141, 200], 200),
    "empty": ([0, 0, 20, 20, 75, 75], 75),
    "one token": ([0, 1, 1], 1),
    "whole blocks": ([128, 128, 384], 384),
    "all to one": ([0, 0, 150, 150], 150),
    "tail": ([3, 140, 140], 190),
    "tail of a token": ([1], 2),
    "all tail": ([0, 0], 140),
    "no tokens": ([0, 0, 0], 0),
    "257 groups": ([2 * i // 100 + 3 * (i > 200) for i in range(257)], 10),
}
groups = pytest.mark.parametrize("ends, tokens", GROUPS.values(), ids=GROUPS)
few_groups = pytest.mark.parametrize("ends, tokens", [GROUPS["ragged"], GROUPS["tail"]], ids=("ragged", "tail"))
formats = pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
copies = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)


def int32(ends, device="cpu") -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def tokens_of(ends, tokens: int, columns: int, fmt=FP8_1X128, dtype=torch.bfloat16, device="cpu") -> torch.Tensor:
    """Values of many magnitudes in the groups, NaN and Inf after the last."""
    x = random_tensor(tokens, columns, dtype=dtype) if tokens else torch.zeros(0, columns, dtype=dtype)
    if tokens:
        x = with_special_values(x, fmt)
    x[ends[-1] :] = torch.tensor([float("nan"), float("inf")])[torch.arange(columns) % 2].to(dtype)
    return x.to(device)


def each_group_alone(x, ends, fmt: BlockFormat, rowwise=True, columnwise=True, power_of_2_scales=False) -> Copies:
    """By the plain reference, a group at a time, sizes known."""
    block, per_byte = fmt.block[1], fmt.element.per_byte
    options = {"power_of_2_scales": power_of_2_scales, "backend": "reference"}
    if fmt.has_global_scale:
        options["tensor_amax"] = x[: ends[-1]].abs().float().max() if x[: ends[-1]].numel() else torch.zeros(())
    of_rows = of_columns = None
    if rowwise:
        in_groups = torch.cat((x[: ends[-1]], torch.zeros_like(x[ends[-1] :])))
        of_rows = ops.quantize(in_groups, fmt, **options).rowwise
    if columnwise:
        rest = padded_tokens(len(x), len(ends), block)
        qdata, scale, operand = [], [], None
        for start, end in zip([0, *ends, None], [*ends, None]):
            group = x[start:end] if end is not None else x.new_zeros(rest, x.shape[1])
            operand = ops.quantize(group, fmt, rowwise=False, columnwise=True, **options).columnwise
            length = -(-group.shape[0] // block) * block
            rest -= length
            qdata.append(F.pad(operand.qdata.view(torch.uint8), (0, length // per_byte - operand.qdata.shape[1])))
            scale.append(operand.scale.view(torch.uint8) if operand.scale.itemsize == 1 else operand.scale)
        scale = torch.cat(scale, 0 if fmt.transposed_scales else 1).view(operand.scale.dtype)
        qdata = torch.cat(qdata, 1).view(operand.qdata.dtype)
        of_columns = Operand(qdata, scale, operand.global_scale, fmt.name)
    return Copies(of_rows, of_columns)


def assert_copies_equal(got: Copies, expected: Copies) -> None:
    assert type(got) is type(expected) is Copies
    for a, b in zip(got, expected):
        assert (a is None) == (b is None)
        if b is not None:
            assert_operands_equal(a, b)
