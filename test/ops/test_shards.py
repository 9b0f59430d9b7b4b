"""Flat shards: quantized apart they are bitwise identical to the whole, for every split, and touch nothing else."""

import dataclasses
import math
import warnings

import pytest
import torch
from gpu_steps import no_syncs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_cases import (
    DTYPES,
    amaxes,
    backends,
    check_split,
    cut,
    dtypes,
    formats,
    framed,
    many,
    payload,
    quantize,
    ranks_of,
    scales_of,
    splits,
)

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_128X128, NVFP4_16X16, Scales
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.shards.flat import Shards, block_count, cuts_no_block
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, with_special_values


@backends
@dtypes
@splits
@formats
def test_any_split_has_the_bits_of_the_whole(fmt, shape, cuts, dtype, backend, device):
    for aligned, master in ((False, torch.float32), (True, dtype)):
        w = random_tensor(*shape, dtype=master, device=device)
        check_split([w], [cut(w, cuts)], fmt, dtype, backend, aligned=aligned)


def special(value):
    """Values that a NaN or an Inf, and a zero, lie among."""

    def change(w, fmt):
        w[32, 3], w[0, 0], w[0, 1] = value, float("inf"), 0.0
        return w

    return change


VALUES = {
    "zeros": lambda w, fmt: torch.where(torch.arange(w.numel(), device=w.device).view(w.shape) > 0, 0.0, -0.0),
    # Masters are rounded to the weight's dtype first; fp16 from large values gives Inf, as a cast does.
    **{str(dtype)[6:]: lambda w, fmt, dtype=dtype: with_special_values(w, fmt).to(dtype) for dtype in DTYPES},
    **{str(x): special(x) for x in (float("nan"), float("inf"), -float("inf"))},
    "-nan": special(-float("nan")),
}


@backends
@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
@formats
def test_masters_of_any_dtype_and_values(fmt, change, backend, device):
    w = change(random_tensor(33, 150, device=device), fmt)
    for dtype in DTYPES:
        check_split([w], [cut(w, (1001, 3000))], fmt, dtype, backend)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@formats
@backends
def test_drawn_splits(backend, fmt, data, device):
    batch = data.draw(st.sampled_from(((), (2,), (3,))), "batch")
    rows, columns = data.draw(st.integers(1, 150), "rows"), data.draw(st.integers(1, 150), "columns")
    shape = (*batch, rows, columns)
    cuts = data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=3), "cuts")
    master, dtype = data.draw(st.sampled_from(DTYPES), "master"), data.draw(st.sampled_from(DTYPES), "dtype")
    aligned = data.draw(st.booleans(), "aligned")
    power_of_2 = fmt.has_power_of_2_scales and data.draw(st.booleans(), "power_of_2")
    w = random_tensor(*shape, dtype=master, device=device, seed=data.draw(st.integers(0, 9), "seed"))
    check_split([w], [cut(w, cuts)], fmt, dtype, backend, power_of_2, aligned)


# --- many at once -----------------------------------------------------------------------------------------------------


@backends
@formats
def test_a_list_is_as_each_alone(fmt, backend, device):
    check_split(*many(device), fmt, torch.bfloat16, backend)


@pytest.mark.parametrize("backend", ("reference", "triton", None), ids=str)
@formats
def test_a_list_of_nothing(fmt, backend, device):
    nothing, bits = Shards.of([], [], [], torch.float32, fmt), torch.tensor([3], dtype=torch.int32, device=device)
    shards.partial_block_amax_op(bits, nothing, backend)
    shards.block_scales_op(bits.float(), [], [], bits, [], fmt, False, backend)
    shards.partial_cast_op([], nothing, bits.float(), backend)
    assert bits == 3


@backends
@formats
def test_places_in_a_common_buffer(fmt, backend, device):
    """Values of other lists in the buffer stay; amaxes are only raised, those of blocks that shards share too."""
    w = random_tensor(150, 290, device=device)
    count = block_count(w.shape, fmt)
    high = torch.tensor(1e30, device=device).view(torch.int32)
    buffer = torch.full((count + 7,), 123, dtype=torch.int32, device=device)
    buffer[5 : 5 + count] = 0
    buffer[5] = high
    starts, parts = zip(*cut(w, (100, 20001, 20002)))
    rank = Shards.of(parts, starts, [w.shape] * 4, torch.float32, fmt, [5] * 4)
    shards.partial_block_amax_op(buffer, rank, backend)
    assert buffer[:5].tolist() == [123] * 5 and buffer[5 + count :].tolist() == [123] * 2 and buffer[5] == high
    alone = amaxes(ranks_of([[(0, w.flatten())]], [w.shape], torch.float32, fmt), [w.shape], fmt, backend)
    assert_bitwise_equal(buffer[6 : 5 + count], alone[1:])


@formats
def test_launches_do_not_grow_with_the_list(fmt, device, monkeypatch):
    """One table for the amaxes, one for the scales, and one for each of two kinds of targets."""
    kernels = pytest.importorskip("torchao_blockwise.ops.shards.kernels_triton")
    tables = []
    make = kernels.make_table
    monkeypatch.setattr(kernels, "make_table", lambda *args: tables.append(1) or make(*args))
    counts = []
    for count in (1, 7):
        tables.clear()
        w = [random_tensor(32, 64, device=device, seed=i) for i in range(count)]
        check_split(w, [[(0, x.flatten())] for x in w], fmt, torch.bfloat16, "triton", aligned=True)
        counts.append(len(tables))
    assert counts == [4, 4]


def test_a_table_is_found_again():
    """Rows become programs, and the same rows are the same table."""
    tables = pytest.importorskip("torchao_blockwise.ops.device.tables")
    cpu = torch.device("cpu")
    rows = [(2, 11, 12), (0, 13, 14), (3, 15, 16)]
    table = tables.make_table(rows, cpu)
    assert table.tensor.tolist() == [[0, 11, 12], [2, 15, 16]] and (table.rows, table.programs) == (2, 5)
    assert tables.make_table(iter(rows), cpu).tensor is table.tensor
    assert tables.make_table([(2, 11, 12), (3, 15, 17)], cpu).tensor is not table.tensor
    assert tables.make_table([(0, 1, 2)], cpu) is None
    for i in range(2 * tables._MAX_TABLES):
        tables.make_table([(1, i)], cpu)
    assert len(tables._tables) == tables._MAX_TABLES


@backends
def test_a_cast_of_shards_gives_each_matrix_its_scale(backend, device):
    """Next to a tensor with one scale, cut anywhere."""
    tensors = [random_tensor(*shape, device=device) for shape in ((3, 40, 50), (33, 48), (5, 17, 300))]
    for x in tensors[::2]:
        x *= 4.0 ** torch.arange(len(x), device=device)[:, None, None]
    parts = [cut(x, (x.numel() // 3,)) for x in tensors]
    check_split(tensors, parts, NVFP4_16X16, torch.float32, backend, scale_per_matrix=True)


# --- shards that cut no block -----------------------------------------------------------------------------------------

# (shape, first elements of ranks 1, 2, ..), on blocks of 128.
WHOLE_SPLITS = {
    "even": ((256, 256), (128 * 256,)),
    "ragged": ((300, 200), (128 * 200, 256 * 200)),
    "nothing": ((130, 48), (0, 128 * 48, 128 * 48)),
    "experts": ((3, 140, 50), (128 * 50, 140 * 50, 2 * 140 * 50)),
    "low": ((2, 300), (0,)),
    "empty": ((0, 16), (0,)),
}


@backends
@dtypes
@pytest.mark.parametrize("power_of_2", (False, True), ids=("scales", "powers of 2"))
@pytest.mark.parametrize(("shape", "cuts"), WHOLE_SPLITS.values(), ids=WHOLE_SPLITS)
def test_one_read_gives_the_bits_of_two(shape, cuts, power_of_2, dtype, backend, device):
    """Amaxes and payload, only of the shards; and the scales that follow."""
    fmt, w = FP8_128X128, random_tensor(*shape, device=device)
    if w.numel() > 300:
        w.view(-1)[-1], w.view(-1)[1] = float("nan"), float("inf")
    parts, expected = cut(w, cuts), quantize(w, fmt, dtype, power_of_2)
    buffer = torch.zeros(block_count(shape, fmt), dtype=torch.int32, device=device)
    target, check = framed(payload(fmt, shape, device=device))
    for start, shard in parts:
        before, bits = target.clone(), torch.zeros_like(buffer)
        rank = Shards.of([shard], [start], [shape], dtype, fmt)
        place = target.view(-1)[start : start + shard.numel()]
        shards.whole_block_cast_op([place], bits, rank, power_of_2, backend)
        assert_bitwise_equal(bits, amaxes([rank], [shape], fmt, backend), "amaxes")
        for others in (slice(None, start), slice(start + shard.numel(), None)):
            assert_bitwise_equal(target.view(-1)[others], before.view(-1)[others], "what others own")
        buffer = torch.maximum(buffer, bits)
    check()
    assert_bitwise_equal(target, expected.qdata.view(torch.uint8), "payload")
    assert_bitwise_equal(scales_of(buffer, [shape], fmt, backend, power_of_2)[1][0], expected.scale, "scale")


@backends
def test_one_read_of_a_list(backend, device):
    """Of several dtypes and sizes, on 16 bytes and off, in places of a common buffer."""
    fmt, dtype, cases = FP8_128X128, torch.bfloat16, list(WHOLE_SPLITS.values())
    weights = [random_tensor(*shape, dtype=DTYPES[i % 3], device=device, seed=i) for i, (shape, _) in enumerate(cases)]
    starts, parts = zip(*(cut(w, cuts)[-1] for w, (_, cuts) in zip(weights, cases)))
    shapes = [w.shape for w in weights]
    counts = [block_count(shape, fmt) for shape in shapes]
    firsts = [3 + sum(counts[:i]) for i in range(len(counts))]
    bits = torch.zeros(sum(counts) + 5, dtype=torch.int32, device=device)
    targets = [torch.full((len(x),), 0x5A, dtype=torch.uint8, device=device) for x in parts]
    rank, wanted = Shards.of(parts, starts, shapes, dtype, fmt, firsts), torch.zeros_like(bits)
    shards.whole_block_cast_op(targets, bits, rank, False, backend)
    shards.partial_block_amax_op(wanted, rank, backend)
    assert_bitwise_equal(bits, wanted, "amaxes")
    for w, start, shard, target in zip(weights, starts, parts, targets):
        whole = quantize(w, fmt, dtype).qdata.view(torch.uint8).flatten()
        assert_bitwise_equal(target, whole[start : start + shard.numel()], f"payload of {list(w.shape)}")


# --- bytes that two ranks share ---------------------------------------------------------------------------------------


@backends
def test_the_other_nibble_stays(backend, device):
    """Elements 3 to 8 of a row: bytes 1 to 4, of the first only the high nibble, of the last only the low one."""
    w, fmt = torch.full((1, 16), 6.0, device=device), NVFP4_16X16
    whole = ranks_of([[(0, w.flatten())]], [w.shape], w.dtype, fmt)
    encode, *_ = scales_of(amaxes(whole, [w.shape], fmt, backend), [w.shape], fmt, backend)
    target = torch.full((8,), 0x1B, dtype=torch.uint8, device=device)
    rank = Shards.of([w.flatten()[3:9].clone()], [3], [w.shape], w.dtype, fmt)
    shards.partial_cast_op([target[1:5]], rank, encode, backend)
    assert target.tolist() == [0x1B, 0x7B, 0x77, 0x77, 0x17, *[0x1B] * 3]


def test_merge_leaves_what_no_shard_covers(device):
    """Elements 1, 2 of the first row: high nibble of byte 0, low nibble of byte 1; then one of the second."""
    target = torch.full((2, 3), 0x1B, dtype=torch.uint8, device=device)  # [2, 5]
    pieces = [torch.tensor(x, dtype=torch.uint8, device=device) for x in ([0x76, 0x54], [0x98])]
    ops.merge_shards_([target], [pieces], [[1, 6]], [[2, 1]], [5], "nvfp4_16x16")
    assert target.tolist() == [[0x7B, 0x14, 0x1B], [0x9B, 0x1B, 0x1B]]
    ops.merge_shards_([], [], [], [], [], NVFP4_16X16)


def test_merge_of_single_elements(device):
    """Every byte is two ranks' or a row's end; gathered in any order, with empty ranks between, padded to a length."""
    w = random_tensor(3, 5, device=device)
    q = quantize(w, NVFP4_16X16, torch.float32)
    codes = NVFP4_16X16.element.unpack(q.qdata, 5).flatten().tolist()
    starts, pieces = [7, 0, 14, 3, 1, 2, 4, 5, 6, 13, 12, 8, 9, 10, 11], []
    for element in starts:
        odd = element % 5 % 2
        byte = codes[element] << 4 * odd | (0xF << 4 * (1 - odd))
        byte &= 0xF if element % 5 == 4 else 0xFF
        pieces.append(torch.tensor([byte, 0xEE], dtype=torch.uint8, device=device))
    pieces.insert(4, torch.empty(0, dtype=torch.uint8, device=device))
    starts.insert(4, 2)
    lengths = [len(piece) // 2 for piece in pieces]
    target = payload(NVFP4_16X16, (3, 5), device=device)
    ops.merge_shards_([target], [pieces], [starts], [lengths], [5], NVFP4_16X16)
    assert_bitwise_equal(target, q.qdata)


@pytest.mark.parametrize(
    ("start", "n", "expected"), ((0, 128, True), (128, 172, True), (300, 300, True), (0, 100, False), (100, 28, False))
)
def test_rows_that_cut_no_block(start, n, expected):
    """Of two matrices of 300 rows of 64; a part of a row cuts blocks, no elements cut none."""
    shape, fmt = (2, 300, 64), FP8_128X128
    assert cuts_no_block(64 * start, 64 * n, shape, fmt) is expected
    assert not cuts_no_block(64 * start + 32, 64 * n, shape, fmt)
    assert cuts_no_block(64 * start + 32, 0, shape, fmt)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@formats
def test_captured_in_a_cuda_graph_without_syncs(fmt):
    """Masters change, addresses stay: a replay casts the new values. A list that was never seen is refused."""
    w = random_tensor(256, 512, device="cuda")
    master, start = w.flatten()[1001:90001].clone(), 1001
    q = quantize(w, fmt, torch.bfloat16)
    bits = torch.zeros(block_count(w.shape, fmt), dtype=torch.int32, device="cuda")
    encode, global_scales = torch.zeros_like(bits, dtype=torch.float32), [q.global_scale] * fmt.has_global_scale
    target = payload(fmt, w.shape, device="cuda")
    first, count = ops.shard_entries(start, master.numel(), w.shape[-1], fmt)
    place = target.view(-1)[first : first + count]

    def cast(master):
        bits.zero_()
        rank = Shards.of([master], [start], [w.shape], torch.bfloat16, fmt)
        shards.partial_block_amax_op(bits, rank, None)
        shards.block_scales_op(encode, [q.scale], global_scales, bits, [0], fmt, False, None)
        shards.partial_cast_op([place], rank, encode, None)

    cast(master)
    torch.cuda.synchronize()
    with no_syncs():
        cast(master)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cast(master)
    master.mul_(-3)
    target.fill_(0)
    graph.replay()
    part = torch.zeros_like(w)
    part.view(-1)[start : start + master.numel()] = master
    assert_bitwise_equal(target, quantize(part, fmt, torch.bfloat16).qdata.view(torch.uint8))
    refusal = pytest.raises(RuntimeError, match="make the same call once before the capture")
    with refusal, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cast(master.clone())


# --- formats that kernels do not know ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ((32, 32), (1, 32)), ids=str)
def test_kernels_leave_formats_that_they_do_not_know_to_the_reference(block, device, monkeypatch):
    """The kernels hold the scale rules of FP8 and NVFP4: under others their scales would be wrong."""

    def halved(*args):
        encode, scale, _ = FP8_128X128.compute_scales(*args)
        return Scales(encode / 2, scale * 2, None)

    fmt = dataclasses.replace(FP8_128X128, name="halved", block=block, compute_scales=halved)
    monkeypatch.setitem(FORMATS, fmt.name, fmt)
    w = random_tensor(65, 150, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a GPU AUTO says that it falls short of Triton
        check_split([w], [cut(w, (1001, 3000))], fmt, torch.float32, None)
    with pytest.raises(ValueError, match="backend triton cannot run: halved has no kernel"):
        check_split([w], [cut(w, (1001,))], fmt, torch.float32, "triton")
