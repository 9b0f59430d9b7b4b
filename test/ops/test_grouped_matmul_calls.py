"""ops.grouped_matmul as it is called: malformed ends, choice of a backend, meta tensors, graphs, large weights."""

from __future__ import annotations

import pytest
import torch
from grouped_products import PAIRS, Case, along_and_pairs, assert_close_to_each_group, backends, quantize
from product_budgets import accumulation_unit, assert_within_budget, pair_id
from torch._dynamo.testing import CompileCounterWithBackend

from torchao_blockwise import ops
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.gemm.grouped import grouped_matmul_op
from torchao_blockwise.ops.groups.ends import as_groups, clamped_ends
from torchao_blockwise.testing import assert_bitwise_equal


def before_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory that goes on with bytes of 0xff: NaN in every dtype."""
    memory = torch.full((x.numel() + 2**16,), 0xFF, dtype=torch.uint8, device=x.device)
    memory = torch.cat((x.contiguous().view(torch.uint8).flatten(), memory))
    return memory[: x.nbytes].view(x.dtype).view(x.shape)


@along_and_pairs
@pytest.mark.parametrize(
    "ends",
    ([10, 4, 30], [10, 500, 20], [-5, -1, 12], [2**31 - 1, -(2**31), 7], [-(2**31)] * 3),
    ids=("decreasing", "beyond", "negative", "extreme", "all_negative"),
)
def test_kernels_clamp_what_nobody_checks(along, pair, ends, device, machine):
    """As on a GPU, where the host looks at no value: the result is that of the ends clamped."""
    # Padded, the tokens fill rows of 16 bytes in both formats: behind a row lies the next one.
    case = Case(along, pair, ([10, 10, 10], 21), device)
    case.a, case.b = (x._replace(qdata=before_nan(x.qdata), scale=before_nan(x.scale)) for x in (case.a, case.b))
    machine.reads_no_group_ends()
    case.ends = torch.tensor(ends, dtype=torch.int32, device=device)
    out = case.run(backend="triton")
    limit = case.tokens if along == "m" else case.a.qdata.shape[1] * case.a.format.element.per_byte
    case.sizes = clamped_ends(case.ends, limit).diff(prepend=case.ends.new_zeros(1)).tolist()
    assert_close_to_each_group(case, out, "triton")


@along_and_pairs
def test_auto_takes_the_first_that_can(along, pair, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    args = case.a, case.b, as_groups(case.ends), along, torch.float32
    first = next(row.backend for row in grouped_matmul_op.ranked(*args) if row.reason(args) is None)
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert first is Backend.TRITON or (hopper and first is Backend.GLUON)
    assert_bitwise_equal(case.run(), case.run(backend=first))


@backends
@along_and_pairs
def test_autocast_changes_nothing(along, pair, backend, device):
    case = Case(along, pair, ([30, 0, 9], 2), device)
    outside = case.run(backend=backend)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_bitwise_equal(case.run(backend=backend), outside)


@pytest.mark.parametrize("pair", (PAIRS["m"][0], PAIRS["m"][2]), ids=pair_id)
def test_compiled_products_follow_tokens_and_routing(pair):
    """One graph for all counts of tokens and all sizes of groups, forward and backward."""
    fmt, w = pair[0], quantize(torch.randn(3, 48, 160), pair[1], "cpu")

    def products(x, dy, ends, out):
        a = ops.quantize(x, fmt, backend="reference").rowwise
        options = {"rowwise": False, "columnwise": True, "backend": "reference"}
        dy_columnwise, x_columnwise = (ops.quantize(t, fmt, groups=ends, **options).columnwise for t in (dy, x))
        ops.add_grouped_matmul_(out, dy_columnwise, x_columnwise, ends, backend="reference")
        return (
            ops.grouped_matmul(a, w, ends, out_dtype=torch.bfloat16, backend="reference"),
            ops.grouped_matmul(
                dy_columnwise, x_columnwise, ends, along="k", out_dtype=torch.float32, backend="reference"
            ),
        )

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(products, fullgraph=True, backend=counter)
    for tokens, ends in ((300, (0, 130, 300)), (129, (129, 129, 129)), (517, (5, 6, 400)), (256, (0, 0, 0))):
        x, dy = torch.randn(tokens, 160), torch.randn(tokens, 48)
        for t in (x, dy):
            torch._dynamo.mark_dynamic(t, 0)
        ends = torch.tensor(ends, dtype=torch.int32)
        outs = torch.zeros(3, 48, 160), torch.zeros(3, 48, 160)
        for got, expected in zip(compiled(x, dy, ends, outs[0]), products(x, dy, ends, outs[1])):
            assert_bitwise_equal(got, expected)
        assert_bitwise_equal(*outs)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS["m"], ids=pair_id)
def test_weights_of_more_than_2_to_the_31_elements(pair):
    """The last experts lie behind what 32 bits can address."""
    experts, n, k = 34, 8192, 8192
    w = torch.zeros(1, n, k, device="cuda", dtype=torch.bfloat16).normal_()
    weight = ops.quantize(w, pair[1]).rowwise
    b = weight._replace(
        qdata=weight.qdata.expand(experts, -1, -1).contiguous(), scale=weight.scale.expand(experts, -1, -1).contiguous()
    )
    a = ops.quantize(torch.randn(300, k, device="cuda"), pair[0]).rowwise
    ends = torch.zeros(experts, dtype=torch.int32, device="cuda")
    ends[-2:] = torch.tensor([100, 300])
    out = ops.grouped_matmul(a, b, ends, out_dtype=torch.float32, backend="triton")
    plain = weight._replace(qdata=weight.qdata[0], scale=weight.scale[0])
    assert_within_budget(out, a, plain, k, accumulation_unit("triton", a.format, "cuda"))


@pytest.mark.gpu
@along_and_pairs
def test_a_cuda_graph_follows_the_routing(along, pair):
    """One capture, replayed with other ends: nothing of them is on the host."""
    case = Case(along, pair, ([300, 0, 60, 140], 12), "cuda")
    case.run(backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(backend="triton")
    for sizes in ((0, 128, 256, 0), (512, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1)):
        case.ends.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        assert_bitwise_equal(out, case.run(backend="triton"))
