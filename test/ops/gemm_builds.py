"""Launches of the kernels of GEMMs and tables of groups, of which test_builds.py looks at the builds."""

import itertools

import kernel_builds
import torch

from torchao_blockwise.formats import FORMATS, FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16, Groups
from torchao_blockwise.ops.gemm import KERNEL_PAIRS, kernels_blackwell, kernels_gluon, kernels_triton
from torchao_blockwise.ops.gemm.builds import BUILDS
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.ops.groups.tables.kernels_triton import group_tables


def _launch(module, pair, along, m, n, k, groups=8, dtype="bfloat16", bias=False, scaled=False, **build):
    """A launcher's call for a [m, k] · b [n, k]ᵀ; along "m" m, along "k" k counts tokens. dtype "adding": to a sum."""
    ends = Groups(torch.zeros(groups, dtype=torch.int32))
    if along == "k":
        k = padded_tokens(k, groups, pair[0].block[1])
    a = kernel_builds.operand(pair[0], m, k)
    b = kernel_builds.operand(pair[1], *((groups, n, k) if along == "m" else (n, k)))
    if scaled:
        a, b = (x._replace(global_scale=torch.ones(groups)) for x in (a, b))
    if dtype == "adding":
        out = torch.zeros(*((groups,) if along else ()), m, n)
        return lambda: module.add_matmul(out, a, b, ends if along else None, **build)
    dtype = getattr(torch, dtype)
    if along:
        return lambda: module.grouped_matmul(a, b, ends, along, dtype, **build)
    return lambda: module.matmul(a, b, dtype, torch.zeros(n) if bias else None, **build)


def _label(*words, **options) -> str:
    return " ".join([*map(str, words), *(f"{k}{v}" for k, v in options.items() if v)])


# The builds of each kind: (M, N, K), groups, dtype, and other options. Of token counts that change, one build.
PLAIN = [((m, 512, 1024), {}) for m in (16, 64, 512, 528, 531)] + [((528, 512, k), {}) for k in (1000, 1003)]
PLAIN += [((300, 500, 500), {}), ((512, 512, 1024), {"dtype": "float32", "bias": True})]
ALONG_M = [((m, 512, 1024), {}) for m in (128, 512, 4096, 4112, 4099)]
ALONG_M += [((4096, 512, 1024), {"dtype": "float32"}), ((4096, 500, 500), {}), ((4096, 512, 1024), {"groups": 300})]
ALONG_K = [((512, 1024, tokens), {}) for tokens in (1, 4096, 4112, 4099)]
ALONG_K += [((512, 1024, 4096), {"dtype": dtype}) for dtype in ("float32", "adding")]
# Sizes of 1 become constants.
ALONG_K += [((500, 500, 4096), {"groups": 300}), ((500, 1, 4096), {"groups": 1}), ((1, 500, 4096), {"groups": 1})]
SCALED_M = [((m, 512, 1024), {"scaled": True}) for m in (128, 512, 4096)]
SCALED_K = [((512, 1024, 4096), {"scaled": True, "dtype": dtype}) for dtype in ("bfloat16", "adding")]


def _triton_cases(target: int):
    kernels_triton.compute_capability = lambda device: divmod(target, 10)
    for names in sorted(KERNEL_PAIRS):
        pair = [FORMATS[name] for name in names]
        kinds = {"": PLAIN, "m": ALONG_M + SCALED_M * pair[0].has_global_scale}
        if pair[1].block[0] > 1:
            kinds["m"] = [*kinds["m"], ((4096, 1, 500), {"groups": 1})]
        if pair[1] is not NVFP4_16X16:
            kinds["k"] = ALONG_K + SCALED_K * pair[0].has_global_scale
        for along, rows in kinds.items():
            for sizes, options in rows:
                label = _label("triton", along or "plain", "·".join(names), "x".join(map(str, sizes)), **options)
                yield label, _launch(kernels_triton, pair, along, *sizes, **options)


def _gluon_cases():
    kernels_gluon.multiprocessors = lambda device: 132
    plain = [((512, 512, 1024), {}), ((528, 512, 1024), {}), ((531, 512, 1003), {}), ((512, 509, 1024), {})]
    plain += [((512, 512, 1024), option) for option in ({"dtype": "float32"}, {"bias": True}, {"dtype": "adding"})]
    rows = [((m, 512, 1024), {"groups": 4}) for m in (1024, 1040, 1043)]
    rows += [((1024, 512, 1024), {"groups": 4, "dtype": "float32"}), ((1024, 509, 1003), {"groups": 4})]
    # The same shapes of an expert's gradient, of as many tokens.
    tokens = [((n, k, m), options) for (m, n, k), options in rows]
    tokens += [((512, 1024, 1024), {"groups": 4, "dtype": "adding"})]
    scaled = {"groups": 4, "scaled": True}
    kinds = {
        "square": ("", (FP8_1X128, FP8_128X128), plain),
        "one_row": ("", (FP8_1X128, FP8_1X128), plain),
        "m": ("m", (FP8_1X128, FP8_128X128), rows),
        "k": ("k", (FP8_1X128, FP8_1X128), tokens),
        "square_k": ("k", (FP8_1X128, FP8_128X128), tokens),
        "decoded_m": ("m", (NVFP4_1X16, NVFP4_16X16), [*rows, ((1024, 512, 1024), scaled)]),
        "decoded_k": ("k", (NVFP4_1X16, NVFP4_1X16), [*tokens, ((512, 1024, 1024), scaled)]),
    }
    kinds["decoded_k"][2].append(((512, 1024, 1024), scaled | {"dtype": "adding"}))
    for build, (kind, (along, pair, shapes)) in itertools.product(BUILDS, kinds.items()):
        for sizes, options in shapes:
            label = _label(f"gluon_{kind}", f"{build.tile_m}x{build.tile_n}", "x".join(map(str, sizes)), **options)
            yield label, _launch(kernels_gluon, pair, along, *sizes, **options, build=build)


def cases(target: int):
    """(label, call of a launcher) for every variant of every kernel."""
    for fmt, groups, m in itertools.product((FP8_1X128, NVFP4_1X16), (1, 8, 300), (1, 4096, 4112, 4099)):
        ends = torch.zeros(groups, dtype=torch.int32)
        yield f"tables {fmt.name} {m} E{groups}", lambda ends=ends, m=m, fmt=fmt: group_tables(ends, m, fmt)
    yield from _triton_cases(target)
    if target == 90:
        yield from _gluon_cases()
    for fmt, (m, k) in itertools.product((NVFP4_1X16, NVFP4_16X16), ((512, 1024), (531, 1024), (512, 1000))):
        x = kernel_builds.operand(fmt, m, k)
        yield f"blackwell swizzle {fmt.name} {m}x{k}", lambda x=x: kernels_blackwell.swizzled_scales(x)
    x, out, ends = kernel_builds.operand(NVFP4_1X16, 512, 1024), torch.zeros(512, 1024).bfloat16(), torch.zeros(8).int()
    yield "blackwell swizzle groups", lambda: kernels_blackwell.swizzled_scales_of_groups(x, ends)
    yield "blackwell zeros", lambda: kernels_blackwell.zero_tail_(out, ends)
