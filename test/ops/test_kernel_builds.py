"""Every Triton kernel compiles for the GPUs it is for: no spills, the right instructions, few builds. Needs no GPU."""

import functools
import itertools
import math

import pytest

pytest.importorskip("triton")

import kernel_builds
from kernel_builds import TARGETS

pytestmark = pytest.mark.slow

targets = pytest.mark.parametrize("target", TARGETS)
# Quantizing needs conversions to e4m3 in hardware, from sm_89 on.
encoding_targets = pytest.mark.parametrize("target", TARGETS[1:])
_SIXTEEN_BYTES = {"st.global.v4.b32", "st.global.v2.b64"}


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16
    from torchao_blockwise.ops.gemm import kernels_decode as decode
    from torchao_blockwise.ops.quantization import kernels_amax as amax

    if target >= 89:
        yield from _quantize_cases()
    yield from _transpose_cases()
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 1024, dtype=dtype)
        yield f"tensor_amax {str(dtype)[6:]}", functools.partial(amax.tensor_amax_bits, x, None, False)
    # Blackwell multiplies NVFP4 as it is.
    if target < 100:
        pair = kernel_builds.operand(NVFP4_1X16, 512, 64), kernel_builds.operand(NVFP4_16X16, 256, 64)
        sums = torch.zeros(512, 256)
        yield "decoded_scale bias", lambda: decode._scale(sums, *pair, torch.zeros(256), sums.bfloat16(), False)
        yield "decoded_scale adding", lambda: decode._scale(sums, *pair, None, sums, True)
    yield from _shard_cases(target)
    yield from _permute_cases()


def _quantize_cases():
    import torch

    from torchao_blockwise.formats import E4M3, FORMATS, FP8_1X128, FP8_128X128, CastOptions
    from torchao_blockwise.ops.quantization import kernels_gluon as gluon
    from torchao_blockwise.ops.quantization import kernels_triton as quantize

    bf16, f32, both = torch.bfloat16, torch.float32, (True, True)

    def case(module, name, fmt, m, k, dtype=bf16, copies=both, power_of_2=False, square="", **constants):
        """constants: tiles of the module for this case."""

        def launch():
            with pytest.MonkeyPatch.context() as patch:
                for constant, value in constants.items():
                    patch.setattr(module, constant, value)
                bits = torch.ones(()).view(torch.int32) if fmt.has_global_scale else None
                options = CastOptions(fmt, *copies, power_of_2, columnwise_format_name=square)
                module.quantize(torch.zeros(m, k, dtype=dtype), bits, options)

        which = "+".join(name for name, wanted in zip(("rowwise", "columnwise"), copies) if wanted)
        label = f"{name} {fmt.name} {m}x{k} {str(dtype)[6:]} {which}" + " power_of_2" * power_of_2
        label += f" columnwise {square}" * bool(square)
        return label + "".join(f" {value[-1]}" for value in constants.values()), launch

    yield case(quantize, "quantize", FP8_1X128, 512, 1024, copies=(False, True), _FP8_COLUMNWISE_TILE=(128, 32, 2, 8))
    for fmt in FORMATS.values():
        of = functools.partial(case, quantize, "quantize", fmt)
        yield from (of(512, 1024, copies=copies) for copies in ((True, False), (False, True), both))
        yield from (of(m, k, f32) for m, k in ((512, 1024), (1, 16), (16, 1), (33, 150)))
        yield of(300, 500)
        if fmt.has_power_of_2_scales:
            yield of(512, 1024, power_of_2=True)
        # Token counts that change: the first one is built already, the others make one build more.
        yield from (of(m, 1024) for m in ((528, 531, 533) if fmt.element is E4M3 else (531,)))
    squares = functools.partial(case, quantize, "quantize", FP8_1X128, 512, 1024, square=FP8_128X128.name)
    yield from (squares(dtype) for dtype in (bf16, f32))
    of = functools.partial(case, gluon, "quantize one_read", FP8_1X128)
    yield of(512, 1024, square=FP8_128X128.name, BOTH=(128, 4))
    yield from (of(512, 1024, BOTH=(128, warps)) for warps in (4, 8, 16))
    yield of(512, 1024, torch.float16, power_of_2=True, BOTH=(128, 8))
    yield from (of(m, k, BOTH=(128, 8)) for m, k in ((528, 2064), (531, 1024), (1, 1024)))
    of = functools.partial(case, gluon, "quantize columnwise_read", FP8_1X128, copies=(False, True))
    yield from (of(m, k) for m, k in ((512, 1024), (528, 2064), (531, 1024), (1, 1024)))


def _transpose_cases():
    from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
    from torchao_blockwise.ops.transposition import kernels_triton as transpose

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
    import torch

    from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
    from torchao_blockwise.ops.shards import kernels_triton as kernels
    from torchao_blockwise.ops.shards.flat import CODES, WHOLE, Shards

    def case(fmt, op, alignment, master, dtype, count=1, into=WHOLE):
        start, n, shape = (1024, 2**18, (1, 512, 1024)) if alignment == "aligned" else (77, 9999, (3, 300, 501))
        if op == "whole_block_cast":
            start, n = 256 * shape[-1], 44 * shape[-1] if alignment == "ragged" else 2**18
        size = math.prod(fmt.qdata_shape(*shape)) if into == WHOLE else n
        targets, firsts = [torch.zeros(size, dtype=torch.uint8)] * count, [0] * count
        of = Shards([torch.zeros(n, dtype=master)] * count, [start] * count, [*shape] * count, firsts, dtype, fmt)
        amax_bits, encode = torch.zeros(2**16, dtype=torch.int32), torch.zeros(2**16)
        scales = [torch.zeros(64, dtype=fmt.scale_dtype)] * count
        global_scales = [torch.zeros(())] * count if fmt.has_global_scale else []
        power_of_2 = fmt.has_power_of_2_scales and (dtype is torch.float16 or count == 2)
        args = {
            "partial_block_amax": (amax_bits, of),
            "partial_cast": (targets, of, encode, into),
            "whole_block_cast": (targets, amax_bits, of, power_of_2, WHOLE),
            "block_scales": (encode, scales, global_scales, amax_bits, firsts, fmt, power_of_2),
        }[op]
        label = f"{op} {fmt.name} {alignment} {str(master)[6:]} {str(dtype)[6:]} x{count}" + " codes" * (into == CODES)
        return label, functools.partial(getattr(kernels, f"{op}_"), *args)

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
                yield from (case(fmt, "partial_cast", *pair, 1, into) for into in (WHOLE, CODES))
                yield case(fmt, "partial_cast", *pair, 32)
            elif target >= 89:
                yield from (case(fmt, op, *pair) for op in ("partial_cast", "whole_block_cast"))
        yield from (case(fmt, "block_scales", *pairs[0], count) for count in (1, 2, 32))


def _permute_cases():
    import torch

    from torchao_blockwise.ops.groups.permutation import MAX_EXPERTS
    from torchao_blockwise.ops.groups.permutation import kernels_triton as permute

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


def builds_of(rows, *labels) -> list[int]:
    """How many builds the launches of these labels take: of each label's first launch, second one, .."""
    each = [kernel_builds.of(rows, *words) for words in labels]
    return [len({row["build"] for row in launches}) for launches in zip(*each, strict=True)]


@targets
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@targets
def test_casts_round_as_the_reference_does(builds, target):
    """Division rounded correctly, conversions to e4m3 in hardware, subnormals kept, no contraction."""
    casts = ("quantize", "partial_cast", "whole_block_cast") if target >= 89 else ("partial_cast",)
    for op in (*casts, "partial_block_amax", "block_scales"):
        for row in kernel_builds.of(builds[target], op):
            names = row["instructions"]
            divisions = {i for i in names if i.startswith("div")}
            assert divisions == {"div.rn.f32"} if op == "quantize" else divisions <= {"div.rn.f32"}, row["label"]
            assert not [i for i in names if ".ftz" in i or i.startswith("fma")], row["label"]
            assert row["half_defined_words"] == [], row["label"]
            if op == "quantize":
                assert ("cvt.rn.satfinite.e4m3x2.f32" in names) == ("fp8" in row["label"]), row["label"]
            elif op in casts:
                assert ("st.global.v4.b32" in names) == ("aligned" in row["label"]), row["label"]


@encoding_targets
def test_payload_is_stored_16_bytes_at_a_time(builds, target):
    for row in kernel_builds.of(builds[target], "quantize") + kernel_builds.of(builds[target], "transpose"):
        if "512x1024" in row["label"] or "transpose fp8_128x128 528x1040" in row["label"]:
            assert _SIXTEEN_BYTES & set(row["instructions"]), row["label"]
    # Of any number of tokens. Scales of NVFP4 are bytes; but for them nothing is stored a byte at a time.
    rows = kernel_builds.of(builds[target], "quantize", "531x1024")
    assert {row["kernel"] for row in rows} == {
        "_quantize_fp8_kernel", "_quantize_nvfp4_kernel", "_quantize_kernel", "_columnwise_kernel"
    }  # fmt: skip
    for row in rows:
        assert _SIXTEEN_BYTES & set(row["instructions"]), row["label"]
        assert "nvfp4" in row["kernel"] or "st.global.b8" not in row["instructions"], row["label"]


@encoding_targets
def test_token_counts_do_not_rebuild_casts(builds, target):
    rows, shapes = builds[target], ("512x1024", "528x2064", "531x1024", "1x1024")
    assert builds_of(rows, *((shape, "one_read", "bfloat16", "8") for shape in shapes)) == [1]
    assert builds_of(rows, *((shape, "columnwise_read") for shape in shapes)) == [1]
    # The columnwise launch, the second one: multiples of 16 and all others.
    which = "fp8_1x128", "rowwise+columnwise"
    both = [
        [row for row in kernel_builds.of(rows, *which, f"{m}x1024") if "read" not in row["label"]]
        for m in (528, 531, 533)
    ]
    assert len({each[1]["build"] for each in both}) == 2


@targets
def test_a_transpose_of_fp8_moves_four_bytes_at_a_time_in_one_build_a_tile(builds, target):
    rows = kernel_builds.of(builds[target], "transpose", "fp8_128x128")
    rows = [row for row in rows if "quads" in row["kernel"]]
    assert [row["label"].split()[2:] for row in rows] == [["512x1024"], ["528x1040"], ["512x1024", "large"]]
    assert rows[0]["build"] == rows[1]["build"] != rows[2]["build"]
    assert all("st.global.v4.b32" in row["instructions"] for row in rows)


@targets
def test_longer_lists_and_more_tokens_do_not_rebuild(builds, target):
    rows = builds[target]
    for ragged in ("aligned", "ragged"):
        which = "partial_cast", "nvfp4_16x16", ragged, "float32", "bfloat16"
        one, _, many = kernel_builds.of(rows, *which)
        assert one["build"] == many["build"]
    for case in ("permute", "backward", "sum", "unpermute"):
        counts = builds_of(rows, *((case, f"{tokens}x2048", "bfloat16") for tokens in (512, 528, 531, 1)))
        assert set(counts) == {1}
    counts = builds_of(rows, *(("route", str(n), "256", "int64") for n in (2**15, 2**15 + 16, 1025)))
    assert set(counts) == {1}


@targets
def test_rows_of_tokens_move_16_bytes_at_a_time(builds, target):
    rows = [row for row in builds[target] if row["kernel"] in ("_scatter_kernel", "_gather_kernel")]
    for row in rows:
        assert "st.global.v4.b32" in row["instructions"] or "x500" in row["label"], row["label"]
    # Counts are on their way before they are summed: three tiles of 16 KiB in shared memory besides that in use.
    rows = [row for n in (64, 256, 512) for row in kernel_builds.of(builds[target], "route", "32768", str(n))]
    rows = [row for row in rows if row["kernel"] == "_place_kernel"]
    assert len(rows) == 3 and all(row["SHARED"] >= 3 * 2**14 for row in rows)
