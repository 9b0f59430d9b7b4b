"""ops.quantize and SwiGLU of tokens in groups: each group as if quantized by itself, and nothing else written."""

import itertools

import pytest
import torch
from gpu_steps import capture, no_syncs
from grouped_copies import (
    COPIES,
    GROUPS,
    assert_each_group_is_alone,
    backends,
    formats,
    int32,
    tokens_of,
)
from helpers import NoHostReads
from quantize_cases import BOTH, INPUTS, ROUNDING, assert_same

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    CastOptions,
    Groups,
    global_scale_of,
)
from torchao_blockwise.ops.quantization import reference
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

OWN = {"scale_per_group": True}
WAYS = {
    "fp8": (FP8_1X128, {}),
    "powers of 2": (FP8_1X128, {"power_of_2_scales": True}),
    "columnwise squares": (FP8_1X128, {"columnwise": FP8_128X128}),
    "nvfp4": (NVFP4_1X16, {}),
    "transformed": (NVFP4_1X16, {"hadamard": True}),
    "rounded": (NVFP4_1X16, {"stochastic": ROUNDING}),
    "both": (NVFP4_1X16, BOTH),
    "own scales": (NVFP4_1X16, OWN),
    "own scales, transformed": (NVFP4_1X16, OWN | {"hadamard": True}),
    "own scales, rounded": (NVFP4_1X16, OWN | {"stochastic": ROUNDING}),
    "own scales, both": (NVFP4_1X16, OWN | BOTH),
}
# All groups in the ways that share no kernel, some of them in all ways. In the interpreter each of many groups takes a
# second, if it has its scale.
SOME = ("fp8", "columnwise squares", "nvfp4", "own scales, both")
CASES = [(g, w) for g in GROUPS for w in WAYS if (w in SOME or g in ("empty", "tail")) and (g, w) != ("many", SOME[-1])]
ways = pytest.mark.parametrize("way", WAYS)


def grouped(x, ends, way: str, **options):
    fmt, of_way = WAYS[way]
    return ops.quantize(x, fmt, groups=int32(ends, x.device), **{"columnwise": True} | of_way | options)


# --- each group by itself ---------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize(("groups", "way"), CASES)
def test_each_group_is_quantized_alone(groups, way, backend, guarded, device):
    (ends, tokens), (fmt, options) = GROUPS[groups], WAYS[way]
    x = tokens_of(ends, tokens, 144 if fmt is FP8_1X128 else 20, device=device, magnitudes=7 if "own" in way else 1)
    made = grouped(x, ends, way, backend=backend)
    assert_each_group_is_alone(made, x, ends, fmt, **options)
    assert all(copy.qdata.is_contiguous() and copy.scale.is_contiguous() for copy in made)


@pytest.mark.parametrize("fmt", (FP8_1X128, NVFP4_1X16), ids=lambda f: f.name)
def test_one_group_of_all_tokens_is_the_plain_copy(fmt):
    """So that groups, which are compared with a group of theirs, are what `quantize` gives without them."""
    x = random_tensor(3 * fmt.block[1], 75)
    for options in ({}, BOTH) if fmt is NVFP4_1X16 else ({},):
        options = options | {"columnwise": True, "backend": "reference"}
        assert_same(ops.quantize(x, fmt, groups=int32([len(x)]), **options), ops.quantize(x, fmt, **options))


CHANGES = INPUTS | {"columns that are no whole blocks": lambda x: x[:, :75]}


@backends
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("way", SOME)
def test_inputs_and_copies(way, change, copies, backend, guarded, device):
    (ends, tokens), (rowwise, columnwise), (fmt, options) = GROUPS["tail"], COPIES[copies], WAYS[way]
    x = change(tokens_of(ends, tokens, 144, device=device))
    if "hadamard" in options and not columnwise:
        options = {name: value for name, value in options.items() if name != "hadamard"}
    options = options | {"rowwise": rowwise, "columnwise": columnwise and options.get("columnwise", True)}
    made = ops.quantize(x, fmt, groups=int32(ends, device), backend=backend, **options)
    assert_each_group_is_alone(made, x, ends, fmt, **options)
    if x.dtype is torch.bfloat16:
        tables = ops.make_groups(int32(ends, device), tokens, fmt)
        assert_same(ops.quantize(x, fmt, groups=tables, backend=backend, **options), made)


@backends
@pytest.mark.parametrize("value", (float("nan"), float("-inf"), 0.0, 1e-40, 3e38))
@pytest.mark.parametrize(("where", "way"), ((3, "own scales, both"), (44, "own scales, both"), (3, "fp8")))
def test_special_values_stay_in_their_group(where, way, value, backend, device):
    ends = [5, 5, 41, 45]
    x = tokens_of(ends, 48, 20, torch.float32, device, magnitudes=7)
    x[where, 7] = value
    made = grouped(x, ends, way, backend=backend)
    assert_each_group_is_alone(made, x, ends, WAYS[way][0], **WAYS[way][1])


@backends
def test_a_given_amax(backend, device):
    """One of all groups or of each; without it what lies behind the last group does not count."""
    ends = [5, 5, 41, 45]
    x = tokens_of(ends, 48, 40, device=device, magnitudes=7)
    amax = torch.tensor([900.0, 3.0, 800.0, 1e6], device=device)
    made = grouped(x, ends, "own scales", tensor_amax=amax, backend=backend).rowwise
    assert_bitwise_equal(made.global_scale, global_scale_of(amax))
    one = grouped(x, ends, "nvfp4", tensor_amax=amax[2], backend=backend).rowwise
    assert_bitwise_equal(one.global_scale, global_scale_of(amax[2]))
    for copy, group, rows in ((made, 0, slice(0, 5)), (made, 2, slice(5, 41)), (one, 2, slice(0, 45))):
        wanted = ops.quantize(x[rows], NVFP4_1X16, tensor_amax=amax[group], backend="reference").rowwise
        assert_bitwise_equal(copy.qdata[rows], wanted.qdata)
        assert_bitwise_equal(copy.scale[rows], wanted.scale)


# --- SwiGLU in groups -------------------------------------------------------------------------------------------------

# Kernels of SwiGLU take long to interpret: groups one way, ways one grouping. The last two run as two operations.
SWIGLU = [(name, 48, "both", FP8_1X128) for name in ("ragged", "empty", "tail of a token", "all tail", "no tokens")]
SWIGLU += [("tail", width, copies, FP8_1X128) for width in (48, 128) for copies in COPIES]
SWIGLU += [("tail", 48, "both", NVFP4_1X16), ("tail", 75, "both", FP8_1X128), ("tail", 48, "squares", FP8_1X128)]


@backends
@pytest.mark.parametrize("name, width, copies, fmt", SWIGLU, ids=str)
def test_swiglu_is_quantized_in_groups(name, width, copies, fmt, backend, guarded, device):
    ends, tokens = GROUPS[name]
    options = CastOptions(fmt, *COPIES[copies if copies in COPIES else "both"])
    if copies == "squares":
        options = options._replace(columnwise_format_name=FP8_128X128.name)
    gate, up = (tokens_of(ends, tokens, 2 * width, device=device) / 64).chunk(2, 1)
    dh, of = tokens_of(ends, tokens, width, device=device), {"groups": int32(ends, device), "backend": backend}
    got = ops.swiglu_quantize(gate, up, options, **of)
    assert_each_group_is_alone(got, ops.swiglu(gate, up, backend="reference"), ends, fmt)
    assert copies != "squares" or got.columnwise.format is FP8_128X128
    merged = torch.cat(ops.swiglu_backward(dh, gate, up, backend="reference"), 1)
    assert_each_group_is_alone(ops.swiglu_backward_quantize(dh, gate, up, options, **of), merged, ends, fmt)


# --- as they are called -----------------------------------------------------------------------------------------------

MALFORMED = {
    "decreasing": [50, 20, 90, 60],
    "beyond": [30, 1000, 2**31 - 1],
    "negative": [-5, -(2**31), 40],
    "all": [60, -1, 2**31 - 1, 3],
}


@pytest.mark.parametrize("way", (*SOME, "transformed"))
@pytest.mark.parametrize("ends", MALFORMED.values(), ids=MALFORMED)
def test_malformed_ends_are_clamped(ends, way, guarded, device, machine):
    """As a GPU's are, which the host does not read: nothing out of bounds, bitwise identical to clamped ends."""
    machine.reads_no_group_ends()
    x = random_tensor(100, 48, dtype=torch.bfloat16, device=device)
    clamped = [min(max(end, 0), 100) for end in itertools.accumulate(ends, max)]
    expected = grouped(x, clamped, way, backend="reference")
    for backend in ("reference", "triton"):
        assert_same(grouped(x, ends, way, backend=backend), expected)
    if way == "fp8":
        options, of = CastOptions(FP8_1X128, columnwise=True), {"groups": int32(ends, device), "backend": "triton"}
        h = ops.swiglu(x, x, backend="reference")
        assert_same(ops.swiglu_quantize(x, x, options, **of), grouped(h, clamped, way, backend="reference"))


@formats
def test_nothing_is_read_back(fmt, device):
    """Neither by the reference nor around the kernels; the check of a CPU's ends is what would."""
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    x, ends = random_tensor(20, 48, device=device), int32([3, 17], device)
    options = CastOptions(fmt, columnwise=True)
    with NoHostReads():
        bits = reference.tensor_amax_bits(x, ends, False) if fmt.has_global_scale else None
        reference.quantize(x, bits, options, Groups(ends))
        kernels.quantize(x, bits, options, Groups(ends))


def test_launches_do_not_depend_on_how_many_groups_there_are(device, machine):
    names = ("kernels_amax", "kernels_nvfp4", "kernels_chunks")
    modules = [pytest.importorskip(f"torchao_blockwise.ops.quantization.{name}") for name in names]
    counts = []
    for count in (2, 9):
        launches = [machine.launches_of(module) for module in modules]
        ends = [(40 * (i + 1)) // count for i in range(count)]
        grouped(tokens_of(ends, 48, 32, device=device), ends, "own scales", backend="triton")
        counts.append([len(made) for made in launches])
    assert counts[0] == counts[1]


@pytest.mark.gpu
@formats
def test_a_graph_follows_the_routing(fmt):
    """Captured once; ends that change are those of the next replay."""
    x, ends = random_tensor(1000, 256, dtype=torch.bfloat16, device="cuda"), int32([1000, 1000, 1000], "cuda")

    def step():
        return ops.quantize(x, fmt, groups=ends, columnwise=True, backend="triton")

    graph, captured = capture(step)
    for sizes in ([10, 500, 700], [0, 0, 0], [333, 333, 1000]):
        ends.copy_(int32(sizes))
        graph.replay()
        assert_same(captured, ops.quantize(x, fmt, groups=ends, columnwise=True, backend="reference"))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("ends", ([1, 130, 4000], [4097] * 128, list(range(0, 4096, 32))), ids=("few", "one", "many"))
def test_large(ends, fmt):
    x, options = tokens_of(ends, 4100, 2048, device="cuda"), {"groups": int32(ends, "cuda"), "columnwise": True}
    with no_syncs():
        got = ops.quantize(x, fmt, **options, backend="triton")
    assert_same(got, ops.quantize(x, fmt, **options, backend="reference"))


# --- matrices ---------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("shape", ((3, 9, 1030), (2, 3, 16, 33), (1, 20, 32), (2, 0, 16), (20, 33)), ids=str)
@pytest.mark.parametrize("fmt", ("nvfp4_1x16", "nvfp4_16x16"))
def test_each_matrix_is_quantized_alone(fmt, shape, backend, device):
    """By `scale_per_group` without groups; a single matrix has one scale."""
    magnitudes = 4.0 ** torch.arange(torch.Size(shape[:-2]).numel(), device=device).view(shape[:-2])[..., None, None]
    x = (random_tensor(*shape, device=device) * magnitudes).bfloat16()
    x[..., -1] *= 4096
    if shape[0] in (2, 3) and shape[-2]:
        x[1].view(-1)[5] = float("inf")
    made = ops.quantize(x, fmt, columnwise=True, scale_per_group=True, backend=backend)
    assert all(copy.global_scale.shape == shape[:-2] for copy in made)
    for index in itertools.product(*map(range, shape[:-2])):
        wanted = ops.quantize(x[index], fmt, columnwise=True, backend="reference")
        for copy, right in zip(made, wanted, strict=True):
            assert_operands_equal(copy._replace(**{n: getattr(copy, n)[index] for n in copy._fields[:3]}), right)
    values = ops.dequantize(made.rowwise, columns=shape[-1])
    if shape[0] in (2, 3) and shape[-2]:
        assert values[1].isnan().any() and values[0].isfinite().all()
