"""GEMMs of groups for tests of ops.grouped_matmul, or of one group: operands, routings, and each group by itself."""

import pytest
import torch
from product_budgets import accumulation_unit, assert_within_budget, pair_id

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops.groups.ends import padded_tokens
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

PAIRS = {
    "": ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)),
    "m": ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_16X16), (NVFP4_1X16, NVFP4_1X16)),
    "k": ((FP8_1X128, FP8_128X128), (FP8_1X128, FP8_1X128), (NVFP4_1X16, NVFP4_1X16)),
}
# name: (sizes of the groups, tokens after the last one)
ROUTINGS = {
    "one_group": ([130], 0),
    "one_group_and_a_tail": ([37], 3),
    "empty_first_middle_and_last": ([0, 5, 0, 0, 129, 1, 0], 0),
    "ragged_and_a_tail": ([130, 1, 64, 17], 70),
    "all_to_the_second": ([0, 200, 0, 0], 0),
    "multiples_of_every_block": ([128, 256, 128], 128),
    "nobody": ([0, 0, 0], 21),
    "no_tokens": ([0, 0], 0),
    "more_groups_than_tokens": ([1, 0, 0, 0, 0, 0, 2], 1),
    # As many tiles as there can be.
    "tiles_of_one_token": ([1, 1, 1], 1),
}
N, K = 40, 200
routings = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
backends = pytest.mark.parametrize("backend", ("reference", "triton"))


def ends_of(routing: str) -> tuple[torch.Tensor, int]:
    """(group_ends, tokens) of a routing."""
    sizes, tail = ROUTINGS[routing]
    return torch.tensor(sizes).cumsum(0).int(), sum(sizes) + tail


def case_id(along: str, pair, routing, n: int, k: int) -> str:
    sizes, tail, *scaled = routing
    which = "".join(f"-own_scales_in_{name}" for name, own in zip("ab", *scaled) if own) if scaled else ""
    return f"{along or 'plain'}-{pair_id(pair)}{which}-{'+'.join(map(str, sizes))}+{tail}-{n}x{k}"


class Case:
    """Operands of a grouped GEMM and, group by group, of the GEMMs that it stands for; along "" of a plain one.

    routing: (sizes of the groups, tokens after the last one), and whether a and b have a tensor scale for each group.
    """

    def __init__(self, along, pair, routing, device, n: int = N, k: int = K):
        sizes, tail, *scaled = routing
        self.along, self.pair, self.device, self.n, self.k = along, pair, device, n, k
        self.sizes, self.tokens = sizes, sum(sizes) + tail
        self.ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
        if along == "m":
            self.a = quantize(values(self.tokens, k, 1), pair[0], device)
            self.b = quantize(random_tensor(len(sizes), n, k, seed=2) * 2.0**-6, pair[1], device)
        elif along == "":
            self.a, self.b = (
                quantize(values(*shape), fmt, device) for shape, fmt in zip(((self.tokens, k, 1), (n, k, 2)), pair)
            )
        else:
            self.a, self.b = (
                quantize(self.padded(values(self.tokens, columns, seed)).mT, fmt, device)
                for columns, seed, fmt in ((n, 1, pair[0]), (k, 2, pair[1]))
            )

        if scaled:
            scales = torch.arange(1, len(sizes) + 1, device=device) / 8
            self.a, self.b = (
                x._replace(global_scale=x.global_scale * scales.roll(i)) if own else x
                for i, (x, own) in enumerate(zip((self.a, self.b), *scaled))
            )

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ..] with each group padded to whole blocks: what a columnwise copy is quantized from."""
        block, rows = self.pair[0].block[1], x[: sum(self.sizes)]
        out = x.new_zeros(padded_tokens(self.tokens, len(self.sizes), block), x.shape[1])
        at = 0
        for group in rows.split(self.sizes):
            out[at : at + len(group)] = group
            at += -(-len(group) // block) * block
        return out

    def groups(self):
        """(index of the output, a, b) of each group's plain product."""
        if self.along == "":
            yield slice(None), self.a, self.b
            return
        row = block = 0
        for g, size in enumerate(self.sizes):
            a, b = (
                x._replace(global_scale=x.global_scale[g]) if x.global_scale is not None and x.global_scale.dim() else x
                for x in (self.a, self.b)
            )
            if self.along == "m":
                end = row + size
                scale = a.scale[:, row:end] if a.format.transposed_scales else a.scale[row:end]
                a = a._replace(qdata=a.qdata[row:end], scale=scale)
                yield slice(row, end), a, b._replace(qdata=b.qdata[g], scale=b.scale[g])
                row = end
            else:
                end = block - (-size // a.format.block[1])
                yield g, *(columns(x, block, end) for x in (a, b))
                block = end

    def run(self, out_dtype=torch.float32, **options) -> torch.Tensor:
        if not self.along:
            return ops.matmul(self.a, self.b, out_dtype=out_dtype, **options)
        return ops.grouped_matmul(self.a, self.b, self.ends, along=self.along, out_dtype=out_dtype, **options)

    def add(self, out, **options) -> torch.Tensor:
        if not self.along:
            return ops.add_matmul_(out, self.a, self.b, **options)
        return ops.add_grouped_matmul_(out, self.a, self.b, self.ends, **options)


def assert_adds(case: Case, add, right: torch.Tensor, start_scale: float = 1.0, atol: float = 1e-6) -> None:
    """`add(out)` adds `right` to a gradient, and leaves that of empty groups as it is: -0 would lose its sign."""
    empty = torch.zeros(len(right), dtype=torch.bool)
    empty[[g for g, size in enumerate(case.sizes) if case.along and not size]] = True
    start = start_scale * torch.randn_like(right)
    start[empty] = -0.0
    out = start.clone()
    add(out)
    assert_bitwise_equal(out[empty], start[empty], "empty groups")
    torch.testing.assert_close(out[~empty], (start + right)[~empty], rtol=2.0**-20, atol=atol)


def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    return random_tensor(rows, columns, seed=seed) * 2.0**-6


def quantize(x: torch.Tensor, fmt, device):
    return ops.quantize(x.to(device), fmt, backend="reference").rowwise


def with_nan(x, rows: slice):
    """The operand with NaN in the payload (e4m3), or in the block scales, of these rows."""
    x = x._replace(qdata=x.qdata.clone(), scale=x.scale.clone())
    x.qdata[rows].view(torch.uint8).fill_(0x7F)
    scale = x.scale.mT[rows] if x.format.transposed_scales else x.scale[rows]
    scale.fill_(float("nan")) if scale.dtype == torch.float32 else scale.view(torch.uint8).fill_(0x7F)
    return x


def columns(q, first: int, end: int):
    """Blocks [first, end) of an operand's contraction."""
    width = q.format.block[1] // q.format.element.per_byte
    scale = q.scale[first:end] if q.format.transposed_scales else q.scale[:, first:end]
    return q._replace(qdata=q.qdata[:, first * width : end * width], scale=scale)


def assert_close_to_each_group(case: Case, out: torch.Tensor, backend: str) -> None:
    """Within the plain product's budget in each group, and exactly zero where no group is."""
    rest = torch.ones_like(out, dtype=torch.bool)
    for index, a, b in case.groups():
        contraction = a.qdata.shape[1] * a.format.element.per_byte
        if contraction:
            assert_within_budget(out[index], a, b, contraction, accumulation_unit(backend, a.format, case.device))
            rest[index] = False
    assert (out[rest] == 0).all()


def assert_nan_stays_in_its_group(along, pair, device: str, run) -> None:
    """In payload of FP8, in block scales and tensor scales of NVFP4; without groups, in its rows of a."""
    routing, number = ([16, 0, 30, 16], 5), 2
    case = Case(along, pair, routing, device)
    right, rows = run(case), slice(16, 46)

    def check(case: Case, wanted, index) -> None:
        out = run(case)
        assert out[index].isnan().all()
        out[index] = wanted[index]
        assert_bitwise_equal(out, wanted)

    if along != "k":
        # In the rows of no group it reaches nothing.
        case.a = with_nan(case.a, slice(62, None) if along else rows)
        check(case, right, slice(0, 0) if along else rows)
    for operand in (1, 2) if along else ():
        case = Case(along, pair, routing, device)
        index, *parts = list(case.groups())[number]
        of = parts[operand - 1]
        (of.scale if pair[0].has_global_scale else of.qdata).view(torch.uint8).fill_(0x7F)
        check(case, right, index)
    if along and pair[0].has_global_scale:
        case = Case(along, pair, routing, device)
        case.a.global_scale.fill_(float("nan"))
        every = slice(62) if along == "m" else [0, 2, 3]
        check(case, right, every)
        case = Case(along, pair, (*routing, (True, True)), device)
        right = run(case)
        case.a.global_scale[number] = float("nan")
        check(case, right, rows if along == "m" else number)
