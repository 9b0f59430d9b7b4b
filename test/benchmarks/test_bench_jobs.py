"""What each benchmark describes: bytes that must move, checks that see what is wrong, what peers are given."""

from __future__ import annotations

import math

import bench_fused
import bench_permute
import bench_quantize
import pytest
import torch
from bench_grouped_matmul import KINDS, GroupedProduct
from common.errors import Wrong, check_bits, tensors

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
CPU = torch.device("cpu")
ROUTING = bench_permute.SMOKE


def nbytes(x) -> int:
    return sum(t.nbytes for t in tensors(x))


# --- bytes ------------------------------------------------------------------------------------------------------------


QUANTIZED = [
    (case, recipe)
    for case in bench_quantize.CASES
    for recipe in ("fp8", "nvfp4")
    if recipe == "nvfp4" or case not in bench_quantize.NVFP4_ONLY
]


@pytest.mark.parametrize(("case", "recipe"), QUANTIZED)
def test_bytes_that_quantizers_must_move(case, recipe):
    # Rows that need no padding, which is not counted; nor are 24 bytes of a key, and a second tensor scale.
    job = bench_quantize.job(case, 224, 320, recipe, CPU)
    inputs = job.make()
    moved = nbytes((inputs[:1], job.ours(inputs)["ours"](*inputs)))
    # The scale of a tensor is read with it and counted once; NVFP4 reads the input twice.
    again = inputs[0].nbytes if recipe == "nvfp4" and case != "transpose" else 0
    assert job.nbytes == moved + again


# --- checks -----------------------------------------------------------------------------------------------------------

JOBS = [
    *(bench_quantize.job(case, 33, 64, recipe, CPU) for case, recipe in QUANTIZED if recipe == "fp8"),
    *(bench_fused.job(case, 33, 64, CPU) for case in bench_fused.CASES),
    *(bench_permute.job(operation, ROUTING, CPU) for operation in bench_permute.OPERATIONS),
]


def spoilt(x):
    """`x` with another first byte in its last tensor that is no scalar."""
    flat = [t for t in tensors(x) if t.numel() > 1]
    flat[-1].view(-1).view(torch.uint8)[0] += 1
    return x


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.where)
def test_a_byte_that_is_wrong_is_seen(job):
    torch.manual_seed(0)
    inputs = job.make()
    run = job.ours(inputs)["ours"]
    job.check(run(*inputs), inputs, None)
    for name, peer in job.peers.items():
        if name == "torchao":
            continue
        found = peer()
        job.check(found.run(*found.prepare(*inputs)), inputs, found), name
    if job.labels.get("operation") == "backward":
        return
    with pytest.raises(Wrong, match="differ"):
        job.check(spoilt(run(*inputs)), inputs, None)


def test_wrong_sums_and_statistics_are_seen():
    job = bench_permute.job("backward", ROUTING, CPU)
    inputs = job.make()
    rows, dots = job.ours(inputs)["ours"](*inputs)
    for wrong in ((rows, dots * 1.01), (spoilt(rows.clone()), dots)):
        with pytest.raises(Wrong, match=r"relative error 0.01|bits differ"):
            job.check(wrong, inputs, None)
    job = bench_fused.job("rms_rowwise", 33, 64, CPU)
    inputs = job.make()
    statistics, copies = job.ours(inputs)["ours"](*inputs)
    wrong = [None if s is None else s * 1.01 for s in statistics]
    with pytest.raises(Wrong, match=r"relative error 0\.01 above"):
        job.check((wrong, copies), inputs, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_group_is_seen(kind):
    """Each of the three groups that are looked at, and what empty groups must be."""
    product = GroupedProduct(kind, (0, 3, 20, 0, 9), 32, 48)
    ends = product.ends(CPU)
    a, b = product.quantize(*product.high_precision(CPU), ends)
    out = ops.grouped_matmul(a, b, ends, along=product.along, out_dtype=torch.float32)
    assert product.error(out, a, b) < 1e-5
    for g, rows in ((1, slice(0, 3)), (2, slice(3, 23)), (4, slice(23, 32)), (0, None)):
        wrong = out.clone()
        if product.along == "k":
            wrong[g] += 1
        elif rows is not None:
            wrong[rows] *= 1.1
        else:
            continue
        assert product.error(wrong, a, b) > 0.05


def test_bits_are_compared_as_bits():
    q = ops.quantize(torch.randn(4, 256), FP8_1X128).rowwise
    check_bits((q, q), (q, q))
    check_bits((torch.tensor(math.nan),), (torch.tensor(math.nan),))
    other = q._replace(scale=q.scale.clone())
    other.scale[0, 0] *= 1.0000001
    for wrong, right in ((q, other), (torch.zeros(2), -torch.zeros(2)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(Wrong, match="bits differ"):
            check_bits(wrong, right)
