"""Every Triton kernel compiles for the GPUs it is for: no spills, the right instructions, few builds. Needs no GPU."""

import pytest

pytest.importorskip("triton")

import kernel_builds
from kernel_builds import TARGETS

pytestmark = pytest.mark.slow

_SIXTEEN_BYTES = {"st.global.v4.b32", "st.global.v2.b64"}


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    import torch

    from torchao_blockwise import _compat
    from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, CastOptions
    from torchao_blockwise.ops.gemm import kernels_decode as decode
    from torchao_blockwise.ops.quantization import kernels_amax as amax
    from torchao_blockwise.ops.quantization import kernels_triton as quantize
    from torchao_blockwise.ops.transposition import kernels_triton as transpose

    amax_bits = torch.ones(()).view(torch.int32)

    def quantize_case(fmt, m, k, dtype, rowwise, columnwise, power_of_2=False, square=""):
        copies = "+".join(["rowwise"] * rowwise + ["columnwise"] * columnwise)
        label = (
            f"quantize {fmt.name} {m}x{k} {str(dtype)[6:]} {copies}"
            + " power_of_2" * power_of_2
            + " squares" * bool(square)
        )
        bits = amax_bits if fmt.has_global_scale else None
        x = torch.zeros(m, k, dtype=dtype)
        options = CastOptions(fmt, rowwise, columnwise, power_of_2, columnwise_format_name=square)
        return label, lambda: quantize.quantize(x, bits, options)

    def table_case(name, value):
        """Another tile of the columnwise copy of one-row blocks."""
        label, call = quantize_case(FP8_1X128, 512, 1024, torch.bfloat16, False, True)

        def launch():
            before = getattr(quantize, name)
            setattr(quantize, name, value)
            call()
            setattr(quantize, name, before)

        return f"{label} {name} {'x'.join(map(str, value))}", launch

    def one_read_case(m, k, dtype, warps, power_of_2=False, square=""):
        from torchao_blockwise.ops.quantization import kernels_gluon as gluon

        label = f"quantize one_read fp8_1x128 {m}x{k} {str(dtype)[6:]} {warps} warps" + " power_of_2" * power_of_2
        label += " squares" * bool(square)
        x = torch.zeros(m, k, dtype=dtype)
        options = CastOptions(FP8_1X128, True, True, power_of_2, columnwise_format_name=square)

        def launch():
            gluon.BOTH = FP8_1X128.block[1], warps
            gluon.quantize(x, None, options)

        return label, launch

    def columnwise_read_case(m, k):
        from torchao_blockwise.ops.quantization import kernels_gluon as gluon

        label = f"quantize columnwise_read fp8_1x128 {m}x{k}"
        x, options = torch.zeros(m, k, dtype=torch.bfloat16), CastOptions(FP8_1X128, False, True)
        return label, lambda: gluon.quantize(x, None, options)

    def transpose_case(fmt, m, k, tiles=None):
        def launch():
            before = transpose._QUADS_TILES
            transpose._QUADS_TILES = tiles or before
            transpose.transpose(kernel_builds.operand(fmt, m, k), k)
            transpose._QUADS_TILES = before

        return f"transpose {fmt.name} {m}x{k}" + " large" * bool(tiles), launch

    # Quantizing needs conversions to e4m3 in hardware, from sm_89 on.
    if target >= 89:
        yield table_case("_FP8_COLUMNWISE_TILE", (128, 32, 2, 8))
    for fmt in FORMATS.values() if target >= 89 else ():
        for copies in ((True, False), (False, True), (True, True)):
            yield quantize_case(fmt, 512, 1024, torch.bfloat16, *copies)
        yield quantize_case(fmt, 512, 1024, torch.float32, True, True)
        yield quantize_case(fmt, 300, 500, torch.bfloat16, True, True)
        for m, k in ((1, 16), (16, 1), (33, 150)):
            yield quantize_case(fmt, m, k, torch.float32, True, True)
        if fmt.has_power_of_2_scales:
            yield quantize_case(fmt, 512, 1024, torch.bfloat16, True, True, True)
        # Token counts that change: the first one is built already, the others make one build more.
        for m in (528, 531, 533) if fmt.element is FP8_1X128.element else (531,):
            yield quantize_case(fmt, m, 1024, torch.bfloat16, True, True)
    for dtype in (torch.bfloat16, torch.float32) if target >= 89 else ():
        yield quantize_case(FP8_1X128, 512, 1024, dtype, True, True, square=FP8_128X128.name)
    if target >= 90 and _compat.has_gluon():
        yield one_read_case(512, 1024, torch.bfloat16, 4, square=FP8_128X128.name)
        for warps in (4, 8, 16):
            yield one_read_case(512, 1024, torch.bfloat16, warps)
        yield one_read_case(512, 1024, torch.float16, 8, True)
        for m, k in ((528, 2064), (531, 1024), (1, 1024)):
            yield one_read_case(m, k, torch.bfloat16, 8)
        for m, k in ((512, 1024), (528, 2064), (531, 1024), (1, 1024)):
            yield columnwise_read_case(m, k)
    for fmt in (FP8_128X128, NVFP4_16X16):
        yield transpose_case(fmt, 512, 1024)
        yield transpose_case(fmt, 301, 501)
        yield transpose_case(fmt, 1, 1)
    # Multiples of 16, but not of 16 words.
    yield transpose_case(FP8_128X128, 528, 1040)
    yield transpose_case(FP8_128X128, 512, 1024, {0: transpose._QUADS_TILES[max(transpose._QUADS_TILES)]})
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(512, 1024, dtype=dtype)
        yield f"tensor_amax {str(dtype)[6:]}", lambda x=x: amax.tensor_amax_bits(x, None, False)
    # Blackwell multiplies NVFP4 as it is.
    if target < 100:
        pair = kernel_builds.operand(NVFP4_1X16, 512, 64), kernel_builds.operand(NVFP4_16X16, 256, 64)
        sums = torch.zeros(512, 256)
        yield "decoded_scale bias", lambda: decode._scale(sums, *pair, torch.zeros(256), sums.bfloat16(), False)
        yield "decoded_scale adding", lambda: decode._scale(sums, *pair, None, sums, True)
    yield from _shard_cases(target)


def _shard_cases(target: int):
    """Lists of flat shards: on 16 bytes ("aligned"), and anywhere ("ragged"); a longer list is the same build."""
    import math

    import torch

    from torchao_blockwise.formats import FP8_128X128, NVFP4_16X16
    from torchao_blockwise.ops.shards import kernels_triton as partial_cast
    from torchao_blockwise.ops.shards.flat import CODES, WHOLE, Shards

    def case(fmt, op, alignment, master, dtype, count, packed=True):
        start, n, shape = (1024, 2**18, (1, 512, 1024)) if alignment == "aligned" else (77, 9999, (3, 300, 501))
        if op == "whole_block_cast":
            start, n = 256 * shape[-1], 44 * shape[-1] if alignment == "ragged" else 2**18
        whole = torch.zeros(math.prod(fmt.qdata_shape(*shape)), dtype=torch.uint8)
        target = whole if packed else torch.zeros(n, dtype=torch.uint8)
        into, packed = WHOLE if packed else CODES, packed and fmt is NVFP4_16X16
        firsts = [0] * count
        shards = Shards([torch.zeros(n, dtype=master)] * count, [start] * count, [*shape] * count, firsts, dtype, fmt)
        amax_bits, encode = torch.zeros(2**16, dtype=torch.int32), torch.zeros(2**16)
        scales = [torch.zeros(64, dtype=fmt.scale_dtype)] * count
        global_scales = [torch.zeros(())] * count if fmt.has_global_scale else []
        launch = {
            "partial_block_amax": lambda: partial_cast.partial_block_amax_(amax_bits, shards),
            "partial_cast": lambda: partial_cast.partial_cast_([target] * count, shards, encode, into),
            "whole_block_cast": lambda: partial_cast.whole_block_cast_(
                [whole] * count, amax_bits, shards, dtype is torch.float16, WHOLE
            ),
            "block_scales": lambda: partial_cast.block_scales_(
                encode, scales, global_scales, amax_bits, firsts, fmt, fmt.has_power_of_2_scales and count == 2
            ),
        }[op]
        label = f"{op} {fmt.name} {alignment} {str(master)[6:]} {str(dtype)[6:]} x{count}" + " codes" * (not packed)
        return label, launch

    pairs = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32))
    for fmt in (FP8_128X128, NVFP4_16X16):
        for alignment in ("aligned", "ragged"):
            for master, dtype in pairs if alignment == "aligned" else pairs[:1]:
                yield case(fmt, "partial_block_amax", alignment, master, dtype, 1)
                # Converting to e4m3 in hardware needs sm_89.
                for packed in (True, False) if fmt is NVFP4_16X16 else (True,):
                    if target >= 89 or fmt is NVFP4_16X16:
                        yield case(fmt, "partial_cast", alignment, master, dtype, 1, packed)
                        yield case(fmt, "partial_cast", alignment, master, dtype, 32, packed)
                if target >= 89 and fmt is FP8_128X128:
                    yield case(fmt, "whole_block_cast", alignment, master, dtype, 1)
        for count in (1, 2, 32):
            yield case(fmt, "block_scales", "aligned", *pairs[0], count)


@pytest.mark.parametrize("target", TARGETS)
def test_builds_are_sound(builds, target):
    kernel_builds.assert_sound(builds[target], target)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_quantize_rounds_as_the_reference_does(builds, target):
    """Division rounded correctly, conversions to e4m3 in hardware, subnormals kept, no contraction."""
    for row in kernel_builds.of(builds[target], "quantize"):
        names = row["instructions"]
        assert {i for i in names if i.startswith("div")} == {"div.rn.f32"}, row["label"]
        assert ("cvt.rn.satfinite.e4m3x2.f32" in names) == ("fp8" in row["label"]), row["label"]
        assert not [i for i in names if ".ftz" in i or i.startswith("fma")], row["label"]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_token_counts_do_not_rebuild_the_one_read(builds, target):
    shapes = ("512x1024", "528x2064", "531x1024", "1x1024")
    for words in (("one_read", "bfloat16", "8"), ("columnwise_read",)):
        rows = [kernel_builds.of(builds[target], shape, *words)[0] for shape in shapes]
        assert len({row["build"] for row in rows}) == 1


@pytest.mark.parametrize("target", TARGETS[1:])
def test_payload_is_stored_16_bytes_at_a_time(builds, target):
    for row in kernel_builds.of(builds[target], "quantize") + kernel_builds.of(builds[target], "transpose"):
        if "512x1024" in row["label"] or "transpose fp8_128x128 528x1040" in row["label"]:
            assert _SIXTEEN_BYTES & set(row["instructions"]), row["label"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_transpose_of_fp8_moves_four_bytes_at_a_time_in_one_build_a_tile(builds, target):
    rows = kernel_builds.of(builds[target], "transpose", "fp8_128x128")
    rows = [row for row in rows if "quads" in row["kernel"]]
    assert [row["label"].split()[2:] for row in rows] == [["512x1024"], ["528x1040"], ["512x1024", "large"]]
    assert rows[0]["build"] == rows[1]["build"] != rows[2]["build"]
    assert all("st.global.v4.b32" in row["instructions"] for row in rows)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_payload_of_any_number_of_tokens_is_stored_16_bytes_at_a_time(builds, target):
    """Scales of NVFP4 are bytes; but for them nothing is stored a byte at a time."""
    rows = kernel_builds.of(builds[target], "quantize", "531x1024")
    assert {row["kernel"] for row in rows} == {
        "_quantize_fp8_kernel", "_quantize_nvfp4_kernel", "_quantize_kernel", "_columnwise_kernel"
    }  # fmt: skip
    for row in rows:
        assert _SIXTEEN_BYTES & set(row["instructions"]), row["label"]
        assert "nvfp4" in row["kernel"] or "st.global.b8" not in row["instructions"], row["label"]


@pytest.mark.parametrize("target", TARGETS)
def test_shards_are_cast_as_the_whole_is(builds, target):
    """As for quantizing; and 16 bytes at a time where shards lie so."""
    casts = ("partial_cast", "whole_block_cast")[: 1 if target < 89 else None]
    for op in ("partial_block_amax", *casts, "block_scales"):
        for row in kernel_builds.of(builds[target], op):
            names = row["instructions"]
            assert {i for i in names if i.startswith("div")} <= {"div.rn.f32"}, row["label"]
            assert not [i for i in names if ".ftz" in i or i.startswith("fma")], row["label"]
            assert row["half_defined_words"] == [], row["label"]
            if op in casts:
                assert ("st.global.v4.b32" in names) == ("aligned" in row["label"]), row["label"]


@pytest.mark.parametrize("target", TARGETS)
def test_longer_lists_of_shards_do_not_recompile(builds, target):
    for ragged in ("aligned", "ragged"):
        rows = kernel_builds.of(builds[target], "partial_cast", "nvfp4_16x16", ragged, "float32", "bfloat16")
        rows = [row for row in rows if not row["label"].endswith("codes")]
        assert len(rows) == 2 and len({row["build"] for row in rows}) == 1


@pytest.mark.parametrize("target", TARGETS[1:])
def test_token_counts_do_not_recompile(builds, target):
    """The columnwise launch, the second one: multiples of 16 and all others."""
    rows = [
        kernel_builds.of(builds[target], "fp8_1x128", f"{m}x1024", "rowwise+columnwise")[1] for m in (528, 531, 533)
    ]
    assert len({row["build"] for row in rows}) == 2
