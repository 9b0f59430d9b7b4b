"""Launches of the kernels that cast, transpose and permute, of which test_builds.py looks at the builds."""

import functools
import itertools

import kernel_builds
import pytest
import torch

from torchao_blockwise.formats import (
    E4M3,
    FORMATS,
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    NVFP4_16X16,
    CastOptions,
    Groups,
    Place,
    hadamard_number,
)
from torchao_blockwise.ops.fused import Norm
from torchao_blockwise.ops.fused import kernels_gluon as fused_gluon
from torchao_blockwise.ops.fused import kernels_triton as fused_triton
from torchao_blockwise.ops.gemm import kernels_decode as decode
from torchao_blockwise.ops.groups.permutation import MAX_EXPERTS
from torchao_blockwise.ops.groups.permutation import kernels_triton as permute
from torchao_blockwise.ops.groups.tables.layout import FIELDS, layout_of
from torchao_blockwise.ops.quantization import kernels_amax, kernels_chunks, kernels_gluon, kernels_triton
from torchao_blockwise.ops.shards import kernels_triton as shards
from torchao_blockwise.ops.shards.flat import Shards, shard_entries
from torchao_blockwise.ops.transposition import kernels_triton as transpose

BOTH = {"rowwise": True, "columnwise": True}
COLUMNWISE = {"rowwise": False, "columnwise": True}
# Token counts that change: of these a kernel has one build, or one for multiples of 16 and one for all others.
SHAPES = ((512, 1024), (528, 1024), (531, 1024), (533, 1024))


def words_of(name, m, k, dtype, options, groups=0) -> str:
    """A label: the name, and a word for each option."""
    copies = "+".join(copy for copy in ("rowwise", "columnwise") if options.get(copy, copy == "rowwise"))
    copies += "_squares" * bool(options.get("columnwise_format_name"))
    others = [options.get("power_of_2_scales") and "power_of_2", f"E{groups}" if groups else "plain"]
    return " ".join([name, f"{m}x{k}", str(dtype)[6:], copies, *filter(None, others)])


def groups_of(count):
    return Groups(torch.zeros(count, dtype=torch.int32)) if count else None


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    # Quantizing needs conversions to e4m3 in hardware.
    if target >= 89:
        yield from _quantize_cases()
        yield from _gluon_cases()
        yield from _random_cases()
        yield from _fused_cases()
    yield from _transpose_cases()
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 1024, dtype=dtype)
        yield f"tensor_amax {str(dtype)[6:]}", functools.partial(kernels_amax.tensor_amax_bits, x, None, False)
    # Blackwell multiplies NVFP4 as it is.
    if target < 100:
        pair = kernel_builds.operand(NVFP4_1X16, 512, 64), kernel_builds.operand(NVFP4_16X16, 256, 64)
        sums = torch.zeros(512, 256)
        yield "decoded_scale bias", lambda: decode._scale(sums, *pair, torch.zeros(256), sums.bfloat16(), False)
        yield "decoded_scale adding", lambda: decode._scale(sums, *pair, None, sums, True)
    yield from _shard_cases(target)
    yield from _permute_cases()


def _quantize(name, fmt, m, k, dtype=None, groups=0, own=False, key=None, place=None, **options):
    """own: whether each group has its tensor scale."""
    dtype = dtype or torch.bfloat16
    bits = torch.ones(groups if own else ()).view(torch.int32) if fmt.has_global_scale else None
    cast = CastOptions(fmt, scale_per_group=own, **options)
    label = words_of(f"{name} {fmt.name}", m, k, dtype, options, groups) + " scales" * own
    x = torch.zeros(m, k, dtype=dtype)
    return label, lambda: kernels_triton.quantize(x, bits, cast, groups_of(groups), key, place)


def _quantize_cases():
    f32, squares = torch.float32, {**BOTH, "columnwise_format_name": "fp8_128x128"}
    for fmt in FORMATS.values():
        of = functools.partial(_quantize, "quantize", fmt)
        yield from (of(512, 1024, **copies) for copies in ({}, COLUMNWISE, BOTH))
        yield from (of(m, k, f32, **BOTH) for m, k in ((512, 1024), (1, 16), (16, 1), (33, 150)))
        yield of(300, 500, **BOTH)
        if fmt.has_power_of_2_scales:
            yield of(512, 1024, power_of_2_scales=True, **BOTH)
        yield from (of(m, 1024, **BOTH) for m in ((528, 531, 533) if fmt.element is E4M3 else (531,)))
    yield from (_quantize("quantize", FP8_1X128, 512, 1024, dtype, **squares) for dtype in (torch.bfloat16, f32))
    yield _quantize("quantize", FP8_1X128, 512, 1024, groups=8, **squares)
    for fmt, copies in itertools.product((FP8_1X128, NVFP4_1X16), ({}, COLUMNWISE)):
        of = functools.partial(_quantize, "quantize", fmt, padded=True, **copies)
        yield from (of(m, k, groups=8) for m, k in (*SHAPES, (300, 500)))
        yield of(512, 1024, f32, groups=8)
        yield of(512, 1024, groups=257)
        if fmt is NVFP4_1X16:
            yield from (of(300, 500, groups=groups, own=True) for groups in (8, 256))


def _gluon_cases():
    def case(name, m, k, dtype=torch.bfloat16, warps=None, groups=0, **options):
        def launch():
            with pytest.MonkeyPatch.context() as patch:
                if warps:
                    patch.setattr(kernels_gluon, "BOTH", (128, warps))
                cast = CastOptions(FP8_1X128, **options)
                kernels_gluon.quantize(torch.zeros(m, k, dtype=dtype), None, cast, groups_of(groups))

        return words_of(f"quantize {name}", m, k, dtype, options, groups) + f" warps{warps}", launch

    yield case("one_read", 512, 1024, warps=4, columnwise_format_name="fp8_128x128", **BOTH)
    yield case("one_read", 512, 1024, torch.float16, 8, power_of_2_scales=True, **BOTH)
    yield from (case("one_read", 512, 1024, warps=warps, **BOTH) for warps in (4, 16))
    for m, k in ((512, 1024), (528, 2064), (531, 1024), (1, 1024)):
        yield case("one_read", m, k, warps=8, **BOTH)
        yield case("columnwise_read", m, k, **COLUMNWISE)
    for m, warps in itertools.product((512, 531), (4, 8, 16)):
        yield case("one_read", m, 1024, warps=warps, groups=8, **BOTH)


def _random_cases():
    """Transforms and random bits, with the amaxes that they need."""
    number, key, amax_bits = hadamard_number(True), torch.zeros(4, dtype=torch.int64), kernels_amax.tensor_amax_bits
    for groups in (8, 256):
        x, of = torch.zeros(512, 1024, dtype=torch.bfloat16), groups_of(groups)
        label = f"E{groups} scales 512x1024"
        yield f"amaxes {label}", functools.partial(kernels_chunks.hadamard_amax_bits, x, number, of, True)
        yield f"amaxes_of_groups {label}", functools.partial(amax_bits, x, of.ends, True)
        yield f"amaxes_of_matrices {label}", functools.partial(amax_bits, x.view(2, 256, 1024), None, True)
        yield f"scales {label}", functools.partial(kernels_amax.global_scale, torch.ones(groups).view(torch.int32))
    for groups, (m, k) in itertools.product((0, 8), SHAPES):
        x, words = torch.zeros(m, k, dtype=torch.bfloat16), f"E{groups}" if groups else "plain"
        run = functools.partial(kernels_chunks.hadamard_amax_bits, x, number, groups_of(groups), False)
        yield f"amaxes {m}x{k} {words}", run
        for dtype in (torch.bfloat16, torch.float32) if m == 512 else (torch.bfloat16,):
            of = {"groups": groups, "dtype": dtype, "own": bool(groups) and m == 528, "padded": True}
            yield _quantize("transformed", NVFP4_1X16, m, k, hadamard=number, **of, **COLUMNWISE)
            yield _quantize("both", NVFP4_1X16, m, k, hadamard=number, key=key, **of, **COLUMNWISE)
            yield from (_quantize("rounded", NVFP4_1X16, m, k, key=key, **of, **copies) for copies in (COLUMNWISE, {}))
        if m == 512:
            of = {"groups": groups, "hadamard": number, "key": key, "place": Place(0, 128, 7, 99), "padded": True}
            yield _quantize("both", NVFP4_1X16, m, k, **of, **COLUMNWISE)


def _fused_cases():
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    squares = {**BOTH, "columnwise_format_name": "fp8_128x128"}

    def norm(by, kind, m, k, dtype=bf16, x_dtype=None, values=False, **options):
        x, row, vector = (torch.zeros(*shape, dtype=x_dtype or dtype) for shape in ((m, k), (m,), (k,)))
        row = row.float()
        if kind == "rms":
            of = Norm(x, vector if by is fused_triton else vector.float(), None, None, row, dtype)
        else:
            of = Norm(x, vector, vector, row, row, dtype)
        words = words_of(f"{by.__name__.rpartition('_')[2]} {kind}", m, k, dtype, options)
        words += f" of {x_dtype}" * (x_dtype is not None)
        yield f"norm_quantize {words}", lambda: by.norm_quantize(of, CastOptions(FP8_1X128, **options))
        if values:
            yield f"norm_statistics {words}", lambda: by.norm_statistics(x, kind == "layer", 1e-5)
            yield f"normalize {words}", lambda: by.normalize(of)

    def swiglu(by, m, h, dtype=bf16, groups=0, values=False, **options):
        dh, (gate, up) = torch.zeros(m, h, dtype=dtype), torch.zeros(m, 2 * h, dtype=dtype).chunk(2, 1)
        words = words_of(by.__name__.rpartition("_")[2], m, h, dtype, options, groups)
        of, cast = groups_of(groups), CastOptions(FP8_1X128, **options)
        if groups and by is fused_gluon:
            # With their tables, which another kernel makes.
            entries = layout_of(m, groups, FP8_1X128.block[1]).length
            of = Groups(of.ends, torch.zeros(entries, FIELDS, dtype=torch.int32))
        yield f"swiglu_quantize {words}", lambda: by.swiglu_quantize(gate, up, cast, of)
        # Else it runs as two operations.
        if h % 16 == 0:
            yield f"swiglu_backward_quantize {words}", lambda: by.swiglu_backward_quantize(dh, gate, up, cast, of)
        if values:
            yield f"swiglu {words}", lambda: by.swiglu(gate, up)
            yield f"swiglu_backward {words}", lambda: by.swiglu_backward(dh, gate, up)

    by = fused_triton
    for m, k, dtype in ((512, 1024, bf16), (512, 1024, f32), (300, 500, bf16)):
        for kind in ("rms", "layer"):
            yield from norm(by, kind, m, k, dtype, values=True)
        yield from swiglu(by, m, k, dtype, values=True)
    yield from norm(by, "rms", 512, 1024, power_of_2_scales=True)
    yield from swiglu(by, 512, 1024, power_of_2_scales=True)
    # Ragged only in M, and with that in a block.
    for k in (1024, 400):
        yield from norm(by, "layer", 300, k)
        yield from swiglu(by, 300, k)
    for m, k in SHAPES[1:]:
        yield from norm(by, "rms", m, k)
        yield from swiglu(by, m, k)
    # Rows of 1040 are on 16 bytes, but blocks of the merged gradient hold parts of both halves.
    yield from swiglu(by, 512, 1040)
    for m, k in (*SHAPES, (512, 1040)):
        yield from swiglu(by, m, k, groups=8)
    yield from swiglu(by, 512, 1024, f32, 8)

    by = fused_gluon
    for copies, kind in itertools.product((COLUMNWISE, BOTH), ("rms", "layer")):
        yield from norm(by, kind, 512, 1024, **copies)
    yield from norm(by, "rms", 512, 1024, **squares)
    yield from swiglu(by, 512, 1024, groups=8, **squares)
    yield from norm(by, "layer", 512, 1024, f16, f16, **BOTH)
    yield from norm(by, "layer", 512, 1024, bf16, f16, **BOTH)
    yield from norm(by, "rms", 512, 1024, power_of_2_scales=True, **BOTH)
    for h in (1024, 1040):
        for groups in (0, 8):
            yield from swiglu(by, 512, h, groups=groups, **COLUMNWISE)
            for m in (512, 1, 528, 531, 533):
                yield from swiglu(by, m, h, groups=groups, **BOTH)
        yield from swiglu(by, 512, h, f16, 8, power_of_2_scales=True, **BOTH)
    yield from swiglu(by, 512, 1024, f16, **BOTH)
    for m in (1, 528, 531, 533):
        yield from norm(by, "rms", m, 1024, **BOTH)


def _transpose_cases():
    tiles = transpose._QUADS_TILES
    large = {0: tiles[max(tiles)]}

    def case(fmt, m, k, tiles=tiles):
        def launch():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transpose, "_QUADS_TILES", tiles)
                transpose.transpose(kernel_builds.operand(fmt, m, k), k)

        return f"transpose {fmt.name} {m}x{k}" + " large" * (tiles is large), launch

    for fmt, (m, k) in itertools.product((FP8_128X128, NVFP4_16X16), ((512, 1024), (301, 501), (1, 1))):
        yield case(fmt, m, k)
    # Multiples of 16, but not of 16 words.
    yield case(FP8_128X128, 528, 1040)
    yield case(FP8_128X128, 512, 1024, large)


def _shard_cases(target: int):
    """Lists of flat shards: on 16 bytes ("aligned"), and anywhere ("ragged"); a longer list is the same build."""

    def case(fmt, op, alignment, master, dtype, count=1):
        start, n, shape = (1024, 2**18, (1, 512, 1024)) if alignment == "aligned" else (77, 9999, (3, 300, 501))
        if op == "whole_block_cast":
            start, n = 256 * shape[-1], 44 * shape[-1] if alignment == "ragged" else 2**18
        _, size = shard_entries(start, n, shape[-1], fmt)
        targets, firsts = [torch.zeros(size, dtype=torch.uint8)] * count, [0] * count
        of = Shards([torch.zeros(n, dtype=master)] * count, [start] * count, [*shape] * count, firsts, dtype, fmt)
        amax_bits, encode = torch.zeros(2**16, dtype=torch.int32), torch.zeros(2**16)
        scales = [torch.zeros(64, dtype=fmt.scale_dtype)] * count
        global_scales = [torch.zeros(())] * count if fmt.has_global_scale else []
        power_of_2 = fmt.has_power_of_2_scales and (dtype is torch.float16 or count == 2)
        args = {
            "partial_block_amax": (amax_bits, of),
            "partial_cast": (targets, of, encode),
            "whole_block_cast": (targets, amax_bits, of, power_of_2),
            "block_scales": (encode, scales, global_scales, amax_bits, firsts, fmt, power_of_2),
        }[op]
        label = f"{op} {fmt.name} {alignment} {str(master)[6:]} {str(dtype)[6:]} x{count}"
        return label, functools.partial(getattr(shards, f"{op}_"), *args)

    pairs = [
        ("aligned", torch.float32, torch.bfloat16),
        ("aligned", torch.bfloat16, torch.float16),
        ("aligned", torch.float16, torch.float32),
        ("ragged", torch.float32, torch.bfloat16),
    ]
    for fmt in (FP8_128X128, NVFP4_16X16):
        for pair in pairs:
            yield case(fmt, "partial_block_amax", *pair)
            if fmt is NVFP4_16X16:
                yield from (case(fmt, "partial_cast", *pair, count) for count in (1, 32))
            elif target >= 89:
                yield from (case(fmt, op, *pair) for op in ("partial_cast", "whole_block_cast"))
        yield from (case(fmt, "block_scales", *pairs[0], count) for count in (1, 2, 32))


def _permute_cases():
    def rows(tokens, width, top_k, dtype=torch.bfloat16):
        x, y = torch.zeros(tokens, width, dtype=dtype), torch.zeros(tokens * top_k, width, dtype=dtype)
        source, weights = torch.zeros(tokens * top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
        where, partial = f"{tokens}x{width} top{top_k} {str(dtype)[6:]}", functools.partial
        yield f"permute {where}", partial(permute.unpermute_backward, x, None, source, top_k, None)
        yield f"backward {where}", partial(permute.unpermute_backward, x, y, source, top_k, weights)
        yield f"sum {where}", partial(permute.unpermute, y, source, top_k, None)
        yield f"unpermute {where}", partial(permute.unpermute, y, source, top_k, weights)

    routes = list(itertools.product((512, 2**15), (1, 8, 64, 128, 256, MAX_EXPERTS)))
    # Numbers of assignments that change.
    routes += [(assignments, 256) for assignments in (2**15 + 16, 2**20 + 1, 1025)]
    for assignments, experts in routes:
        ids = torch.zeros(assignments, 1, dtype=torch.int64)
        yield f"route {assignments} to {experts} int64", functools.partial(permute._route, ids, experts)
    yield "route 512 to 256 int32", functools.partial(permute._route, torch.zeros(512, 1, dtype=torch.int32), 256)
    for width, dtype in itertools.product((2048, 500), (torch.bfloat16, torch.float32)):
        yield from rows(512, width, 2, dtype)
    yield from rows(512, 7168, 8)
    # Token counts that change.
    for tokens in (528, 531, 1):
        yield from rows(tokens, 2048, 2)
