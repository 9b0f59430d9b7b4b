"""Helpers for tests: difficult inputs, bitwise comparison and error measures."""

from __future__ import annotations

import math

import torch

from torchao_blockwise.formats import BlockFormat, Operand

# (rows, columns): empty, one element, one block, ragged in each dim, several blocks, odd.
SHAPES = ((0, 128), (128, 0), (1, 1), (1, 128), (16, 16), (63, 500), (128, 128), (129, 127), (257, 384), (300, 576))


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def random_tensor(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Return normal values with rows and columns scaled by random powers of two, so that a wrong scale is noticed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    for dim in (-1, -2):
        size = x.shape[dim]
        exponent = torch.randint(-6, 7, (size,), generator=generator, device="cpu").float()
        x = x * exponent.exp2().view(-1, *([1] * (-1 - dim)))
    return x.to(device=device, dtype=dtype)


def with_special_values(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Return `x` with a zero block, a block of subnormals, a huge block and negative zeros in its first rows."""
    x = x.clone()
    rows, columns = fmt.block
    for index, value in enumerate((0.0, 1e-40, torch.finfo(x.dtype).max, -0.0)):
        start = index * columns
        x[..., :rows, start : start + columns] = value
    return x


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensors") -> None:
    """Assert equal shape, dtype and bits; the message counts the differences and shows the first ones."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if actual.numel() == 0:
        return
    actual, expected = actual.cpu(), expected.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differ = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if differ.any():
        where = differ.nonzero()[:4].tolist()
        got = [(tuple(i), actual[tuple(i)].item(), expected[tuple(i)].item()) for i in where]
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} differ; (index, got, expected): {got}")


def assert_operands_equal(actual: Operand, expected: Operand) -> None:
    """Assert that two quantized operands have the same format and bits."""
    assert type(actual) is type(expected), f"{type(actual).__name__} is not {type(expected).__name__}"
    assert actual.format_name == expected.format_name, f"{actual.format_name} is not {expected.format_name}"
    for name, a, b in zip(("qdata", "scale", "global_scale"), actual.tensors, expected.tensors):
        assert (a is None) == (b is None), f"{name}: {a} and {b}"
        if a is not None and b is not None:
            assert_bitwise_equal(a, b, f"{actual.format_name}.{name}")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖actual - expected‖ / ‖expected‖ in fp64; 0 for empty tensors and for equal zeros."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    error, norm = (actual - expected).norm().item(), expected.norm().item()
    return error / norm if norm else error


def sqnr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio 20 · log10(‖expected‖ / ‖actual - expected‖) in dB, in fp64."""
    error = relative_error(actual, expected)
    return float("inf") if error == 0 else -20 * math.log10(error)
