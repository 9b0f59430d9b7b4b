"""Joules on an H100: of products, and of a step of four layers."""

from __future__ import annotations

from summaries.cells import MISSING, Results, select, table, tenths, times

MATMUL, MODEL = "matmul_nvidia_h100_80gb_hbm3", "model_4_layers_nvidia_h100_80gb_hbm3"
SHAPE = "4096x18432x7168"
RECIPES = {
    "bf16": "bf16",
    "fp8": "FP8",
    "torchao_tensorwise": "torchao tensorwise",
    "torchao_rowwise": "torchao rowwise",
}


def products(results: Results) -> str:
    """Joules of a product, by who computes it."""
    rows = results.rows(MATMUL, shape=SHAPE)

    def cells(product: str) -> list[str]:
        ours = {row["by"]: row for row in select(rows, product=product)}
        peers = ours["gluon"]["peers J"]
        found = [peers.get("bf16"), *(ours.get(by, {}).get("J") for by in ("gluon", "cublas", "deep_gemm"))]
        found.append(peers.get("tensorwise"))
        return [f"`{product}`", *(MISSING if spent is None else f"{spent:.2f}" for spent in found)]

    columns = (f"product, {times(SHAPE)}", "bf16", "Gluon", "cuBLAS", "DeepGEMM", "tensorwise")
    return table(columns, map(cells, ("output", "grad_input", "grad_weight")))


def step(results: Results) -> str:
    """Joules and milliseconds of a compiled step."""
    rows = results.rows(MODEL, mode="compiled", checkpointing="off", recipe=tuple(RECIPES))
    return table(
        ("recipe", "J a step", "ms a step"),
        ([RECIPES[row["recipe"]], tenths(row["J"]), tenths(row["ms a step"])] for row in rows),
    )
