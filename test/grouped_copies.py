"""Tokens in groups and their quantized copies for tests: each group compared with the same tokens by themselves."""

import itertools

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, NVFP4_1X16, BlockFormat, Copies, hadamard_number, hadamard_transform
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, with_special_values

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
    "many": ([2 * i // 100 + 3 * (i > 200) for i in range(257)], 10),
}
formats = pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
COPIES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


def int32(ends, device="cpu") -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


def tokens_of(ends, tokens: int, columns: int, dtype=torch.bfloat16, device="cpu", magnitudes: int = 1) -> torch.Tensor:
    """Values of many magnitudes, in this many different ones the groups; NaN and Inf after the last group."""
    x = random_tensor(tokens, columns, dtype=dtype) if tokens else torch.zeros(0, columns, dtype=dtype)
    if tokens and magnitudes == 1:
        x = with_special_values(x, FP8_1X128)
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        x[start:end] *= 4.0 ** (group % magnitudes)
    x[ends[-1] :] = torch.tensor([float("nan"), float("inf")])[torch.arange(columns) % 2].to(dtype)
    return x.to(device)


def amaxes_of(x: torch.Tensor, hadamard: bool):
    """The argument `tensor_amax` of these tokens: of a transform two. Chunks begin with the first token."""
    transformed = [hadamard_transform(x, hadamard_number(True))] if hadamard else []
    amaxes = [t.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32) for t in (x, *transformed)]
    return tuple(amaxes) if hadamard else amaxes[0]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Of scales in fp32 with one NaN: its payload is the hardware's choice."""
    return x.view(torch.uint8) if x.itemsize == 1 else x.masked_fill(x.isnan(), float("nan"))


def assert_each_group_is_alone(made: Copies, x: torch.Tensor, ends, fmt: BlockFormat, **options) -> None:
    """Each group has the bits that the reference gives only its tokens, and zeros follow the last one."""
    of_each, hadamard = options.pop("scale_per_group", False), options.get("hadamard", False)
    columnwise = made.columnwise is not None and made.columnwise.format
    options |= {"rowwise": made.rowwise is not None, "columnwise": columnwise, "backend": "reference"}
    if fmt.has_global_scale and not of_each:
        given = [amaxes_of(x[start:end], hadamard) for start, end in itertools.pairwise([0, *ends])]
        options["tensor_amax"] = tuple(map(max, zip(*given))) if hadamard else max(given)
    block, padded, at = fmt.block[1], padded_tokens(len(x), len(ends), fmt.block[1]), 0
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends, len(x)])):
        tokens, width = x[start:end], -(-(end - start) // block) * block
        if "stochastic" in options:
            options["stochastic"] = options["stochastic"]._replace(expert=group)
        if group == len(ends):
            width = padded - at
            tokens = x.new_zeros(max(len(tokens), width), x.shape[1])
            # A transform may make -0 of zeros.
            options |= {"hadamard": False, "tensor_amax": x.new_zeros((), dtype=torch.float32)}
            options = options if fmt.has_global_scale else options | {"tensor_amax": None}
        alone = ops.quantize(tokens, fmt, groups=int32([len(tokens)], x.device), **options)
        for columnwise, (copy, wanted) in enumerate(zip(made, alone)):
            if copy is None:
                continue
            first, length = (at, width) if columnwise else (start, end - start)
            places = ((0, 1), (int(fmt.transposed_scales), 1))
            if columnwise:
                places = ((1, fmt.element.per_byte), (1 - int(copy.format.transposed_scales), block))
            for name, (dim, step) in zip(("qdata", "scale"), places):
                got = getattr(copy, name).narrow(dim, first // step, length // step)
                right = getattr(wanted, name).narrow(dim, 0, length // step)
                assert_bitwise_equal(_bits(got), _bits(right), f"{name} of group {group}, columnwise {columnwise}")
            if fmt.has_global_scale and group < len(ends):
                got = copy.global_scale[group] if of_each else copy.global_scale
                assert_bitwise_equal(_bits(got), _bits(wanted.global_scale), f"global scale of group {group}")
        at += width
    assert made.columnwise is None or made.columnwise.qdata.shape[1] * fmt.element.per_byte == padded
