"""Partial cast: shards quantized apart have the bits of the whole, for every split, and touch nothing else."""

from __future__ import annotations

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
    SHAPES,
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
    scales_of,
    splits,
)

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_128X128, NVFP4_16X16, Scales
from torchao_blockwise.ops.shards.flat import CODES, ENTRIES, WHOLE, block_count
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, with_special_values

library = torch.ops.torchao_blockwise


@backends
@dtypes
@splits
@formats
def test_any_split_has_the_bits_of_the_whole(fmt, shape, cuts, dtype, backend, device):
    w = random_tensor(*shape, device=device)
    check_split(w, cut(w, cuts), fmt, dtype, backend)


@backends
@dtypes
@formats
def test_shards_that_move_16_bytes_at_a_time(fmt, dtype, backend, device):
    w = random_tensor(3, 72, 352, dtype=dtype, device=device)
    check_split(w, cut(w, (32, 32 * 700, 32 * 701)), fmt, torch.bfloat16, backend, aligned=True)


@backends
@pytest.mark.parametrize("master", DTYPES, ids=lambda d: str(d)[6:])
@formats
def test_masters_of_any_dtype(fmt, master, backend, device):
    """Masters are rounded to the weight's dtype first; fp16 from large values gives Inf, as a cast does."""
    w = with_special_values(random_tensor(33, 150, device=device), fmt).to(master)
    for dtype in DTYPES:
        check_split(w, cut(w, (1001, 3000)), fmt, dtype, backend)


@backends
def test_power_of_2_scales(backend, device):
    w = random_tensor(130, 200, device=device)
    check_split(w, cut(w, (12345,)), FP8_128X128, torch.bfloat16, backend, power_of_2=True)


@backends
@pytest.mark.parametrize("value", (float("nan"), -float("nan"), float("inf"), -float("inf")), ids=str)
@formats
def test_nan_and_inf_reach_all_ranks(fmt, value, backend, device):
    w = random_tensor(150, 290, device=device)
    w[140, 3] = value
    w[0, 0], w[0, 1] = float("inf"), 0.0
    check_split(w, cut(w, (20001, 40000)), fmt, torch.bfloat16, backend)


@backends
@formats
def test_zeros(fmt, backend, device):
    w = torch.zeros(33, 51, device=device)
    w[0, 0] = -0.0
    check_split(w, cut(w, (17,)), fmt, torch.bfloat16, backend)


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
    check_split(w, cut(w, cuts), fmt, dtype, backend, power_of_2, aligned)


# --- many at once -----------------------------------------------------------------------------------------------------


@backends
@formats
def test_a_list_is_as_each_alone(fmt, backend, device):
    _, parts, expected = many(fmt, device)
    dtype = torch.bfloat16
    buffer = None
    for rank in range(3):
        starts, shards = zip(*(p[rank] for p in parts))
        amax_bits = ops.partial_block_amax(shards, starts, SHAPES, fmt, dtype=dtype, backend=backend)
        buffer = amax_bits if buffer is None else torch.maximum(buffer, amax_bits)
    scales = [torch.zeros_like(q.scale) for q in expected]
    global_scales = [torch.zeros((), device=device) for _ in expected] if fmt.has_global_scale else None
    encode = ops.block_scales_(scales, global_scales, buffer, fmt, backend=backend)
    targets = [payload(fmt, s, device=device) for s in SHAPES]
    pieces = []
    for rank in range(3):
        starts, shards = zip(*(p[rank] for p in parts))
        ops.partial_cast_(targets, shards, starts, SHAPES, encode, fmt, dtype=dtype, backend=backend)
        sizes = [ops.shard_entries(s, x.numel(), shape[-1], fmt)[1] for s, x, shape in zip(starts, shards, SHAPES)]
        pieces.append([torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes])
        ops.partial_cast_(pieces[-1], shards, starts, SHAPES, encode, fmt, dtype=dtype, into=ENTRIES, backend=backend)
    merged = [payload(fmt, s, 0x77, device) for s in SHAPES]
    starts = [[start for start, _ in p] for p in parts]
    lengths = [[x.numel() for _, x in p] for p in parts]
    columns = [s[-1] for s in SHAPES]
    ops.merge_shards_(merged, list(map(list, zip(*pieces))), starts, lengths, columns, fmt, backend=backend)
    for i, q in enumerate(expected):
        assert_bitwise_equal(scales[i], q.scale, f"scale {i}")
        assert_bitwise_equal(targets[i], q.qdata.view(torch.uint8), f"payload {i}")
        assert_bitwise_equal(merged[i], q.qdata.view(torch.uint8), f"merged {i}")
        if global_scales:
            assert_bitwise_equal(global_scales[i], q.global_scale, f"global scale {i}")


@backends
@formats
def test_shards_of_one_tensor_in_one_call(fmt, backend, device):
    """Amaxes of blocks that several shards of a list touch are joined."""
    w = random_tensor(150, 290, device=device)
    starts, shards = zip(*cut(w, (100, 20001, 20002)))
    bits = ops.partial_block_amax(
        shards, starts, [w.shape] * 4, fmt, dtype=torch.bfloat16, first_blocks=[0] * 4, backend=backend
    )
    assert_bitwise_equal(bits, amaxes([(0, w.flatten())], w.shape, fmt, torch.bfloat16, backend))


@backends
@formats
def test_places_in_a_common_buffer(fmt, backend, device):
    """What other lists have in the buffer stays, and amaxes are only raised."""
    w = random_tensor(33, 150, device=device)
    count = block_count(w.shape, fmt)
    high = torch.tensor(1e30, device=device).view(torch.int32)
    buffer = torch.full((count + 7,), 123, dtype=torch.int32, device=device)
    buffer[5 : 5 + count] = 0
    buffer[5] = high
    whole = [w.flatten()], [0], [w.shape]
    got = ops.partial_block_amax(*whole, fmt, dtype=torch.float32, out=buffer, first_blocks=[5], backend=backend)
    assert got is buffer
    assert buffer[:5].tolist() == [123] * 5 and buffer[5 + count :].tolist() == [123] * 2 and buffer[5] == high
    alone = ops.partial_block_amax(*whole, fmt, dtype=torch.float32, backend=backend)
    assert_bitwise_equal(buffer[6 : 5 + count], alone[1:])


@formats
def test_launches_do_not_grow_with_the_list(fmt, device, monkeypatch):
    from torchao_blockwise.ops.shards.merge import kernels_triton as merge
    from torchao_blockwise.ops.shards.partial_cast import kernels_triton as cast

    launches = []
    for module in (cast, merge):
        make = module.make_table
        monkeypatch.setattr(module, "make_table", lambda *args, make=make: launches.append(1) or make(*args))

    def run(count):
        launches.clear()
        w = [random_tensor(32, 64, device=device, seed=i) for i in range(count)]
        shards, starts, shapes = [x.flatten() for x in w], [0] * count, [x.shape for x in w]
        options = {"dtype": torch.bfloat16, "backend": "triton"}
        amax_bits = ops.partial_block_amax(shards, starts, shapes, fmt, **options)
        q = [quantize(x, fmt, torch.bfloat16) for x in w]
        global_scales = [x.global_scale for x in q] if fmt.has_global_scale else None
        encode = ops.block_scales_([x.scale for x in q], global_scales, amax_bits, fmt, backend="triton")
        targets = [payload(fmt, s, device=device) for s in shapes]
        ops.partial_cast_(targets, shards, starts, shapes, encode, fmt, **options)
        pieces, lengths = [[t.view(-1)] for t in targets], [[2048]] * count
        ops.merge_shards_(targets, pieces, [[0]] * count, lengths, [64] * count, fmt, backend="triton")
        return len(launches)

    assert run(1) == run(7) == 4


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
    """Amaxes and payload, of the shards alone; and the scales that follow."""
    fmt, w = FP8_128X128, random_tensor(*shape, device=device)
    if w.numel() > 300:
        w.view(-1)[-1], w.view(-1)[1] = float("nan"), float("inf")
    parts, expected = cut(w, cuts), quantize(w, fmt, dtype, power_of_2)
    buffer = torch.zeros(block_count(shape, fmt), dtype=torch.int32, device=device)
    target, check = framed(payload(fmt, shape, device=device))
    for start, shard in parts:
        before = target.clone()
        bits = torch.zeros_like(buffer)
        ops.whole_block_cast_(
            [target], [shard], [start], [shape], bits, fmt, dtype=dtype, power_of_2_scales=power_of_2, backend=backend
        )
        assert_bitwise_equal(bits, amaxes([(start, shard)], shape, fmt, dtype, backend), "amaxes")
        for others in (slice(None, start), slice(start + shard.numel(), None)):
            assert_bitwise_equal(target.view(-1)[others], before.view(-1)[others], "what others own")
        buffer = torch.maximum(buffer, bits)
    check()
    assert_bitwise_equal(target, expected.qdata.view(torch.uint8), "payload")
    assert_bitwise_equal(scales_of(buffer, shape, fmt, backend, power_of_2)[1], expected.scale, "scale")


@backends
@pytest.mark.parametrize("into", (WHOLE, ENTRIES, CODES))
def test_one_read_of_a_list(into, backend, device):
    """Of several dtypes and sizes, on 16 bytes and off, in places of a common buffer, into all kinds of targets."""
    fmt, dtype, cases = FP8_128X128, torch.bfloat16, list(WHOLE_SPLITS.values())
    weights = [random_tensor(*shape, dtype=DTYPES[i % 3], device=device, seed=i) for i, (shape, _) in enumerate(cases)]
    starts, shards = zip(*(cut(w, cuts)[-1] for w, (_, cuts) in zip(weights, cases)))
    shapes = [w.shape for w in weights]
    counts = [block_count(shape, fmt) for shape in shapes]
    firsts = [3 + sum(counts[:i]) for i in range(len(counts))]
    bits = torch.zeros(sum(counts) + 5, dtype=torch.int32, device=device)
    sizes = [w.numel() if into == WHOLE else x.numel() for w, x in zip(weights, shards)]
    targets = [torch.full((size,), 0x5A, dtype=torch.uint8, device=device) for size in sizes]
    ops.whole_block_cast_(
        targets, shards, starts, shapes, bits, fmt, dtype=dtype, into=into, first_blocks=firsts, backend=backend
    )
    places = {"dtype": dtype, "first_blocks": firsts, "backend": backend}
    wanted = ops.partial_block_amax(shards, starts, shapes, fmt, out=torch.zeros_like(bits), **places)
    assert_bitwise_equal(bits, wanted, "amaxes")
    for w, start, shard, target in zip(weights, starts, shards, targets):
        got = target[start : start + shard.numel()] if into == WHOLE else target
        whole = quantize(w, fmt, dtype).qdata.view(torch.uint8).flatten()
        assert_bitwise_equal(got, whole[start : start + shard.numel()], f"payload of {list(w.shape)}")


# --- bytes that two ranks share ---------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("into", (WHOLE, ENTRIES))
def test_the_other_nibble_stays(into, backend, device):
    """Elements 3 to 8 of a row: bytes 1 to 4, of the first only the high nibble, of the last only the low one."""
    w = torch.full((1, 16), 6.0, device=device)
    encode, *_ = scales_of(
        amaxes([(0, w.flatten())], w.shape, NVFP4_16X16, w.dtype, backend), w.shape, NVFP4_16X16, backend
    )
    count = 8 if into == WHOLE else 4
    target = torch.full((count,), 0x1B, dtype=torch.uint8, device=device)
    shard = w.flatten()[3:9].clone()
    ops.partial_cast_(
        [target.view(1, -1) if into == WHOLE else target], [shard], [3], [w.shape], encode, NVFP4_16X16,
        dtype=w.dtype, into=into, backend=backend,
    )  # fmt: skip
    written = [0x7B, 0x77, 0x77, 0x17]
    assert target.tolist() == ([0x1B, *written, *[0x1B] * 3] if into == WHOLE else written)


# --- schemas ----------------------------------------------------------------------------------------------------------


def op_calls():
    w = random_tensor(33, 51)
    q = quantize(w, NVFP4_16X16, torch.bfloat16)
    blocks = block_count(w.shape, NVFP4_16X16)
    bits, encode = torch.zeros(blocks, dtype=torch.int32), torch.ones(blocks)
    name = "nvfp4_16x16"
    shards = [w.flatten()[5:500].clone()], [5], [1, 33, 51], [0], torch.bfloat16, name
    piece, codes = (
        torch.zeros(ops.shard_entries(5, 495, 51, NVFP4_16X16)[1], dtype=torch.uint8),
        torch.zeros(495, dtype=torch.uint8),
    )
    return {
        "partial_block_amax_": (bits, *shards, "reference"),
        "block_scales_": (encode, [q.scale], [q.global_scale], bits, [0], name, False, "reference"),
        "partial_cast_": ([codes], *shards, encode, CODES, "reference"),
        "whole_block_cast_": (
            [torch.zeros(33, 51, dtype=torch.uint8)],
            bits,
            [w.flatten()],
            [0],
            [1, 33, 51],
            [0],
            torch.bfloat16,
            "fp8_128x128",
            False,
            WHOLE,
            "reference",
        ),
        "merge_shards_": ([q.qdata], [piece], [5], [495], [1], [51], name, "reference"),
    }


@pytest.mark.parametrize("name", op_calls())
def test_opcheck(name):
    op = getattr(library, name).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    # test_schema cannot compare fp8 tensors.
    args = op_calls()[name]
    tests = tests[1:] if name == "block_scales_" else tests
    assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@formats
def test_captured_in_a_cuda_graph_without_syncs(fmt):
    """Masters change, addresses stay: a replay casts the new values. A list that was never seen is refused."""
    w = random_tensor(256, 512, device="cuda")
    master, start = w.flatten()[1001:90001].clone(), 1001
    q = quantize(w, fmt, torch.bfloat16)
    amax_bits = torch.zeros(block_count(w.shape, fmt), dtype=torch.int32, device="cuda")
    target = payload(fmt, w.shape, device="cuda")

    def cast(master):
        amax_bits.zero_()
        whole = [master], [start], [w.shape]
        ops.partial_block_amax(*whole, fmt, dtype=torch.bfloat16, out=amax_bits)
        encode = ops.block_scales_([q.scale], [q.global_scale] if fmt.has_global_scale else None, amax_bits, fmt)
        ops.partial_cast_([target], *whole, encode, fmt, dtype=torch.bfloat16)

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
        check_split(w, cut(w, (1001, 3000)), fmt, torch.float32, None)
    for step in (
        lambda: ops.partial_block_amax([w.flatten()], [0], [w.shape], fmt, dtype=w.dtype, backend="triton"),
        lambda: check_split(w, cut(w, (1001,)), fmt, torch.float32, "triton"),
    ):
        with pytest.raises(ValueError, match="backend triton cannot run: halved has no kernel"):
            step()
