"""Ends and tables of groups; operations that are given them; tables that are refused."""

import pytest
import torch
from grouped_copies import int32
from grouped_products import ROUTINGS, ends_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize_cases import assert_same

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, CastOptions, Groups
from torchao_blockwise.ops.groups.ends import (
    as_groups,
    check_group_ends,
    clamped_ends,
    padded_ends,
    padded_rows,
    padded_tokens,
)
from torchao_blockwise.ops.groups.tables import layout, reference
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

kernels = pytest.importorskip("torchao_blockwise.ops.groups.tables.kernels_triton")

FORMATS = (FP8_1X128, NVFP4_1X16)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


# --- tables -----------------------------------------------------------------------------------------------------------


def check(group_ends: torch.Tensor, tokens: int, fmt, device: str) -> None:
    """Kernels and reference agree on all entries that are read, for which there is room."""
    at = layout.layout_of(tokens, len(group_ends), fmt.block[1])
    # What is not written shows.
    torch.full((4 * at.length,), -77, dtype=torch.int32, device=device)
    found, wanted = (
        make(group_ends.to(device), tokens, fmt) for make in (kernels.group_tables, reference.group_tables)
    )
    assert (found.dtype, found.shape) == (torch.int32, (at.length, 4))
    assert_bitwise_equal(found[: at.rows], wanted[: at.rows], "along k")
    for tile in layout.HEIGHTS:
        first = at.rows_of(tile)
        count = 1 + int(wanted[first, 0])
        assert count <= 1 + layout.count_rows(tokens, len(group_ends), tile) <= at.of_rows
        assert_bitwise_equal(found[first : first + count], wanted[first : first + count], f"tiles of {tile} rows")
    zero, last = group_ends.new_zeros(1), group_ends.new_full((1,), tokens)
    lengths = clamped_ends(group_ends, tokens).diff(prepend=zero, append=last)
    assert (-(-lengths // fmt.block[1])).sum() < at.of_blocks
    assert_bitwise_equal(found[at.blocks :], wanted[at.blocks :], "blocks")


def sizes(count: int) -> tuple[torch.Tensor, int]:
    """(ends, tokens) of groups of random sizes."""
    drawn = torch.randint(0, 400, (count,), generator=torch.Generator().manual_seed(count))
    return drawn.cumsum(0).int(), int(drawn.sum()) + 77


CASES = {routing: ends_of(routing) for routing in ROUTINGS} | {f"{n} of random sizes": sizes(n) for n in (1, 2, 37)}
CASES |= {
    "no tokens": (int32([0, 0, 0]), 0),
    "tiles that begin before their group": (int32([1, 65, 129, 193, 257]), 321),
    # More entries than a program writes at a time.
    "a long group": (int32([1, 40_000]), 40_001),
    "many tokens of no group": (int32([5]), 40_000),
    "decreasing": (int32([200, 100, 300]), 300),
    "negative": (int32([-5, 130, 131]), 300),
    "too large": (int32([60, 2**31 - 1, 0]), 300),
    "all negative": (int32([-(2**31), -1, -7]), 300),
}


@every_format
@pytest.mark.parametrize("ends, tokens", CASES.values(), ids=CASES)
def test_tables(fmt, ends, tokens, device):
    check(ends, tokens, fmt, device)


@pytest.mark.gpu
def test_tables_of_many_groups(device):
    for fmt in FORMATS:
        check(*sizes(511), fmt, device)


@pytest.mark.parametrize("ends", [(70, 71, 271), (200, 100, 300), (-5, 130, 2**31 - 1), (0, 0, 0)], ids=str)
def test_entries_along_k_lead_no_further_than_padded_tokens(ends, device):
    """All that is known of the tokens is how many there are with their padding, which ends may fill wholly."""
    ends, block = int32(ends), FP8_1X128.block[1]
    for padded in (384, 640):
        limit = padded // block
        counts = -(-clamped_ends(ends, padded).diff(prepend=ends.new_zeros(1)) // block)
        last, order = counts.cumsum(0), counts.argsort(descending=True, stable=True)
        entries = torch.stack((order, (last - counts)[order], last[order], 0 * order), 1)
        entries[:, 1:3].clamp_(max=limit)
        found = kernels.group_schedule(Groups(ends.to(device)), padded, FP8_1X128).tolist()
        assert found[:4] == [[3, int((counts > 0).sum()), 0, 0], *entries.tolist()]


# --- ends -------------------------------------------------------------------------------------------------------------


def check_padding(ends: list[int], tokens: int, block: int) -> None:
    rows, padded = [], []
    check_group_ends("op", int32(ends), tokens, torch.device("cpu"))
    for start, end in zip([0, *ends], ends):
        rows += range(start, end)
        rows += [tokens] * (-len(rows) % block)
        padded.append(len(rows))
    size = padded_tokens(tokens, len(ends), block)
    assert size % block == 0 and len(rows) <= size < tokens + min(len(ends), tokens) * block + block
    got = padded_ends(int32(ends), tokens, block)
    assert got.dtype == torch.int32 and got.tolist() == padded
    assert padded_rows(int32(ends), tokens, block).tolist() == rows + [tokens] * (size - len(rows))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 140), min_size=1, max_size=20),
    after=st.integers(0, 40),
    block=st.sampled_from((16, 128)),
)
def test_padding_of_any_sizes(sizes, after, block):
    check_padding(torch.tensor(sizes).cumsum(0).tolist(), sum(sizes) + after, block)


def test_the_bound_is_reached():
    """By groups of one token each, by as many groups as there are tokens, and by a whole block."""
    assert padded_tokens(4, 4, 16) == padded_tokens(4, 300, 16) == 64 and padded_tokens(16, 1, 16) == 16


def test_malformed_ends_are_clamped():
    assert clamped_ends(int32([-3, 5, 2, 99, 7, -1]), 10).tolist() == [0, 5, 5, 10, 10, 10]
    assert clamped_ends(int32([-3, 5]), 0).tolist() == [0, 0]
    assert padded_ends(int32([-3, 5, 2, 99, 7]), 10, 16).tolist() == [0, 16, 16, 32, 32]
    rows = padded_rows(int32([-3, 5, 2, 99, 7]), 10, 16)
    assert rows[:5].tolist() == [0, 1, 2, 3, 4] and rows[16:21].tolist() == [5, 6, 7, 8, 9]
    assert rows.unique().tolist() == list(range(11))


# --- operations that are given tables --------------------------------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENDS, TOKENS, OTHER_ENDS = int32([33, 33, 162]).to(DEVICE), 180, int32([1, 100, 170]).to(DEVICE)


def takers(fmt) -> dict:
    """{operation: call with groups and a backend}, on tokens of which some are in no group."""
    dh, gate, up = (random_tensor(TOKENS, 48, dtype=torch.bfloat16, seed=seed, device=DEVICE) / 64 for seed in range(3))
    both = CastOptions(fmt, rowwise=True, columnwise=True)
    amax = torch.tensor(64.0, device=DEVICE) if fmt.has_global_scale else None
    weight = ops.quantize(dh[: 3 * 32].view(3, 32, 48), {FP8_1X128: FP8_128X128}.get(fmt, NVFP4_16X16)).rowwise
    a = ops.quantize(gate, fmt).rowwise
    columnwise = [ops.quantize(t, fmt, rowwise=False, columnwise=True, groups=ENDS).columnwise for t in (dh, up)]
    f32 = torch.float32
    return {
        "quantize": lambda groups, by: ops.quantize_by(gate, both, as_groups(groups), tensor_amax=amax, backend=by),
        "swiglu_quantize": lambda groups, by: ops.swiglu_quantize(gate, up, both, groups=groups, backend=by),
        "swiglu_backward_quantize": lambda groups, by: ops.swiglu_backward_quantize(
            dh, gate, up, both, groups=groups, backend=by
        ),
        "grouped_matmul": lambda groups, by: [
            ops.grouped_matmul(a, weight, groups, out_dtype=f32, backend=by),
            ops.grouped_matmul(*columnwise, groups, along="k", out_dtype=f32, backend=by),
        ],
        "add_grouped_matmul_": lambda groups, by: [
            ops.add_grouped_matmul_(torch.zeros(3, 48, 48, device=DEVICE), *columnwise, groups, backend=by)
        ],
    }


# In NVFP4 SwiGLU runs as two operations.
QUANTIZERS = [
    (FP8_1X128, "quantize"), (NVFP4_1X16, "quantize"),
    (FP8_1X128, "swiglu_quantize"), (FP8_1X128, "swiglu_backward_quantize"),
]  # fmt: skip


@pytest.mark.parametrize("fmt, op", QUANTIZERS, ids=lambda v: getattr(v, "name", v))
def test_quantizers_read_the_tables_that_are_given(fmt, op, machine):
    call, made = takers(fmt)[op], machine.launches_of(kernels)
    expected = call(ENDS, "triton")
    assert len(made) == 1
    groups = ops.make_groups(ENDS, TOKENS, fmt, backend="reference")
    assert_same(call(groups, "triton"), expected)
    assert len(made) == 1, "an operation that is given tables makes none"
    assert_same(call(groups, "reference"), expected)
    # Of other ends, so that it shows.
    others = Groups(ENDS, ops.make_groups(OTHER_ENDS, TOKENS, fmt, backend="triton").tables)
    assert_same(call(others, "triton"), call(OTHER_ENDS, "triton"))


@every_format
@pytest.mark.parametrize("op", ("grouped_matmul", "add_grouped_matmul_"))
def test_products_take_tables_of_the_tokens_without_padding(op, fmt):
    """Backends that need none too; Gluon's is tested with its kernels."""
    groups = ops.make_groups(ENDS, TOKENS, fmt, backend="triton")
    for got, expected in zip(takers(fmt)[op](groups, "reference"), takers(fmt)[op](ENDS, "reference"), strict=True):
        assert_bitwise_equal(got, expected)


def tables_of(ends, tokens: int = TOKENS, fmt=FP8_1X128) -> torch.Tensor:
    return ops.make_groups(ends, tokens, fmt, backend="reference").tables


WRONG = {
    "dtype": lambda: tables_of(ENDS).long(),
    "device": lambda: tables_of(ENDS).to("meta"),
    # Two more: along "k" tokens are known within a block, so that tables of one more group may be as long.
    "groups": lambda: tables_of(torch.cat((ENDS, ENDS[-1:], ENDS[-1:]))),
    "more tokens": lambda: tables_of(ENDS, 1000),
    "format": lambda: tables_of(ENDS, fmt=NVFP4_1X16),
    "dims": lambda: tables_of(ENDS).flatten(),
    "strides": lambda: tables_of(ENDS).mT.contiguous().mT,
}


@pytest.mark.parametrize("op", takers(FP8_1X128))
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tables_are_refused(op, wrong):
    message = r"the result of ops.make_groups for 3 ends, .* and blocks of 128 on .*, got .* shape .*; compute them for"
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        takers(FP8_1X128)[op](Groups(ENDS, WRONG[wrong]()), "reference")


@pytest.mark.parametrize("groups", (1, 2, 5))
def test_tables_along_k_fit_whatever_the_padding(groups):
    """Of every number of tokens that may have been padded so, and of no other by more than the length can tell."""
    block = FP8_1X128.block[1]
    for tokens in range(700):
        padded = padded_tokens(tokens, groups, block)
        least, most = layout._before_padding(padded, groups, block)
        assert least <= tokens <= most
        assert padded_tokens(least, groups, block) == padded_tokens(most, groups, block) == padded
