"""What others offer for grouped products, each optional, each with its reason: as in peers.py, for groups of tokens.

bf16         torch's grouped product
deep_gemm    DeepGEMM (sgl-deep-gemm): groups padded to its tiles, scales laid out and sizes known beforehand
torchao      the weight's gradient of torchao.prototype.moe_training, quantizers included, tokens padded beforehand
"""

from __future__ import annotations

from collections.abc import Callable

import peers
import torch
import torch.nn.functional as F
from driver import Peer
from errors import Unavailable

from torchao_blockwise.formats import FP8_1X128
from torchao_blockwise.ops.groups.ends import padded_ends, padded_rows

_BLOCK = FP8_1X128.block[1]
NAMES = ("bf16", "deep_gemm", "torchao")


def grouped_peer(name: str, product, device: torch.device) -> Peer:
    """The peer of that name for this product (bench_grouped_matmul.GroupedProduct); raises Unavailable.

    It prepares (a_hp, b_hp, ends, a, b), both operands in high precision and ours.
    """
    if name != "bf16" and product.recipe != "fp8":
        raise Unavailable("compared in FP8 only")
    return {"bf16": _bf16, "deep_gemm": _deep_gemm, "torchao": _torchao}[name](product, device)


def _bf16(product, device: torch.device) -> Peer:
    def prepare(a_hp, b_hp, ends, a, b):
        return a_hp.t() if product.along == "k" else a_hp, b_hp.mT if product.kind == "output" else b_hp, ends

    return Peer(lambda a, b, ends: F.grouped_mm(a, b, offs=ends), prepare)


def _deep_gemm(product, device: torch.device) -> Peer:
    peers.need_capability(device, (9, 0))
    if product.quantizes:
        raise Unavailable("it has no quantizers")
    deep_gemm = peers._import_deep_gemm()
    peers.need_multiples("features", (product.out_features, product.in_features), _BLOCK)
    if product.along == "k":
        return Peer(_run_k_grouped(deep_gemm), _k_grouped_arguments, same_operands=True)
    tile = deep_gemm.get_mk_alignment_for_contiguous_layout()

    def prepare(a_hp, b_hp, ends, a, b):
        tokens = a.qdata.shape[0]
        rows = padded_rows(ends, tokens, tile)
        source = rows.clamp(max=tokens - 1)
        position = torch.arange(len(rows), dtype=torch.int32, device=device)
        group = torch.searchsorted(padded_ends(ends, tokens, tile), position, right=True, out_int32=True)
        group = torch.where(group < len(ends), group, -1)
        payload = a.qdata.view(torch.uint8)[source].view(a.qdata.dtype)
        return payload, a.scale[:, source].t(), b.qdata, b.scale, group

    def run(a, a_scale, b, b_scale, group):
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, group)
        return out

    def finish(out):
        rows = padded_rows(product.ends(device), product.tokens, tile)
        return out.new_zeros(product.tokens + 1, out.shape[1]).index_copy_(0, rows, out)[: product.tokens]

    return Peer(run, prepare, same_operands=True, finish=finish)


def _k_grouped_arguments(a_hp, b_hp, ends, a, b):
    """Each group's columns as a matrix of its own, one behind the other; sizes on the host; a place of fp32 zeros."""
    padded = padded_ends(ends, a.qdata.shape[1], _BLOCK)
    sizes = torch.diff(padded, prepend=padded.new_zeros(1))
    total, host = int(padded[-1]), sizes.tolist()

    def flat(x):
        groups = x.qdata[:, :total].view(torch.uint8).split(host, 1)
        return torch.cat([group.reshape(-1) for group in groups]).view(x.qdata.dtype), x.scale[: total // _BLOCK]

    out = torch.zeros(len(host), a.qdata.shape[0], b.qdata.shape[0], device=ends.device)
    return *flat(a), *flat(b), host, sizes, out


def _run_k_grouped(deep_gemm) -> Callable:
    def run(a, a_scale, b, b_scale, host, sizes, out):
        # It adds into fp32 that is there already; C and D are the same.
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), out, host, sizes, c=out)

    return run


def _torchao(product, device: torch.device) -> Peer:
    if not product.quantizes:
        raise Unavailable("it quantizes in the same call; compared where ours does")
    features = (product.out_features, product.in_features)
    peers.torchao_grouped_product(device, features)
    utils = peers._import("torchao.prototype.moe_training.utils")
    backends = peers._import("torchao.prototype.moe_training.blockwise_fp8.grouped_mm_backend")
    preference = peers._import("torchao.quantization.quantize_.common").KernelPreference.AUTO
    select = backends._select_fp8_blockwise_grouped_mm_backend

    def prepare(dy, x, ends, a, b):
        padded_x, starts, padded = utils.pad_token_groups(x, ends, alignment_size=_BLOCK)
        padded_dy, _, _ = utils.pad_token_groups(dy, ends, alignment_size=_BLOCK)
        backend = select(
            preference, x, torch.bfloat16, _BLOCK, padded, original_group_end_offsets=ends,
            padded_group_start_offsets=starts, num_rows=padded_x.shape[0],
        )  # fmt: skip
        return backend, padded_dy, padded_x, padded

    def run(backend, dy, x, ends):
        return backend.wgrad(dy, x, ends, torch.bfloat16, _BLOCK, torch.float8_e4m3fn)

    return Peer(run, prepare)
