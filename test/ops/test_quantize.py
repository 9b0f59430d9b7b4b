"""ops.quantize and ops.dequantize: kernels against the reference, invariants, special values, any number of tokens."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantize_cases import (
    BOTH,
    INPUTS,
    WAYS,
    assert_same,
    backends,
    check_against_reference,
    columnwise_of,
    formats,
    nvfp4_formats,
    rowwise_of,
    shapes,
    special_input,
    ways,
)

from torchao_blockwise import ops
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor, shape_id

# --- one result, whatever computes it ---------------------------------------------------------------------------------


@ways
@shapes
def test_shapes_match_reference(way, backend, shape, device):
    fmt, options = WAYS[way]
    if len(shape) == 2 or not options.keys() & BOTH.keys():
        check_against_reference(special_input(shape, fmt, torch.bfloat16, device), way, backend)


def holds(value: float):
    def poison(x):
        x[0, 0] = x[20, 129] = value
        x[20, 130] = 0.0
        return x

    return poison


CHANGES = {
    **INPUTS,
    "batch last": lambda x: x.unsqueeze(-1).expand(*x.shape, 3).permute(2, 0, 1),
    **{str(value): holds(value) for value in (float("inf"), -float("inf"), 1e-40, 3e38)},
}


@ways
@pytest.mark.parametrize("name", CHANGES)
def test_inputs_match_reference(way, backend, name, device):
    fmt, options = WAYS[way]
    if name == "batch last" and options.keys() & BOTH.keys():
        return
    dtype = torch.float32 if name in ("1e-40", "3e+38") else torch.bfloat16
    x = CHANGES[name](random_tensor(33, 200, dtype=dtype, device=device))
    check_against_reference(x, way, backend)
    # NaN in every way.
    check_against_reference(holds(float("nan"))(random_tensor(33, 200, dtype=dtype, device=device)), way, backend)
    if options.keys() & BOTH.keys():
        return
    # Bitwise identical to the fp32 copy.
    of_copy = rowwise_of(x.float(), fmt, backend="reference", **options)
    assert_same([rowwise_of(x, fmt, backend=backend, **options)], [of_copy])


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), columns=st.integers(0, 150), seed=st.integers(0, 99), power=st.integers(-40, 38))
@formats
@backends
def test_any_shape_and_magnitude(backend, fmt, rows, columns, seed, power, device):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator).double() * 10.0**power).float().to(device)
    check_against_reference(x, fmt.name, backend)


# --- invariants -------------------------------------------------------------------------------------------------------


@backends
@formats
def test_leading_dims_are_independent_matrices(fmt, backend, device):
    x = random_tensor(2, 3, 20, 40, device=device)
    amax = x.abs().amax() if fmt.has_global_scale else None
    whole = rowwise_of(x, fmt, backend=backend, tensor_amax=amax)
    for i, j in ((0, 0), (0, 2), (1, 1)):
        part = rowwise_of(x[i, j], fmt, backend="reference", tensor_amax=amax)
        assert_operands_equal(whole._replace(qdata=whole.qdata[i, j], scale=whole.scale[i, j]), part)


# --- any number of tokens ---------------------------------------------------------------------------------------------

# The last: eight of the highest tiles, and a row.
PADDED = [((tokens, 32), None) for tokens in (1, 15, 16, 17, 127, 129, 1025)]
PADDED += [(shape, value) for shape in ((2, 3, 21, 40), (0, 16), (17, 0)) for value in (1.0, float("nan"))]


@backends
@pytest.mark.parametrize("shape, value", PADDED, ids=lambda p: shape_id(p) if isinstance(p, tuple) else str(p))
@formats
def test_padded_is_quantizing_with_zero_tokens_behind(fmt, shape, value, backend, device):
    x = random_tensor(*shape, device=device)
    if value is None:
        x = special_input(shape, fmt, torch.bfloat16, device)
    elif x.numel():
        x[..., -1, 3] = value
    zeros = x.new_zeros(*shape[:-2], -shape[-2] % 32, shape[-1])
    expected = columnwise_of(torch.cat((x, zeros), -2), fmt, backend="reference")
    rowwise, columnwise = ops.quantize(x, fmt, columnwise=True, padded=True, backend=backend)
    assert_same([rowwise], [rowwise_of(x, fmt, backend="reference")])
    assert columnwise.qdata.shape[-1] == fmt.element.packed(-(-shape[-2] // 32) * 32)
    assert_same([columnwise, columnwise_of(x, fmt, padded=True, backend=backend)], [expected] * 2)


# --- ops.dequantize, whose values are compared with numerics.md in formats/test_numerics.py ---------------------------


@nvfp4_formats
@pytest.mark.parametrize("columns", (1, 15, 17, 33))
def test_odd_columns(fmt, columns):
    x = random_tensor(5, columns)
    q = rowwise_of(x, fmt, backend="reference")
    held = ops.dequantize(q)
    assert held.shape == (5, columns + 1)
    assert (held[:, -1] == 0).all()
    assert_bitwise_equal(ops.dequantize(q, columns=columns), held[:, :columns])


@formats
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=lambda d: str(d)[6:]
)
def test_rounds_once_to_the_dtype(fmt, dtype):
    q = rowwise_of(random_tensor(33, 150), fmt, backend="reference")
    assert_bitwise_equal(ops.dequantize(q, dtype=dtype), ops.dequantize(q).to(dtype))
