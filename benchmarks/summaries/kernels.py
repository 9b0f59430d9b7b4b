"""Kernels on an H200: shares of their floors, and × others; rates of grouped `grad_weight`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from summaries.cells import MISSING, Results, column, each, link, ratio, select, sizes, span, table, times, whole
from summaries.experts import PUBLISHED, SHAPE

COPIES = ("rowwise", "columnwise", "both", "weight", "transpose")
PRODUCTS = ("output", "grad_input")
MATMUL, GROUPED = "matmul_nvidia_h200", "grouped_matmul_nvidia_h200"
PEERS = {"cuBLASLt": "x cublaslt", "DeepGEMM": "x deep_gemm", "bf16": "x bf16"}
# Their tiles of `grad_weight` leave an eighth of the programs' rounds empty, or more.
UNFILLED = ("4096x2048x7168", "4096x7168x2048", "4096x10944x2048")
FEW_TOKENS, FEW_COLUMNS, RAGGED = "64x18432x7168", "4096x576x7168", "4097x18432x7168"
# AUTO takes DeepGEMM from here on.
_DEEP_GEMM_FROM = 2**38
_LARGE = 64 * 2**20
Row = tuple[str, str, str, str]


def kernels(results: Results) -> str:
    columns = ("kernel", "bound by", "of its floor", "× others in the same run")
    parts = (_quantizers, _fused, _permute, _products, _grouped)
    return table(columns, (row for part in parts for row in part(results)), left=4)


def grad_weight(results: Results) -> str:
    """TFLOP/s over both weights and all routings."""
    rows = results.rows(GROUPED, product="grad_weight", recipe="fp8")

    def cells(shape: str) -> list[str]:
        return [times(shape), span(column(select(rows, shape=shape), "TFLOP/s"), whole)]

    there = {row["shape"] for row in rows}
    columns = (f"grouped `grad_weight`, {SHAPE}", "TFLOP/s")
    return table(columns, (cells(shape) for shape in PUBLISHED if shape in there))


def _quantizers(results: Results) -> Iterable[Row]:
    name = "quantize_nvidia_h200"
    rows = results.rows(name)
    large = [row for row in rows if math.prod(sizes(row["shape"])) >= _LARGE]
    yield f"{link('quantize, transpose', name)}, from 64 Mi elements", "bytes", *_by(large, "case", COPIES, "torchao")
    for shape in ("4096x7168", "4097x7168"):
        some = select(rows, shape=shape)
        yield f"the same, {times(shape)}", "bytes", *_by(some, "case", COPIES, "torchao")


def _fused(results: Results) -> Iterable[Row]:
    name = "fused_nvidia_h200"
    rows = results.rows(name)
    whats = {
        "rms": (f"{link('RMSNorm + quantize', name)}", "bytes"),
        "layer": ("LayerNorm + quantize", "bytes"),
        "swiglu": ("SwiGLU + quantize", "bytes, and nearly as much by instructions"),
    }
    for kind, (what, bound) in whats.items():
        yield what, bound, *_fused_cells(rows, kind)
    backward = "swiglu_backward"
    ragged = [row for row in rows if sizes(row["shape"])[1] % 128]
    even = [row for row in rows if row not in ragged]
    yield "SwiGLU's gradients + quantize", whats["swiglu"][1], *_fused_cells(even, backward)
    yield "the same, a width that is no multiple of 128", whats["swiglu"][1], *_fused_cells(ragged, backward)


def _fused_cells(rows: Iterable[Mapping], kind: str) -> tuple[str, str]:
    cases = {copies: select(rows, case=f"{kind}_{copies}") for copies in ("rowwise", "both")}
    return _cells(cases, {"two steps": "x two steps"})


def _permute(results: Results) -> Iterable[Row]:
    name = "permute_nvidia_h200"
    rows = results.rows(name)
    few = [row for row in rows if sizes(row["shape"])[0] == 64]
    many = [row for row in rows if row not in few]
    whats = (link("permute, unpermute, its backward", name), "the same, 64 tokens")
    for what, some in zip(whats, (many, few), strict=True):
        operations = {shown: select(some, operation=shown) for shown in ("permute", "unpermute", "backward")}
        yield what, "bytes", *_cells(operations, {"eager PyTorch": "x eager"})


def _products(results: Results) -> Iterable[Row]:
    rows = results.rows(MATMUL, recipe="fp8")
    ours = select(rows, by="gluon")
    both = select(ours, product=PRODUCTS)
    special = (FEW_TOKENS, FEW_COLUMNS)
    yield (
        f"{link('`output`, `grad_input`', MATMUL)}, Gluon", "power",
        *_peers([row for row in both if row["shape"] not in special]),
    )  # fmt: skip
    for what, shape in (("64 tokens", FEW_TOKENS), ("576 columns", FEW_COLUMNS)):
        by_product = {f"`{product}`": select(both, shape=shape, product=product) for product in PRODUCTS}
        yield f"the same, {what}", "bytes" if shape == FEW_TOKENS else "few tiles", *_cells(by_product, PEERS)
    yield "DeepGEMM, the same, from 2³⁸ multiplications", "power", *_deep_gemm(select(rows, product=PRODUCTS))
    weights = select(ours, product="grad_weight")
    filled = [row for row in weights if row["shape"] not in (*UNFILLED, *special, RAGGED)]
    yield "`grad_weight`, Gluon, tiles that fill the programs' rounds", "power", *_peers(filled)
    unfilled = ", ".join(times(shape.partition("x")[2]) for shape in UNFILLED)
    for what, bound, shapes in (
        (f"the same, {unfilled}", "the last round of tiles", UNFILLED),
        ("the same, 4097 tokens", "power, and a copy that pads", RAGGED),
        ("the same, 64 tokens", "bytes", FEW_TOKENS),
        ("the same, 576 columns, where AUTO takes cuBLASLt", "few tiles", FEW_COLUMNS),
    ):
        yield what, bound, *_peers(select(weights, shape=shapes))


def _deep_gemm(rows: Iterable[dict]) -> tuple[str, str]:
    """DeepGEMM × the faster of Gluon and cuBLAS."""
    best: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = row["product"], row["shape"]
        if row["by"] in ("gluon", "cublas") and math.prod(row["mnk"]) >= _DEEP_GEMM_FROM and "x deep_gemm" in row:
            best[key] = min(best.get(key, row), row, key=lambda found: found["us"])
    floors = [row["roofline us"] / row["peers us"]["deep_gemm"] for row in best.values()]
    faster = span(row["us"] / row["peers us"]["deep_gemm"] for row in best.values())
    return span(floors), each({"the faster of Gluon and cuBLAS": faster})


def _grouped(results: Results) -> Iterable[Row]:
    rows = results.rows(GROUPED, recipe="fp8", by="gluon")
    both = select(rows, product=PRODUCTS)
    few = [row for row in both if sizes(row["shape"])[1] <= 32]
    many = [row for row in both if row not in few]
    by_bf16, by_both = {"bf16": "x bf16"}, {"DeepGEMM": "x deep_gemm", "bf16": "x bf16"}
    whats = {
        f"grouped {link('`output`, `grad_input`', GROUPED)}, 8 and 32 experts": few,
        "the same, 64 and 128 experts, balanced": select(many, routing="balanced"),
        "the same, skewed": select(many, routing="skewed"),
    }
    for what, some in whats.items():
        yield what, "power, and each group's last tile", *_peers(some, by_both)
    alone, quantized = (select(rows, product=product) for product in ("grad_weight", "grad_weight_quantized"))
    yield "grouped `grad_weight`", "power", *_peers(alone, by_bf16)
    yield "the same, dy and x in bf16, quantized first", "bytes, then power", *_peers(quantized, by_bf16)
    shares = _quantizing(quantized, alone, results.load(GROUPED)["ceilings"]["copy"])
    median = f", median {ratio(statistics.median(shares))} of {len(shares)}" if shares else ""
    yield "quantizing alone, the difference of the two", "bytes", f"{span(shares)}{median}", MISSING


def _quantizing(with_it: Iterable[dict], without: Iterable[dict], copy: float) -> list[float]:
    """Shares of the floor: 3 bytes an element of dy [tokens, N] and x [tokens, K] at `copy` TB/s over the time."""
    same = ("shape", "weight", "routing")
    alone = {tuple(row[key] for key in same): row["us"] for row in without}
    shares = []
    for row in with_it:
        tokens, _, hidden, dim = sizes(row["shape"])
        n_plus_k = 2 * hidden + dim if row["weight"] == "gate_up" else dim + hidden
        us = row["us"] - alone[tuple(row[key] for key in same)]
        shares.append(3 * tokens * n_plus_k / (copy * 1e6) / us)
    return shares


def _by(rows: Iterable[Mapping], name: str, values: Iterable[str], peer: str) -> tuple[str, str]:
    return _cells({value: select(rows, **{name: value}) for value in values}, {peer: f"x {peer}"})


def _cells(groups: Mapping[str, list[dict]], peers: Mapping[str, str]) -> tuple[str, str]:
    """Shares of the floor by group, and × each peer by group."""
    floors = {name: span(column(rows, "of roofline")) for name, rows in groups.items()}
    others = {
        peer: each({name: span(column(rows, key)) for name, rows in groups.items()}) for peer, key in peers.items()
    }
    found = [f"{peer}: {cell}" for peer, cell in others.items() if cell != MISSING]
    return each(floors), "; ".join(found) or MISSING


def _peers(rows: Iterable[Mapping], peers: Mapping[str, str] = PEERS) -> tuple[str, str]:
    found = list(rows)
    return span(column(found, "of roofline")), each({peer: span(column(found, key)) for peer, key in peers.items()})
