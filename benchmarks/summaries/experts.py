"""Experts' MLPs on an H200: speed, memory, and torchao's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from summaries.cells import MISSING, Results, against, column, select, sizes, span, table, tenths, times, whole

RUN, PEERS = "moe_nvidia_h200", "moe_peers_nvidia_h200"
ROUTINGS = ("balanced", "skewed", "empty")
# In the order of the tables.
PUBLISHED = {
    "32768x8x2048x7168": "DeepSeek-V3 671B, a 32nd",
    "16384x8x14336x4096": "Mixtral 8×7B",
    "16384x8x1408x2048": "DeepSeek-V3 16B, an eighth",
    "32768x32x2048x7168": "DeepSeek-V3 671B, an eighth",
    "32768x64x1408x2048": "DeepSeek-V3 16B",
    "32768x128x768x2048": "Qwen3-MoE 30B",
}
MODELS = PUBLISHED | {
    "32768x16x768x768": "`train_llm --model moe-400m`",
    "65536x32x1024x1024": "`train_llm --model moe-2b`",
}
# What "fp8" does, by its name in the run with torchao's: there "fp8" kept quantized copies from forward to backward.
FP8_BESIDE_PEERS = "fp8_on_demand"
SHAPE = "tokens × experts × hidden × dim"
_MIB = 2**20


def speed(results: Results) -> str:
    """× bf16 by routing, the share of quantizing, and the host's time of a step."""
    columns = ("experts of, on one GPU", SHAPE, "tokens an expert", *ROUTINGS)
    columns += ("weights in FP8: balanced", *ROUTINGS[1:], "quantizing, % of kernels", "host ms", "bf16's")
    rows = results.rows(RUN)

    def cells(shape: str) -> list[str]:
        tokens, experts, *_ = sizes(shape)
        of_shape = select(rows, shape=shape)
        ours = ("fp8", "fp8_primary")
        fast = [
            span(column(select(of_shape, recipe=recipe, routing=routing), "x bf16"))
            for recipe in ours
            for routing in ROUTINGS
        ]
        quantizing = span(column(select(of_shape, recipe="fp8"), "quantize %"), whole)
        host = [_host_ms(select(of_shape, recipe=recipes)) for recipes in (ours, "bf16")]
        return [MODELS.get(shape, MISSING), times(shape), whole(tokens // experts), *fast, quantizing, *host]

    return table(columns, map(cells, in_order(rows)), left=2)


def memory(results: Results) -> str:
    """MiB of a step at its peak, over all routings."""
    columns = (SHAPE, "bf16", "bf16 and x", "FP8", "`master_weights=False`", "torchao")
    rows = results.rows(RUN)
    peers = results.rows(PEERS, recipe="torchao") if results.has(PEERS) else []

    def cells(shape: str) -> list[str]:
        bf16 = select(rows, shape=shape, recipe="bf16")
        owning_x = [row["memory"]["step_owning_x"] / _MIB for row in bf16]
        others = [select(rows, shape=shape, recipe=recipe) for recipe in ("fp8", "fp8_primary")]
        peaks = [column(some, "memory MiB") for some in (*others, select(peers, shape=shape))]
        return [times(shape), *(span(peak, whole) for peak in (column(bf16, "memory MiB"), owning_x, *peaks))]

    return table(columns, map(cells, in_order(rows)))


def peers(results: Results) -> str:
    """× torchao's: each at its best, both eager, and the time of kernels alone."""
    columns = (SHAPE, "FP8", "weights in FP8", "eager against eager", "kernels alone")
    rows = [row | {"kernels us": sum(kernel["us"] for kernel in row["kernels"])} for row in results.rows(PEERS)]

    def cells(shape: str) -> list[str]:
        fp8, primary, torchao = (
            select(rows, shape=shape, recipe=recipe) for recipe in (FP8_BESIDE_PEERS, "fp8_primary", "torchao")
        )
        eager, kernels = (against(torchao, fp8, name, ("routing",)) for name in ("eager us", "kernels us"))
        best = [span(column(some, "x torchao")) for some in (fp8, primary)]
        return [times(shape), *best, span(eager, tenths), span(kernels, tenths)]

    return table(columns, map(cells, in_order(rows)))


def in_order(rows: Iterable[dict]) -> Sequence[str]:
    """The shapes of `rows`: those of `MODELS` first, in its order."""
    there = dict.fromkeys(row["shape"] for row in rows)
    return [*(shape for shape in MODELS if shape in there), *(shape for shape in there if shape not in MODELS)]


def _host_ms(rows: Iterable[dict]) -> str:
    return span((us / 1e3 for us in column(rows, "host us")), tenths)
