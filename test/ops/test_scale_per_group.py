"""Products of operands with a tensor scale of each group or matrix, and the cast of shards to such; see also
test_quantize_groups.py.
"""

from __future__ import annotations

import pytest
import torch
from grouped_products import ROUTINGS, Case, assert_close_to_each_group
from product_budgets import pair_id

from torchao_blockwise import ops
from torchao_blockwise.formats import NVFP4_1X16, NVFP4_16X16, Operand
from torchao_blockwise.ops import shards
from torchao_blockwise.ops.shards.flat import WHOLE, Shards
from torchao_blockwise.testing import assert_bitwise_equal, assert_operands_equal, random_tensor

backends = pytest.mark.parametrize("backend", ("reference", "triton"))


@backends
def test_a_cast_of_shards_gives_each_matrix_its_scale(backend, device):
    """Beside a tensor with one scale, cut anywhere: the bits of the whole."""
    shapes = ((3, 40, 50), (33, 48), (5, 17, 300))
    tensors = [random_tensor(*shape, device=device, seed=i) for i, shape in enumerate(shapes)]
    for x in tensors:
        x *= 4.0 ** torch.arange(x.shape[0], device=device).view(-1, *[1] * (x.dim() - 1)) if x.dim() > 2 else 1
    expected = [ops.quantize(x, NVFP4_16X16, scale_per_group=True, backend="reference").rowwise for x in tensors]
    pieces = [((0, x.numel() // 3), (x.numel() // 3, x.numel())) for x in tensors]
    bits = torch.zeros(sum(q.scale.numel() for q in expected), dtype=torch.int32, device=device)
    for part in range(2):
        values = [x.flatten()[slice(*at[part])] for x, at in zip(tensors, pieces)]
        starts = [at[part][0] for at in pieces]
        shards.partial_block_amax_op(bits, Shards.of(values, starts, shapes, x.dtype, NVFP4_16X16), backend)
    scales = [torch.zeros_like(q.scale) for q in expected]
    of_matrices = [torch.zeros_like(q.global_scale) for q in expected]
    whole = Shards.of([x.flatten() for x in tensors], [0] * 3, shapes, x.dtype, NVFP4_16X16)
    encode = torch.empty_like(bits, dtype=torch.float32)
    shards.block_scales_op(encode, scales, of_matrices, bits, whole.first_blocks, NVFP4_16X16, False, backend)
    targets = [torch.zeros_like(q.qdata) for q in expected]
    shards.partial_cast_op(targets, whole, encode, WHOLE, backend)
    for qdata, scale, of_matrix, q in zip(targets, scales, of_matrices, expected, strict=True):
        assert of_matrix.shape == q.global_scale.shape
        assert_operands_equal(Operand(qdata, scale, of_matrix, q.format_name), q)


PAIRS = [("m", (NVFP4_1X16, NVFP4_16X16)), ("m", (NVFP4_1X16, NVFP4_1X16)), ("k", (NVFP4_1X16, NVFP4_1X16))]
pairs = pytest.mark.parametrize(("along", "pair"), PAIRS, ids=[f"{along}-{pair_id(pair)}" for along, pair in PAIRS])
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
WHICH = {"a": (True, False), "b": (False, True), "both": (True, True)}
which = pytest.mark.parametrize("which", WHICH.values(), ids=WHICH)


class Scaled(Case):
    """A case whose operands have tensor scales of groups, other ones each."""

    def __init__(self, along, pair, routing, device, which):
        super().__init__(along, pair, routing, device)
        scales = torch.arange(1, len(self.sizes) + 1, device=device) / 8
        self.a, self.b = (
            x._replace(global_scale=x.global_scale * scales.roll(i)) if own else x
            for i, (x, own) in enumerate(zip((self.a, self.b), which))
        )

    def groups(self):
        filled = iter(g for g, _ in enumerate(self.sizes))
        for index, *operands in super().groups():
            g = next(filled)
            yield index, *(x._replace(global_scale=x.global_scale[g] if x.global_scale.dim() else x.global_scale)
                           for x in operands)  # fmt: skip


@which
@pairs
@routings
def test_reference_scales_each_group(routing, along, pair, which, device):
    case = Scaled(along, pair, routing, device, which)
    out = case.run(backend="reference")
    expected = torch.zeros_like(out)
    for index, a, b in case.groups():
        expected[index] = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert_bitwise_equal(out, expected)


@pairs
@pytest.mark.parametrize(
    ("routing", "which"), [(r, w) for r in ROUTINGS for w in WHICH if w == "both" or r == "ragged_and_a_tail"]
)
def test_triton_scales_each_group(routing, which, along, pair, guarded, device):
    case = Scaled(along, pair, ROUTINGS[routing], device, WHICH[which])
    assert_close_to_each_group(case, case.run(backend="triton"), "triton")


@backends
def test_adds_to_gradients(backend, device):
    case = Scaled("k", PAIRS[2][1], ROUTINGS["ragged_and_a_tail"], device, WHICH["both"])
    start = torch.randn(len(case.sizes), case.n, case.k, device=device)
    got = case.add(start.clone(), backend=backend)
    torch.testing.assert_close(got, start + case.run(backend=backend), rtol=2.0**-20, atol=1e-6)


@backends
def test_nan_stays_in_its_group(backend, device):
    for along, pair in PAIRS[::2]:
        case = Scaled(along, pair, ([30, 0, 9, 20], 2), device, WHICH["both"])
        case.a.global_scale[[1, 2]] = float("nan")
        out = case.run(backend=backend)
        bad = slice(30, 39) if along == "m" else 2
        assert out[bad].isnan().all()
        out[bad] = 0
        assert out.isfinite().all()


# --- refusals ---------------------------------------------------------------------------------------------------------

X, W, ENDS = torch.ones(4, 32), torch.ones(2, 32, 32), torch.tensor([1, 4], dtype=torch.int32)
QX = ops.quantize(X, NVFP4_1X16, groups=ENDS, scale_per_group=True, backend="reference").rowwise
QW = ops.quantize(W, NVFP4_16X16, scale_per_group=True, backend="reference").rowwise
REFUSALS = {
    "decoded without groups": (
        lambda: ops.dequantize(QX),
        "dequantize: global_scale must be a scalar or have one value for each matrix of x, got [2] for payload of shape"
        " [4, 16]; for tokens in groups, dequantize the rows of each group with its own scale",
    ),
    "other groups": (
        lambda: ops.grouped_matmul(QX, QW, torch.tensor([1, 2, 4], dtype=torch.int32), out_dtype=torch.float32),
        "grouped_matmul: global_scale of a must be a scalar or one for each group, got [2] for 3 ends",
    ),
    "plain product": (
        lambda: ops.matmul(QX, QX, out_dtype=torch.float32),
        "matmul: global_scale of a must be a scalar, got shape [2]; use grouped_matmul",
    ),
}


@pytest.mark.parametrize("call, message", REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
