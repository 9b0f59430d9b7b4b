"""Kernels on an H200: shares of their floors, and × others; rates of grouped `grad_weight`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from common.report import MISSING, markdown

from summaries.cells import Results, column, link, ratio, select, sizes, span, times, whole
from summaries.layers import PUBLISHED, SHAPE

COPIES = ("rowwise", "columnwise", "both", "weight", "transpose")
PRODUCTS = ("output", "grad_input")
QUANTIZE, FUSED, PERMUTE = "quantize_nvidia_h200", "fused_nvidia_h200", "permute_nvidia_h200"
MATMUL, GROUPED = "matmul_nvidia_h200", "grouped_matmul_nvidia_h200"
SQUARES, GROUPED_SQUARES = "matmul_128x128_nvidia_h100_80gb_hbm3", "grouped_matmul_nvidia_h100_80gb_hbm3"
PEERS = {"cuBLASLt": "x cublaslt", "DeepGEMM": "x deep_gemm", "bf16": "x bf16"}
# Their tiles of `grad_weight` leave an eighth of the programs' rounds empty, or more.
UNFILLED = ("4096x2048x7168", "4096x7168x2048", "4096x10944x2048")
FEW_TOKENS, FEW_COLUMNS, RAGGED = "64x18432x7168", "4096x576x7168", "4097x18432x7168"
# AUTO takes DeepGEMM from here on.
_DEEP_GEMM_FROM = 2**38
_LARGE = 64 * 2**20


def kernels(results: Results) -> str:
    columns = ("kernel", "writes", "fraction of floor", "compared with", "speed-up")
    return markdown(columns, _bytes(results), left=2)


def gemms(results: Results) -> str:
    columns = ("GEMM", "bound by", "fraction of floor", *(f"× {peer}" for peer in PEERS))
    return markdown(columns, (row for part in (_products, _grouped) for row in part(results)), left=2)


def grad_weight(results: Results) -> str:
    """TFLOP/s over both weights and all routings."""
    rows = results.rows(GROUPED, product="grad_weight", recipe="fp8")

    def cells(shape: str) -> list[str]:
        return [times(shape), span(column(select(rows, shape=shape), "TFLOP/s"), whole)]

    there = {row["shape"] for row in rows}
    columns = (f"grouped `grad_weight`, {SHAPE}", "TFLOP/s")
    return markdown(columns, (cells(shape) for shape in PUBLISHED if shape in there))


def squares(results: Results) -> str:
    """`grad_weight` with both blocks of the input, each by its fastest backend, and in brackets without DeepGEMM."""
    columns = ("`grad_weight`", "1×128, TFLOP/s", "128×128, TFLOP/s", "× 1×128", "× bf16", "× tensorwise")

    def cells(what: str, rows: Sequence[dict]) -> list[str]:
        before = max(column(select(rows, recipe="fp8"), "TFLOP/s"))
        after = select(rows, recipe="fp8_128x128")
        best = max(after, key=lambda row: row["TFLOP/s"])
        own = max(column((row for row in after if row["by"] != "deep_gemm"), "TFLOP/s"))
        rate = whole(own) if best["TFLOP/s"] == own else f"{whole(best['TFLOP/s'])} ({whole(own)})"
        peers = (ratio(best[key]) if key in best else MISSING for key in ("x bf16", "x tensorwise"))
        return [what, whole(before), rate, ratio(best["TFLOP/s"] / before), *peers]

    plain, grouped = (results.rows(name, product="grad_weight") for name in (SQUARES, GROUPED_SQUARES))
    dense = [cells(times(shape), select(plain, shape=shape)) for shape in _values(plain, "shape")]
    experts = [
        cells(f"{times(shape)} experts, {weight}", select(grouped, shape=shape, weight=weight))
        for shape in _values(grouped, "shape")
        for weight in _values(grouped, "weight")
    ]
    return markdown(columns, dense + experts)


def _values(rows: Iterable[dict], name: str) -> list[str]:
    return [*dict.fromkeys(row[name] for row in rows)]


def _bytes(results: Results) -> Iterable[Sequence[str]]:
    """Kernels that bytes bound: quantizers, fused and not, and the permutation."""
    rows = results.rows(QUANTIZE)
    large = [row for row in rows if math.prod(sizes(row["shape"])) >= _LARGE]
    whats = {"from 64 Mi elements": large, "4096×7168": select(rows, shape="4096x7168")}
    whats["4097×7168"] = select(rows, shape="4097x7168")
    for what, some in whats.items():
        for case in COPIES:
            kernel = f"{link('transpose' if case == 'transpose' else 'quantize', QUANTIZE)}, {what}"
            yield from _compared(kernel, case, select(some, case=case), "torchao", "x torchao")
    rows = results.rows(FUSED)
    ragged = [row for row in rows if sizes(row["shape"])[1] % 128]
    whole_blocks = [row for row in rows if row not in ragged]
    for what, kind, some in (
        ("RMSNorm + quantize", "rms", rows),
        ("LayerNorm + quantize", "layer", rows),
        ("SwiGLU + quantize", "swiglu", rows),
        ("SwiGLU's gradients + quantize", "swiglu_backward", whole_blocks),
        ("the same, a width that is not a multiple of 128", "swiglu_backward", ragged),
    ):
        for copies in ("rowwise", "both"):
            some_copies = select(some, case=f"{kind}_{copies}")
            yield from _compared(link(what, FUSED), copies, some_copies, "two kernels", "x two steps")
    rows = results.rows(PERMUTE)
    few = [row for row in rows if sizes(row["shape"])[0] == 64]
    for what, some in {"": [row for row in rows if row not in few], ", 64 tokens": few}.items():
        for name in ("permute", "unpermute", "backward"):
            kernel = link("unpermute's backward" if name == "backward" else name, PERMUTE) + what
            yield from _compared(kernel, "bf16", select(some, operation=name), "eager PyTorch", "x eager")


def _products(results: Results) -> Iterable[Sequence[str]]:
    rows = results.rows(MATMUL, recipe="fp8")
    ours = select(rows, by="gluon")
    both, weights = select(ours, product=PRODUCTS), select(ours, product="grad_weight")
    special = (FEW_TOKENS, FEW_COLUMNS)
    plain = [row for row in both if row["shape"] not in special]
    yield f"{link('`output`, `grad_input`', MATMUL)}, Gluon", "power", *_peers(plain)
    for what, shape, bound in (("64 tokens", FEW_TOKENS, "bytes"), ("576 columns", FEW_COLUMNS, "few tiles")):
        for product in PRODUCTS:
            yield f"`{product}`, {what}", bound, *_peers(select(both, shape=shape, product=product))
    yield (
        "`output`, `grad_input`, DeepGEMM, from 2³⁸ multiplications",
        "power",
        *_deep_gemm(select(rows, product=PRODUCTS)),
    )
    filled = [row for row in weights if row["shape"] not in (*UNFILLED, *special, RAGGED)]
    yield f"{link('`grad_weight`', MATMUL)}, Gluon, tiles that fill the programs' rounds", "power", *_peers(filled)
    unfilled = ", ".join(times(shape.partition("x")[2]) for shape in UNFILLED)
    for what, bound, shapes in (
        (unfilled, "the last round of tiles", UNFILLED),
        ("4097 tokens", "power, and a copy that pads", RAGGED),
        ("64 tokens", "bytes", FEW_TOKENS),
        ("576 columns, where AUTO takes cuBLASLt", "few tiles", FEW_COLUMNS),
    ):
        yield f"`grad_weight`, {what}", bound, *_peers(select(weights, shape=shapes))


def _deep_gemm(rows: Iterable[dict]) -> Sequence[str]:
    """Cells of DeepGEMM, which AUTO takes for large GEMMs."""
    times_of: dict[tuple[str, str], dict] = {}
    for row in rows:
        if row["by"] == "gluon" and math.prod(row["mnk"]) >= _DEEP_GEMM_FROM and "x deep_gemm" in row:
            times_of[row["product"], row["shape"]] = row["peers us"] | {"floor": row["roofline us"]}
    return [
        MISSING if other == "deep_gemm" else span(us[other] / us["deep_gemm"] for us in times_of.values())
        for other in ("floor", *(key.removeprefix("x ") for key in PEERS.values()))
    ]


def _grouped(results: Results) -> Iterable[Sequence[str]]:
    rows = results.rows(GROUPED, recipe="fp8", by="gluon")
    both = select(rows, product=PRODUCTS)
    few = [row for row in both if sizes(row["shape"])[1] <= 32]
    many = [row for row in both if row not in few]
    whats = {
        f"grouped {link('`output`, `grad_input`', GROUPED)}, 8 and 32 experts": few,
        "the same, 64 and 128 experts, balanced": select(many, routing="balanced"),
        "the same, 64 and 128 experts, skewed": select(many, routing="skewed"),
    }
    for what, some in whats.items():
        yield what, "power, and each group's last tile", *_peers(some)
    plain, quantized = (select(rows, product=product) for product in ("grad_weight", "grad_weight_quantized"))
    yield f"grouped {link('`grad_weight`', GROUPED)}", "power", *_peers(plain)
    yield "the same, dy and x in bf16, quantized first", "bytes, then power", *_peers(quantized)
    shares = _quantizing(quantized, plain, results.load(GROUPED)["ceilings"]["copy"])
    yield "only quantizing, the difference of the two", "bytes", span(shares), *[MISSING] * len(PEERS)


def _quantizing(with_it: Iterable[dict], without: Iterable[dict], copy: float) -> list[float]:
    """Shares of the floor: 3 bytes an element of dy [tokens, N] and x [tokens, K] at `copy` TB/s over the time."""
    same = ("shape", "weight", "routing")
    plain = {tuple(row[key] for key in same): row["us"] for row in without}
    shares = []
    for row in with_it:
        tokens, _, hidden, dim = sizes(row["shape"])
        n_plus_k = 2 * hidden + dim if row["weight"] == "gate_up" else dim + hidden
        us = row["us"] - plain[tuple(row[key] for key in same)]
        shares.append(3 * tokens * n_plus_k / (copy * 1e6) / us)
    return shares


def _compared(kernel: str, writes: str, rows: Sequence[Mapping], peer: str, key: str) -> Iterable[Sequence[str]]:
    """A row of the kernels that bytes bound, if it was measured."""
    if rows:
        faster = span(column(rows, key))
        yield kernel, writes, span(column(rows, "of roofline")), peer if faster != MISSING else MISSING, faster


def _peers(rows: Iterable[Mapping]) -> Sequence[str]:
    found = list(rows)
    return [span(column(found, key)) for key in ("of roofline", *PEERS.values())]
