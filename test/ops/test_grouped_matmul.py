"""ops.grouped_matmul: each group as ops.matmul multiplies it; exact zeros of no group; adding to a gradient."""

from __future__ import annotations

import importlib

import pytest
import torch
from grouped_products import (
    PAIRS,
    ROUTINGS,
    Case,
    K,
    N,
    along_and_pairs,
    assert_close_to_each_group,
    backends,
    pairs_along_k,
    routings,
)
from product_budgets import out_dtypes, pair_id

from torchao_blockwise import ops
from torchao_blockwise.formats import E4M3
from torchao_blockwise.testing import assert_bitwise_equal

# --- values -----------------------------------------------------------------------------------------------------------


@routings
@along_and_pairs
def test_reference_is_the_plain_product_of_each_group(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = case.run(out_dtype, backend="reference")
        expected = torch.zeros_like(out)
        for index, a, b in case.groups():
            expected[index] = ops.matmul(a, b, out_dtype=out_dtype, backend="reference")
        assert_bitwise_equal(out, expected)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs are made of NaN: what is not written shows."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@routings
@along_and_pairs
@pytest.mark.usefixtures("poisoned_memory")
def test_triton_is_within_the_error_budget(along, pair, routing, device):
    case = Case(along, pair, routing, device)
    out = case.run(backend="triton")
    shape = (case.tokens, N) if along == "m" else (len(case.sizes), N, K)
    assert out.shape == shape and out.is_contiguous() and out.dtype is torch.float32
    assert_close_to_each_group(case, out, "triton")


@backends
@pytest.mark.parametrize(("n", "k"), ((1, 1), (16, 128), (129, 65), (130, 272)), ids=str)
@along_and_pairs
def test_features(along, pair, n, k, backend, device):
    case = Case(along, pair, ([3, 0, 140], 5), device, n, k)
    assert_close_to_each_group(case, case.run(backend=backend), backend)


@backends
@out_dtypes
@along_and_pairs
def test_rounds_to_out_dtype(along, pair, out_dtype, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    out = case.run(out_dtype, backend=backend)
    assert out.dtype is out_dtype
    assert_close_to_each_group(case, out, backend)


@backends
@pytest.mark.parametrize(("n", "k"), ((0, 32), (32, 0)), ids=("N0", "K0"))
@along_and_pairs
def test_empty_features(along, pair, n, k, backend, device):
    case = Case(along, pair, ([3, 2], 1), device, n, k)
    out = case.run(backend=backend)
    assert out.shape == ((6, n) if along == "m" else (2, n, k))
    assert (out == 0).all()


@along_and_pairs
def test_many_groups(along, pair, device):
    """More than a warp has lanes, not a power of two, most of them empty."""
    # Along "k" each group is a program, which take long in the interpreter.
    groups = 300 if along == "m" or device == "cuda" else 70
    sizes = [0] * groups
    for g, size in ((3, 2), (31, 1), (32, 1), (40, 3), (groups - 2, 2)):
        sizes[g] = size
    case = Case(along, pair, (sizes, 2), device, 16, 32)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@pytest.mark.parametrize("tokens_a_group", (16, 64, 200), ids="tokens{}".format)
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tiles_of_all_heights(pair, tokens_a_group, device):
    case = Case("m", pair, ([tokens_a_group + 3, 0, tokens_a_group - 3], 0), device)
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@along_and_pairs
def test_programs_write_nothing_of_each_other(along, pair, device, monkeypatch):
    """Bits do not depend on the order of programs: here the last one comes first."""
    if device == "cuda":
        pytest.skip("a GPU takes an order of its own")
    case = Case(along, pair, ROUTINGS["ragged_and_a_tail"], device)
    expected = case.run(backend="triton")
    interpreter = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    in_order = interpreter.set_grid_idx
    monkeypatch.setattr(interpreter, "set_grid_idx", lambda x, y, z: in_order(interpreter.grid_dim[0] - 1 - x, y, z))
    assert_bitwise_equal(case.run(backend="triton"), expected)


# --- what is of no group ----------------------------------------------------------------------------------------------


def nan_payload(q, rows: slice):
    """The operand with NaN in the payload (e4m3), or in the block scales, of these rows."""
    q = q._replace(qdata=q.qdata.clone(), scale=q.scale.clone())
    q.qdata[rows].view(torch.uint8).fill_(0x7F)
    scale = q.scale.mT[rows] if q.format.transposed_scales else q.scale[rows]
    scale.fill_(float("nan")) if scale.dtype == torch.float32 else scale.view(torch.uint8).fill_(0x7F)
    return q


@backends
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_tokens_of_no_group_are_zeros_whatever_they_hold(pair, backend, device):
    case = Case("m", pair, ([130, 1, 0], 150), device)
    expected = case.run(backend=backend)
    case.a = nan_payload(case.a, slice(131, None))
    assert_bitwise_equal(case.run(backend=backend), expected)
    assert (expected[131:] == 0).all() and expected[:131].isfinite().all()


@backends
@along_and_pairs
def test_a_tensor_scale_of_nan_leaves_what_is_of_no_group_zero(along, pair, backend, device):
    if not pair[0].has_global_scale:
        pytest.skip("no tensor scale")
    case = Case(along, pair, ([0, 17, 0], 4), device)
    case.a = case.a._replace(global_scale=torch.full_like(case.a.global_scale, float("nan")))
    out = case.run(backend=backend)
    hit = out[:17] if along == "m" else out[1]
    rest = out[17:] if along == "m" else out[::2]
    assert hit.isnan().all() and (rest == 0).all()


@backends
@along_and_pairs
def test_nan_stays_in_its_group(along, pair, backend, device):
    if pair[0].element is not E4M3:
        pytest.skip("a NaN is one of the whole tensor")
    case = Case(along, pair, ([20, 150, 30], 0), device)
    expected = case.run(backend=backend)
    if along == "m":
        case.b.qdata[1].view(torch.uint8).fill_(0x7F)
        hit, rest = slice(20, 170), [slice(0, 20), slice(170, 200)]
    else:
        # The second group's 256 padded columns.
        case.a.qdata.view(torch.uint8)[:, 128:384] = 0x7F
        hit, rest = slice(1, 2), [slice(0, 1), slice(2, 3)]
    out = case.run(backend=backend)
    assert out[hit].isnan().all()
    for part in rest:
        assert_bitwise_equal(out[part], expected[part])


# --- adding to a gradient ---------------------------------------------------------------------------------------------


@backends
@routings
@pairs_along_k
def test_add_grouped_matmul(pair, routing, backend, device):
    case = Case("k", pair, routing, device)
    start = torch.randn(len(case.sizes), N, K, device=device)
    empty = [g for g, size in enumerate(case.sizes) if not size]
    # Added to zero it would lose its sign.
    start[empty] = -0.0
    out = start.clone()
    assert case.add(out, backend=backend) is out
    assert_bitwise_equal(out[empty], start[empty], "empty groups")
    full = [g for g, size in enumerate(case.sizes) if size]
    expected = start[full] + case.run(backend=backend)[full]
    torch.testing.assert_close(out[full], expected, rtol=2.0**-20, atol=1e-6)
    before = out._version
    case.add(out, backend=backend)
    assert out._version > before
