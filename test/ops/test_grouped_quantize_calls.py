"""ops.grouped_quantize as it is called: malformed ends, refusals, graphs, large tensors; and no value is read back."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_steps import no_syncs
from grouped_copies import assert_copies_equal, formats, int32, tokens_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import ops
from torchao_blockwise.formats import (
    FP8_1X128,
    FP8_128X128,
    NVFP4_1X16,
    CastOptions,
    Groups,
)
from torchao_blockwise.ops.groups.ends import padded_ends, padded_tokens
from torchao_blockwise.ops.groups.quantization import reference
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

MALFORMED = {
    "decreasing": [50, 20, 90, 60],
    "beyond": [30, 1000, 2**31 - 1],
    "negative": [-5, -(2**31), 40],
    "all": [60, -1, 2**31 - 1, 3],
}


def bits_of(amax: torch.Tensor | None) -> torch.Tensor | None:
    return None if amax is None else amax.view(torch.int32)


@formats
@pytest.mark.parametrize("ends", MALFORMED.values(), ids=MALFORMED)
def test_kernels_clamp_malformed_ends(ends, fmt, guarded, device):
    """As a GPU's are, which the host does not read: nothing out of bounds, and the bits of the clamped ends."""
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    swiglu = pytest.importorskip("torchao_blockwise.ops.fused.kernels_triton")
    x, amax = random_tensor(100, 48, dtype=torch.bfloat16, device=device), torch.tensor(9.0, device=device)
    clamped = [min(max(end, 0), 100) for end in itertools.accumulate(ends, max)]
    options, amax = CastOptions(fmt, columnwise=True), amax if fmt.has_global_scale else None
    ends, clamped = int32(ends, device), int32(clamped, device)
    expected = reference.quantize(x, clamped, options, amax)
    assert_copies_equal(reference.quantize(x, ends, options, amax), expected)
    assert_copies_equal(kernels.quantize(x, bits_of(amax), options, Groups(ends)), expected)
    if fmt is FP8_1X128:
        got = swiglu.swiglu_quantize(x, x, options, Groups(ends))
        h = ops.swiglu(x, x, backend="reference")
        assert_copies_equal(got, reference.quantize(h, clamped, options, None))


class Synchronizations(TorchDispatchMode):
    """Operations that read a device's values, or whose shapes follow from them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "unique", "_unique2"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@formats
def test_nothing_is_read_back(fmt, device):
    """Neither by the reference nor around the kernels; the check of a CPU's ends is what would."""
    kernels = pytest.importorskip("torchao_blockwise.ops.quantization.kernels_triton")
    x, ends = random_tensor(20, 48, device=device), int32([3, 17], device)
    options = CastOptions(fmt, columnwise=True)
    with Synchronizations() as mode:
        amax = reference.tensor_amax(x, ends) if fmt.has_global_scale else None
        reference.quantize(x, ends, options, amax)
        kernels.quantize(x, bits_of(amax), options, Groups(ends))
    assert mode.seen == []


X, ENDS = torch.ones(4, 32), int32([1, 4])
REFUSALS = {
    "ends": (
        lambda: ops.grouped_quantize(X, int32([3, 2]), FP8_1X128),
        ValueError,
        "grouped_quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got"
        " group_ends[1] = 2 after 3; pass the cumulative sum of the groups' sizes",
    ),
    "ends of nvfp4": (
        lambda: ops.grouped_quantize(X, int32([3, 5]), NVFP4_1X16),
        ValueError,
        "grouped_quantize: group_ends must not decrease and must lie in [0, 4], the number of tokens, got"
        " group_ends[1] = 5 after 3; pass the cumulative sum of the groups' sizes",
    ),
    "ends of swiglu": (
        lambda: ops.swiglu_quantize(X, X, CastOptions(FP8_1X128), groups=torch.tensor([4])),
        TypeError,
        "swiglu_quantize: group_ends must be int32, got torch.int64; use group_ends.int()",
    ),
    "ends of its gradients": (
        lambda: ops.swiglu_backward_quantize(X, X, X, CastOptions(FP8_1X128), groups=ENDS.to("meta")),
        ValueError,
        "swiglu_backward_quantize: group_ends must be on the tokens' device cpu, got meta; move it",
    ),
    "square blocks": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_128X128),
        ValueError,
        "grouped_quantize: tokens in groups need blocks of one row, got fp8_128x128; take fp8_1x128 or nvfp4_1x16,"
        " the formats of activations",
    ),
    "square blocks of swiglu": (
        lambda: ops.swiglu_quantize(X, X, CastOptions(FP8_128X128), groups=ENDS),
        ValueError,
        "grouped_quantize: tokens in groups need blocks of one row, got fp8_128x128; take fp8_1x128 or nvfp4_1x16,"
        " the formats of activations",
    ),
    "3-D": (
        lambda: ops.grouped_quantize(X[None], ENDS, FP8_1X128),
        ValueError,
        "grouped_quantize: x must be [M, K], got shape [1, 4, 32]; flatten its leading dims",
    ),
    "f64": (
        lambda: ops.grouped_quantize(X.double(), ENDS, FP8_1X128),
        TypeError,
        "grouped_quantize: x must be bfloat16, float16 or float32, got torch.float64; cast it first",
    ),
    "amax": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, tensor_amax=torch.ones(())),
        ValueError,
        "grouped_quantize: fp8_1x128 has no tensor scale; leave tensor_amax out",
    ),
    "amaxes": (
        lambda: ops.grouped_quantize(X, ENDS, NVFP4_1X16, tensor_amax=torch.ones(1)),
        ValueError,
        "grouped_quantize: tensor_amax must be a float32 scalar, got torch.float32 of shape [1]",
    ),
    "nothing": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, rowwise=False),
        ValueError,
        "grouped_quantize: nothing to compute; ask for rowwise, columnwise or both",
    ),
    "backend": (
        lambda: ops.grouped_quantize(X, ENDS, FP8_1X128, backend="cublas"),
        ValueError,
        "quantize: backend cublas has no implementation; choose one of gluon, triton, reference, or auto",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@formats
def test_compiles_once_for_all_token_counts(fmt):
    def step(x, gate, group_ends):
        copies = ops.grouped_quantize(x, group_ends, fmt, columnwise=True, backend="reference")
        options = CastOptions(fmt, columnwise=True)
        fused = ops.swiglu_quantize(gate, gate, options, groups=group_ends, backend="reference")
        tokens, block = x.shape[0], fmt.block[1]
        sizes = x.new_zeros(padded_tokens(tokens, group_ends.shape[0], block))
        return copies, fused, padded_ends(group_ends, tokens, block), sizes

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (300, 129, 200, 517):
        x, gate = random_tensor(tokens, 160), random_tensor(tokens, 64)
        for t in (x, gate):
            torch._dynamo.mark_dynamic(t, 0)
        ends = int32([7, 7, tokens - 20, tokens - 3])
        *got, got_ends, got_sizes = compiled(x, gate, ends)
        *expected, expected_ends, expected_sizes = step(x, gate, ends)
        for copies, wanted in zip(got, expected, strict=True):
            assert_copies_equal(copies, wanted)
        assert_bitwise_equal(got_ends, expected_ends)
        assert_bitwise_equal(got_sizes, expected_sizes)
    assert counter.frame_count == 1


@pytest.mark.gpu
@formats
def test_a_graph_follows_the_routing(fmt):
    """Captured once; ends that change are those of the next replay."""
    x, ends = random_tensor(1000, 256, dtype=torch.bfloat16, device="cuda"), int32([1000, 1000, 1000], "cuda")

    def step():
        return ops.grouped_quantize(x, ends, fmt, columnwise=True, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in ([10, 500, 700], [0, 0, 0], [333, 333, 1000]):
        ends.copy_(int32(sizes))
        graph.replay()
        assert_copies_equal(captured, ops.grouped_quantize(x, ends, fmt, columnwise=True, backend="reference"))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("ends", ([1, 130, 4000], [4097] * 128, list(range(0, 4096, 32))), ids=("few", "one", "many"))
def test_large(ends, fmt):
    x = tokens_of(ends, 4100, 2048, fmt, device="cuda")
    group_ends, options = int32(ends, "cuda"), {"columnwise": True}
    with no_syncs():
        got = ops.grouped_quantize(x, group_ends, fmt, **options, backend="triton")
    assert_copies_equal(got, ops.grouped_quantize(x, group_ends, fmt, **options, backend="reference"))
