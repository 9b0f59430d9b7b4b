"""ops.permute and ops.unpermute: sorted by hand, bits of each backend, every routing, gradients, no sync."""

import pytest
import torch
from gpu_steps import capture, no_syncs
from helpers import assert_same

from torchao_blockwise import ops
from torchao_blockwise.ops.groups.permutation import MAX_EXPERTS, reference
from torchao_blockwise.ops.groups.permutation import kernels_triton as kernels
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
backends = pytest.mark.parametrize("backend", ("reference", "triton"))
EXPERTS = 5


def chosen(tokens: int, top_k: int, experts: int = EXPERTS, seed: int = 0) -> torch.Tensor:
    """Different experts for each token, as a router gives them."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k, 1).indices


ROUTINGS = {
    "random": chosen(37, 2),
    "top1": chosen(19, 1),
    "top5": chosen(8, 5),
    "one_expert": torch.full((12, 1), 3),
    "ends_empty": torch.full((9, 2), 1),
    "no_expert": torch.tensor([[0, 7], [-1, 4], [EXPERTS, EXPERTS], [2, -(2**40)]]),
    "the_same_twice": torch.tensor([[2, 2], [0, 0], [4, 2]]),
    "one_token": torch.tensor([[4, 0, 2]]),
    "no_token": torch.zeros(0, 3, dtype=torch.int64),
    "int32": chosen(37, 3).int(),
    "experts_in_their_last_32_bits": torch.tensor([[1, 2**32 + 1], [2**40, 2**63 - 1], [-(2**63), 3], [2**31 + 2, 0]]),
}
routings = pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)


def sorted_by_hand(ids: torch.Tensor, experts: int = EXPERTS) -> tuple[list[int], list[int]]:
    """(source, group_ends) by Python's stable sort."""
    keys = [i if 0 <= i < experts else experts for i in ids.flatten().tolist()]
    source = sorted(range(len(keys)), key=keys.__getitem__)
    return source, [sum(key <= g for key in keys) for g in range(experts)]


def routed(ids: torch.Tensor, width: int = 40, dtype=torch.bfloat16, device="cpu"):
    """(x, y, source, weights) of random values."""
    tokens, top_k = ids.shape
    x = random_tensor(tokens, width, dtype=dtype) if tokens and width else torch.empty(tokens, width, dtype=dtype)
    _, source, _ = ops.permute(x.to(device), ids.to(device), EXPERTS)
    y = torch.randn(tokens * top_k, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(2)).to(device)
    return x.to(device), y, source, weights


@pytest.mark.parametrize("experts", (1, 300, MAX_EXPERTS, MAX_EXPERTS + 1, 2**15 - 1, 2**15, 40_000), ids=str)
def test_any_number_of_experts(experts, device):
    """They are counted in Triton up to MAX_EXPERTS; the reference sorts ids in 16 bits as far as they fit."""
    x, ids = torch.zeros(21, 8, device=device), random_experts(63, experts).view(21, 3)
    ids[0], ids[1, 0], ids[2, 1] = experts - 1, experts, -1
    for backend in ("reference", "triton")[: 2 if experts <= MAX_EXPERTS else 1]:
        _, source, group_ends = ops.permute(x, ids.to(device), experts, backend=backend)
        assert (source.tolist(), group_ends.tolist()) == sorted_by_hand(ids, experts)
    if experts > MAX_EXPERTS:
        with pytest.raises(ValueError, match=f"at most {MAX_EXPERTS} experts, got 63 to {experts}"):
            ops.permute(x, ids.to(device), experts, backend="triton")


def same_expert(rows: int, experts: int) -> torch.Tensor:
    return torch.full((rows,), experts - 1)


def random_experts(rows: int, experts: int) -> torch.Tensor:
    """Some of no expert, below and above."""
    return torch.randint(-2, experts + 2, (rows,), generator=torch.Generator().manual_seed(rows))


def no_expert(rows: int, experts: int) -> torch.Tensor:
    return torch.where(torch.arange(rows) % 2 == 0, -1, experts)


def one_in_a_while(rows: int, experts: int) -> torch.Tensor:
    """Most of no expert, experts descending."""
    index = torch.arange(rows)
    return torch.where(index % 97 == 5, experts - 1 - index // 97 % experts, experts + index)


COUNTED = (
    # Counted by each program: one assignment, about a piece, the last that are few.
    (random_experts, 1, 8), (random_experts, 127, 8), (random_experts, 128, 1), (random_experts, 129, 300),
    (random_experts, 513, 8), (random_experts, 1024, 256), (no_expert, 300, 8), (same_expert, 1000, 256),
    # Counted before: chunks of 9, of which 14 are empty; chunks of a piece, and of one more.
    (random_experts, 1025, 64), (no_expert, 1025, 1), (random_experts, 2000, MAX_EXPERTS),
    (random_experts, 128 * 128, 64), (one_in_a_while, 128 * 128 + 1, 300),
)  # fmt: skip


def assert_routed(ids: torch.Tensor, experts: int) -> None:
    """As torch sorts, and row_of is the inverse."""
    source, group_ends, row_of = kernels._route(ids, experts)
    for got, expected in zip((source, group_ends), reference.route(ids, experts), strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, expected)
    assert row_of.dtype == torch.int32 and torch.equal(row_of[source.long()].cpu(), torch.arange(len(row_of)).int())


@pytest.mark.parametrize("make, rows, experts", COUNTED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_counting_sorts_as_torch_does(make, rows, experts, device):
    assert_routed(make(rows, experts).to(device)[:, None], experts)


@pytest.mark.parametrize("make", (random_experts, same_expert, no_expert, one_in_a_while))
@pytest.mark.parametrize("rows, dtype", ((8 * 256, torch.int32), (8 * 513 - 1, torch.int64), (8 * 600, torch.int64)))
def test_chunks_of_several_counts_and_pieces(make, rows, dtype, monkeypatch, device):
    """A few chunks, as long as those of a million assignments."""
    monkeypatch.setattr(kernels, "_CHUNKS", 8)
    assert_routed(make(rows, 300).to(device, dtype).view(-1, 1), 300)


def sum_by_hand(y, source, top_k, weights):
    """Token by token, one fp32 rounding an operation."""
    rows = dict(zip(source.tolist(), y.float().unbind()))
    out = []
    for t in range(len(rows) // top_k):
        terms = [rows[t * top_k + k] * (1 if weights is None else weights[t, k].float()) for k in range(top_k)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        out.append(total)
    return (torch.stack(out) if out else y.new_empty(0, y.shape[1])).to(y.dtype)


def check(ids, width, dtype, backend, device, weighted=torch.float32) -> None:
    """All three operations by hand; dot products within the roundings of their sums."""
    top_k = ids.shape[1]
    x, y, source, weights = routed(ids, width, dtype, device)
    tokens, got_source, group_ends = ops.permute(x, ids.to(device), EXPERTS, backend=backend)
    assert got_source.dtype == group_ends.dtype == torch.int32
    assert (got_source.tolist(), group_ends.tolist()) == sorted_by_hand(ids)
    index = source.long()
    rows = x[index // top_k]
    assert_bitwise_equal(tokens, rows)
    weights = weights.to(weighted) if weighted else None
    out = ops.unpermute(y, source, top_k, weights, backend=backend)
    assert_bitwise_equal(out, sum_by_hand(y, source, top_k, weights))
    grad_y, grad_weights = ops.unpermute_backward(x, y, source, top_k, weights, backend=backend)
    scaled = rows.float() * weights.float().flatten()[index, None] if weighted else rows
    assert_bitwise_equal(grad_y, scaled.to(dtype))
    dots, magnitude = torch.zeros(2, len(index), dtype=torch.float64, device=device)
    dots[index] = (rows.double() * y.double()).sum(1)
    magnitude[index] = (rows.double() * y.double()).abs().sum(1)
    assert grad_weights.dtype == torch.float32 and grad_weights.shape == ids.shape
    assert ((grad_weights.flatten() - dots).abs() <= 1e-6 * magnitude).all()


@backends
@dtypes
@routings
@pytest.mark.parametrize("weighted", (None, torch.float32, torch.bfloat16), ids=str)
def test_every_routing(ids, dtype, backend, weighted, device):
    check(ids, 40, dtype, backend, device, weighted)


@backends
@pytest.mark.parametrize("width", (0, 1, 3, 8, 500, 1024, 1030, 2056), ids=str)
def test_any_width(width, backend, device):
    """Ragged strips, one element, several strips."""
    check(ROUTINGS["random"], width, torch.bfloat16, backend, device)


@backends
def test_signs_and_values_that_are_not_finite_are_kept(backend, device):
    ids = torch.tensor([[1], [0]], device=device)
    x = torch.tensor([[-0.0, float("nan"), float("inf")], [1e-40, -0.0, -float("inf")]], device=device)
    tokens, source, _ = ops.permute(x, ids, 2, backend=backend)
    assert_bitwise_equal(tokens, x[[1, 0]])
    assert_bitwise_equal(ops.unpermute(tokens, source, 1, backend=backend), x)
    scaled = ops.unpermute(tokens, source, 1, torch.full((2, 1), 0.5, device=device), backend=backend)
    assert_bitwise_equal(scaled, x * 0.5)


@backends
def test_any_strides(backend, device):
    ids = ROUTINGS["random"].to(device)
    x, y, source, weights = routed(ROUTINGS["random"], device=device)
    wide = torch.cat((x, x + 1), 1)
    twisted = ids.t().contiguous().t()
    for got in (wide[:, :40], x.t().contiguous().t()):
        tokens, *_ = ops.permute(got, twisted, EXPERTS, backend=backend)
        assert_bitwise_equal(tokens, x[source.long() // 2])
    constant = torch.ones(1, device=device, dtype=x.dtype).expand(37, 40)
    gradients = ops.unpermute_backward(constant, y, source, 2, weights.t().contiguous().t(), backend=backend)
    expected = ops.unpermute_backward(constant.contiguous(), y, source, 2, weights, backend=backend)
    assert_same(gradients, expected)


@pytest.mark.parametrize("source", ([0, 9, -1, 3, 2**31 - 1, 5, -(2**31), 7], [0] * 8, [8] * 8), ids=("wild", "0", "8"))
def test_kernels_reach_no_memory_outside_whatever_the_source(source, device):
    """Canaries around every tensor that is written; rows that are read lie inside, or are not."""
    guarded = {name: torch.full((3 * n,), 7.0, device=device) for name, n in (("y", 64), ("out", 32), ("dots", 8))}
    source = torch.tensor(source, dtype=torch.int32, device=device)
    row_of = kernels._inverse(source)
    y, out, dots = guarded["y"][64:128].view(8, 8), guarded["out"][32:64].view(4, 8), guarded["dots"][8:16]
    options = kernels._options(2)
    kernels.launch(kernels._gather_kernel, 4, y, None, row_of, out, 8, 8, **options)
    kernels.launch(kernels._scatter_kernel, 8, out, y.clone(), None, row_of, y, dots, 8, 8, **options)
    for name, whole in guarded.items():
        third = whole.numel() // 3
        assert (whole[:third] == 7).all() and (whole[2 * third :] == 7).all(), name


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_host_does_not_look():
    ids, x = chosen(512, 4, 16).cuda(), torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(512, 4, device="cuda")

    def step():
        tokens, source, group_ends = ops.permute(x, ids, 16)
        out = ops.unpermute(tokens, source, 4, weights)
        return out, *ops.unpermute_backward(out, tokens, source, 4, weights), group_ends

    step()
    with no_syncs():
        step()
    graph, captured = capture(step)
    ids.copy_(chosen(512, 4, 16, seed=1))
    graph.replay()
    assert_same(captured, step())


@pytest.mark.gpu
@pytest.mark.parametrize("experts", (1, 8, 64, 128, 256, 300, MAX_EXPERTS), ids=str)
@pytest.mark.parametrize("tokens", (1, 64, 4096, 8192, 2**17 + 3), ids=str)
def test_many_assignments_are_sorted_as_torch_does(tokens, experts):
    generator = torch.Generator("cuda").manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, 8), device="cuda", generator=generator)
    x = torch.zeros(tokens, 1, device="cuda")
    _, *expected = ops.permute(x, ids, experts, backend="reference")
    # Programs run in another order each time.
    for _ in range(3):
        _, *results = ops.permute(x, ids, experts, backend="triton")
        assert_same(results, expected)


@pytest.mark.gpu
def test_large_offsets():
    """More than 2^31 elements."""
    width, tokens = 2**16, 2**15 + 8
    x = torch.zeros(tokens, width, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = torch.arange(tokens, device="cuda") % 256
    ids = torch.zeros(tokens, 1, device="cuda", dtype=torch.int64)
    ids[0] = 1
    rows, source, _ = ops.permute(x, ids, 2)
    # There, because copies to the host would take longer than all else; no value has several bit patterns.
    assert torch.equal(rows[:, 0], x[:, 0].roll(-1))
    assert torch.equal(ops.unpermute(rows, source, 1), x)
