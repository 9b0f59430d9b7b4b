"""What each benchmark describes: bytes that must move, checks that see what is wrong, what peers are given."""

from __future__ import annotations

import math

import bench_fused
import bench_matmul
import bench_moe
import bench_permute
import bench_quantize
import grouped_peers
import pytest
import torch
from bench_grouped_matmul import KINDS, GroupedProduct
from errors import Wrong
from experts import Experts, group_ends
from products import KINDS as PRODUCTS
from products import Product, product_error

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, Operand

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
CPU = torch.device("cpu")
ROUTING = bench_permute.SMOKE["smoke"]


def tensors(x):
    """The tensors in nested tuples, which hold names too."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for item in x for t in tensors(item)] if isinstance(x, tuple) else []


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


@pytest.mark.parametrize("case", bench_fused.CASES)
def test_bytes_that_must_move_through_a_fused_operation(case):
    job = bench_fused.job(case, 224, 320, CPU)
    inputs = job.make()
    read, (_, copies) = sum(t.nbytes for t in tensors(inputs) if t.dim() == 2), job.ours(inputs)["ours"](*inputs)
    # A norm reads its input once more.
    norm = case.startswith(("rms", "layer"))
    assert job.nbytes == (2 * read if norm else read) + nbytes(copies)


def test_bytes_that_must_move_to_sort_tokens_and_to_sum_them():
    token = 2 * ROUTING.tokens * ROUTING.dim
    # A token's row counts once, and its two assignments' twice.
    jobs = [bench_permute.job(operation, ROUTING, CPU) for operation in bench_permute.OPERATIONS]
    assert [job.nbytes for job in jobs] == [3 * token, 3 * token, 5 * token]


def test_bytes_that_grouped_products_must_move():
    product = GroupedProduct("output", (5, 0, 3), 256, 128)
    assert product.nbytes() == FP8_1X128.nbytes(8, 128) + 2 * FP8_128X128.nbytes(256, 128) + 8 * 256 * 2
    gradients = 3 * 256 * 128 * 2
    quantized = GroupedProduct("grad_weight", (5, 0, 3), 256, 128)
    assert quantized.nbytes() == FP8_1X128.nbytes(256, 8) + FP8_1X128.nbytes(128, 8) + gradients
    assert GroupedProduct("grad_weight_quantized", (5, 0, 3), 256, 128).nbytes() == 8 * (256 + 128) * 2 + gradients


def test_bytes_that_an_expert_mlp_must_move():
    ends = group_ends("empty", 40, 3, CPU)
    x, weight = 40 * 128, 3 * 128 * 128
    # One expert of three has tokens; the gradients of all are written.
    assert bench_moe.floor_bytes(Experts(40, 3, 128, 128), ends) == 2 * (4 * x + weight + 3 * weight)


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
    wrong = type(statistics)(*(None if s is None else s * 1.01 for s in statistics))
    with pytest.raises(Wrong, match="statistics differ"):
        job.check((wrong, copies), inputs, None)


def test_bits_are_compared_as_bits():
    q = ops.quantize(torch.randn(4, 256), FP8_1X128).rowwise
    assert bench_quantize.same_bits((q, q), (q, q))
    assert not bench_quantize.same_bits(q, q._replace(format_name=FP8_128X128.name))
    assert bench_quantize.same_bits((torch.tensor(math.nan),), (torch.tensor(math.nan),))
    other = q._replace(scale=q.scale.clone())
    other.scale[0, 0] *= 1.0000001
    assert not bench_quantize.same_bits(q, other)
    assert not bench_quantize.same_bits(torch.zeros(2), -torch.zeros(2))
    assert not bench_quantize.same_bits(torch.zeros(2), torch.zeros(3)) and not bench_quantize.same_bits(q, None)


def test_a_peers_payload_is_compared_however_it_is_stored():
    x = torch.randn(256, 384)
    q, qt = ops.quantize(x, FP8_1X128, columnwise=True)
    for peer in ((q.qdata, q.scale), (q.qdata.t(), q.scale)):
        assert bench_quantize.payload_agrees(peer, (q, qt))
        assert not bench_quantize.payload_agrees(peer, (None, qt))
    other = ops.quantize(x * 1.5, FP8_1X128).rowwise
    other.qdata.view(torch.uint8)[:2] ^= 1
    assert not bench_quantize.payload_agrees(other, q)


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


# --- operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ("fp8", "nvfp4"))
@pytest.mark.parametrize("kind", PRODUCTS)
def test_operands_are_those_of_layers(kind, recipe):
    """Along ragged tokens a payload's rows are padded to 16 bytes; the product is that of the plain operands."""
    product = Product(kind, 41, 64, 96, recipe)
    hp = product.high_precision(CPU)
    plain, padded = product.quantize(*hp), bench_matmul.operands(product, *hp)
    if kind == "grad_weight":
        assert [x.qdata.shape[1] * x.qdata.element_size() % 16 for x in padded] == [0, 0]
        assert all(x.qdata.is_contiguous() for x in padded)
    expected = plain if kind != "grad_weight" else padded
    assert product_error(ops.matmul(*padded, out_dtype=torch.float32), *expected) < 1e-5
    assert product_error(ops.matmul(*plain, out_dtype=torch.float32), *plain) < 1e-5


class KGrouped:
    """DeepGEMM's k_grouped_fp8_gemm_nt_contiguous by its words: groups one behind the other, added to what is there."""

    @staticmethod
    def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c):
        (a, a_scale), (b, b_scale) = a, b
        groups, m, n = d.shape
        assert c is d and d.dtype == torch.float32 and grouped_layout.tolist() == ks and len(ks) == groups
        assert a.numel() == m * sum(ks) and b.numel() == n * sum(ks) and all(k % 128 == 0 for k in ks)
        assert a_scale.shape == (sum(ks) // 128, m) and b_scale.shape == (sum(ks) // 128, n)
        at = 0
        for g, k in enumerate(ks):
            blocks = slice(at // 128, (at + k) // 128)
            x = Operand(a[m * at : m * (at + k)].view(m, k), a_scale[blocks], None, FP8_1X128.name)
            y = Operand(b[n * at : n * (at + k)].view(n, k), b_scale[blocks], None, FP8_1X128.name)
            ops.add_matmul_(d[g], x, y)
            at += k


def test_what_deep_gemm_is_given_along_k():
    product = GroupedProduct("grad_weight", (0, 3, 150, 0, 9), 32, 48)
    ends = product.ends(CPU)
    first, second = product.high_precision(CPU)
    a, b = product.quantize(first, second, ends)
    arguments = grouped_peers._k_grouped_arguments(first, second, ends, a, b)
    assert grouped_peers._run_k_grouped(KGrouped)(*arguments) is None
    assert product.error(arguments[-1], a, b) < 1e-5
