"""Kernels on an H200: shares of their floors, and × others; rates of grouped `grad_weight`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from summaries.cells import MISSING, Results, column, each, link, ratio, select, sizes, span, table, times, whole
from summaries.layers import PUBLISHED, SHAPE

COPIES = ("rowwise", "columnwise", "both", "weight", "transpose")
PRODUCTS = ("output", "grad_input")
QUANTIZE, FUSED, PERMUTE = "quantize_nvidia_h200", "fused_nvidia_h200", "permute_nvidia_h200"
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
    parts = (_bytes, _products, _grouped)
    return table(columns, (row for part in parts for row in part(results)), left=4)


def grad_weight(results: Results) -> str:
    """TFLOP/s over both weights and all routings."""
    rows = results.rows(GROUPED, product="grad_weight", recipe="fp8")

    def cells(shape: str) -> list[str]:
        return [times(shape), span(column(select(rows, shape=shape), "TFLOP/s"), whole)]

    there = {row["shape"] for row in rows}
    columns = (f"grouped `grad_weight`, {SHAPE}", "TFLOP/s")
    return table(columns, (cells(shape) for shape in PUBLISHED if shape in there))


def _bytes(results: Results) -> Iterable[Row]:
    """Kernels that bytes bound: quantizers, fused and not, and the permutation."""
    rows = results.rows(QUANTIZE)
    large = [row for row in rows if math.prod(sizes(row["shape"])) >= _LARGE]
    whats = {f"{link('quantize, transpose', QUANTIZE)}, from 64 Mi elements": large}
    whats |= {f"the same, {times(shape)}": select(rows, shape=shape) for shape in ("4096x7168", "4097x7168")}
    for what, some in whats.items():
        yield what, "bytes", *_by(some, "case", {case: case for case in COPIES}, {"torchao": "x torchao"})
    rows, bound = results.rows(FUSED), "bytes, and nearly as much by instructions"
    ragged = [row for row in rows if sizes(row["shape"])[1] % 128]
    for what, bounds, kind, some in (
        (link("RMSNorm + quantize", FUSED), "bytes", "rms", rows),
        ("LayerNorm + quantize", "bytes", "layer", rows),
        ("SwiGLU + quantize", bound, "swiglu", rows),
        ("SwiGLU's gradients + quantize", bound, "swiglu_backward", [row for row in rows if row not in ragged]),
        ("the same, a width that is no multiple of 128", bound, "swiglu_backward", ragged),
    ):
        cases = {copies: f"{kind}_{copies}" for copies in ("rowwise", "both")}
        yield what, bounds, *_by(some, "case", cases, {"two steps": "x two steps"})
    rows = results.rows(PERMUTE)
    few = [row for row in rows if sizes(row["shape"])[0] == 64]
    operations = {name: name for name in ("permute", "unpermute", "backward")}
    whats = {link("permute, unpermute, its backward", PERMUTE): [row for row in rows if row not in few]}
    for what, some in (whats | {"the same, 64 tokens": few}).items():
        yield what, "bytes", *_by(some, "operation", operations, {"eager PyTorch": "x eager"})


def _products(results: Results) -> Iterable[Row]:
    rows = results.rows(MATMUL, recipe="fp8")
    ours = select(rows, by="gluon")
    both, weights = select(ours, product=PRODUCTS), select(ours, product="grad_weight")
    special = (FEW_TOKENS, FEW_COLUMNS)
    plain = [row for row in both if row["shape"] not in special]
    yield f"{link('`output`, `grad_input`', MATMUL)}, Gluon", "power", *_peers(plain)
    for what, shape in (("64 tokens", FEW_TOKENS), ("576 columns", FEW_COLUMNS)):
        by_product = {f"`{product}`": product for product in PRODUCTS}
        some = select(both, shape=shape)
        yield (
            f"the same, {what}", "bytes" if shape == FEW_TOKENS else "few tiles",
            *_by(some, "product", by_product, PEERS),
        )  # fmt: skip
    yield "DeepGEMM, the same, from 2³⁸ multiplications", "power", *_deep_gemm(select(rows, product=PRODUCTS))
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


def _by(rows: Iterable[Mapping], name: str, values: Mapping[str, str], peers: Mapping[str, str]) -> tuple[str, str]:
    """Shares of the floor by the value of a column, and × each peer likewise; values: by what is shown of them."""
    groups = {shown: select(rows, **{name: value}) for shown, value in values.items()}
    floors = {shown: span(column(some, "of roofline")) for shown, some in groups.items()}
    others = {p: each({shown: span(column(some, key)) for shown, some in groups.items()}) for p, key in peers.items()}
    return each(floors), "; ".join(f"{p}: {cell}" for p, cell in others.items() if cell != MISSING) or MISSING


def _peers(rows: Iterable[Mapping], peers: Mapping[str, str] = PEERS) -> tuple[str, str]:
    found = list(rows)
    return span(column(found, "of roofline")), each({peer: span(column(found, key)) for peer, key in peers.items()})
