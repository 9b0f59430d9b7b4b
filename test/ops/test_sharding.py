"""DTensor inputs: after a gather every op gives what it gives unsharded, whether shards end on block borders or not.

Two ranks are two threads of this process: their collectives move any dtype. gloo, which does not move fp8, is used
once, for what a real MAX reduction does.
"""

from __future__ import annotations

import pytest
import torch
from helpers import tensor_scales_worker
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

from torchao_blockwise import ops
from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor, relative_error, shape_id

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
# (shape, placements, mesh): even shards that end on block borders, or cut a block, or are uneven.
CASES = {
    f"{shape_id(shape)} {name}": (shape, placements, (2,))
    for shape in ((256, 512), (192, 320), (48, 384), (33, 65), (1, 256))
    for name, placements in {"replicate": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}.items()
}
# Shards of 16 rows end on blocks of 16, but their payload of 4 bits fills no 16 bytes.
CASES |= {f"{rows}x64 rows": ((rows, 64), [Shard(0)], (2,)) for rows in (32, 64)}
CASES |= {f"4x32x256 dim {dim}": ((4, 32, 256), [Shard(dim)], (2,)) for dim in range(3)}
CASES["two dims"] = (512, 1024), [Shard(0), Shard(1)], (2, 2)
PAIRS = ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16))
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(fmt.name for fmt in pair))


def on_ranks(check, mesh_shape: tuple[int, ...] = (2,)) -> None:
    """Run `check(mesh)` on every rank of a mesh; fails with the first rank's failure."""

    @spawn_threads_and_init_comms(world_size=torch.Size(mesh_shape).numel())
    def ranks(_):
        check(init_device_mesh("cpu", mesh_shape))

    ranks(None)


def quantize(x, fmt, *, columnwise=False, **options):
    """One copy."""
    copies = ops.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise, backend="reference", **options)
    return copies.columnwise if columnwise else copies.rowwise


def assert_gathers_to(sharded, whole) -> None:
    """Payload, scales and global scale of a sharded operand, gathered, are the whole one's, bit for bit."""
    assert type(sharded) is type(whole) and sharded.format_name == whole.format_name
    for name, part, expected in zip(whole._fields, sharded.tensors, whole.tensors):
        assert (part is None) == (expected is None), name
        if part is not None:
            assert part.shape == expected.shape, f"{name}: {part.shape}, expected {expected.shape}"
            assert_bitwise_equal(part.full_tensor().contiguous(), expected, name)


# --- operations on one tensor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, placements, mesh_shape", CASES.values(), ids=CASES)
@formats
def test_copies_and_what_is_made_of_them(fmt, shape, placements, mesh_shape):
    x = random_tensor(*shape)
    options = {"columns": shape[1], "backend": "reference"}

    def check(mesh):
        sharded = distribute_tensor(x, mesh, placements)
        for of_columns in (True, FP8_128X128) if fmt is FP8_1X128 else (True,):
            both = (ops.quantize(t, fmt, columnwise=of_columns, backend="reference") for t in (sharded, x))
            for got, expected in zip(*both):
                assert_gathers_to(got, expected)
        for copy in ({}, {"columnwise": True, "padded": True}, {"columnwise": True, "padded": False}):
            assert_gathers_to(quantize(sharded, fmt, **copy), quantize(x, fmt, **copy))
        if len(shape) > 2:
            return
        got, expected = quantize(sharded, fmt), quantize(x, fmt)
        decoded = ops.dequantize(got, columns=shape[1], dtype=torch.bfloat16)
        assert_bitwise_equal(
            decoded.full_tensor(), ops.dequantize(expected, columns=shape[1], dtype=torch.bfloat16), "decoded"
        )
        if fmt.is_square:
            assert_gathers_to(ops.transpose(got, **options), ops.transpose(expected, **options))

    on_ranks(check, mesh_shape)


def test_formats_and_options_do_not_share_a_rule():
    """DTensor caches what a rule answers: the next format, copy or option must not be handed the last one's."""
    x = random_tensor(256, 512)

    def check(mesh):
        sharded = distribute_tensor(x, mesh, [Shard(0)])
        for fmt in (*FORMATS.values(), *FORMATS.values()):
            for columnwise in (False, True, FP8_128X128) if fmt is FP8_1X128 else (False, True):
                options = {"columnwise": columnwise}
                assert_gathers_to(quantize(sharded, fmt, **options), quantize(x, fmt, **options))

    on_ranks(check)


ALIGNED = {
    FP8_1X128: (Shard(0), Shard(1)),
    FP8_128X128: (Shard(0), Shard(0)),
    NVFP4_1X16: (Shard(0), Shard(0)),
    NVFP4_16X16: (Shard(0), Shard(0)),
}


@formats
def test_aligned_shards_are_quantized_where_they_are(fmt):
    x = random_tensor(256, 512)
    amax = x.abs().max() if fmt.has_global_scale else None

    def check(mesh):
        sharded = distribute_tensor(x, mesh, [Shard(0)])
        reduced = amax if amax is None else distribute_tensor(amax, mesh, [Replicate()])
        with CommDebugMode() as communication:
            q = quantize(sharded, fmt, tensor_amax=reduced)
        assert communication.get_total_counts() == 0
        assert (q.qdata.placements, q.scale.placements) == tuple((p,) for p in ALIGNED[fmt])

    on_ranks(check)


@pytest.mark.parametrize("placement", (Replicate(), Shard(0), Shard(1)), ids=("replicate", "rows", "columns"))
@pytest.mark.parametrize("shape", ((256, 512), (33, 65), (1, 256)), ids=shape_id)
def test_tensor_amax_covers_all_ranks(shape, placement):
    def check(mesh):
        for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1)):
            x = random_tensor(*shape)
            x[row, column] = -1e5
            sharded = distribute_tensor(x, mesh, [placement])
            amax = torch.ops.torchao_blockwise.tensor_amax_bits(sharded, None, False, "reference")
            assert amax.full_tensor().view(torch.float32) == 1e5

    on_ranks(check)


def test_nan_and_inf_of_one_rank_reach_the_global_scale_of_all(tmp_path):
    """MAX of gloo and NCCL may drop a NaN: comparisons with it are false."""
    wanted = {("nan", 0): "nan", ("nan", 31): "nan", ("inf", 0): "nan", ("inf", 31): "nan", ("2688", 0): "1.0"}
    assert spawn(tensor_scales_worker, 2, tmp_path, list(wanted)) == [wanted, wanted]


# --- products ---------------------------------------------------------------------------------------------------------


def multiply(a, b, bias=None, out_dtype=torch.float32):
    return ops.matmul(a, b, out_dtype=out_dtype, bias=bias, backend="reference")


# Where a [M, K] and b [N, K] are sharded: data, tensor (by columns, by rows) and mixed.
LAYOUTS = {
    "both replicated": (Replicate(), Replicate()),
    "rows of a": (Shard(0), Replicate()),
    "rows of b": (Replicate(), Shard(0)),
    "contraction": (Shard(1), Shard(1)),
    "rows of both": (Shard(0), Shard(0)),
    "contraction of one": (Replicate(), Shard(1)),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
products = pytest.mark.parametrize("product", ((64, 256, 512), (24, 40, 320), (7, 33, 65)), ids=shape_id)


@layouts
@products
@pairs
def test_matmul(pair, product, layout):
    m, n, k = product
    a, b = random_tensor(m, k, seed=1), random_tensor(n, k, seed=2)
    bias = torch.linspace(-1e3, 1e3, n)
    whole = quantize(a, pair[0]), quantize(b, pair[1])

    def check(mesh):
        shards = [quantize(distribute_tensor(x, mesh, [p]), f) for x, p, f in zip((a, b), layout, pair)]
        for vector in (None, bias):
            sharded_vector = None if vector is None else distribute_tensor(vector, mesh, [Replicate()])
            out, expected = multiply(*shards, sharded_vector), multiply(*whole, vector)
            assert out.shape == expected.shape
            # Another order of the same fp32 sums, no other rounding.
            assert relative_error(out.full_tensor(), expected) <= 2.0**-21

    on_ranks(check)


@pytest.mark.parametrize(("layout", "out"), (((0, None), 0), ((None, 0), 1), ((1, 1), "partial")), ids=str)
@pairs
def test_aligned_products_stay_where_they_are(pair, layout, out):
    placement = [Replicate() if dim is None else Shard(dim) for dim in layout]
    a, b = random_tensor(64, 512, seed=1), random_tensor(256, 512, seed=2)

    def check(mesh):
        qa, qb = (quantize(distribute_tensor(x, mesh, [p]), f) for x, p, f in zip((a, b), placement, pair))
        if pair[0].has_global_scale:
            qa, qb = (q._replace(global_scale=q.global_scale.redistribute(mesh, [Replicate()])) for q in (qa, qb))
        with CommDebugMode() as communication:
            product = multiply(qa, qb)
        assert communication.get_total_counts() == 0
        assert product.placements[0].is_partial() if out == "partial" else product.placements == (Shard(out),)

    on_ranks(check)


def test_out_dtypes_and_formats_do_not_share_a_rule():
    a, b = random_tensor(64, 512, seed=1), random_tensor(256, 512, seed=2)

    def check(mesh):
        for out_dtype in (torch.bfloat16, torch.float32, torch.float16):
            for pair in PAIRS:
                qa, qb = (quantize(distribute_tensor(x, mesh, [Replicate()]), f) for x, f in zip((a, b), pair))
                expected = multiply(quantize(a, pair[0]), quantize(b, pair[1]), out_dtype=out_dtype)
                out = multiply(qa, qb, out_dtype=out_dtype)
                assert out.dtype is out_dtype
                assert_bitwise_equal(out.full_tensor(), expected)

    on_ranks(check)
