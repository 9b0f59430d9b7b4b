"""torchtitan's own trainer on H200s: speed, memory and loss of whole models of few layers."""

from __future__ import annotations

from collections.abc import Iterable

from summaries.cells import Results, link, ratio, select, table, tenths, whole

RUNS = {
    "torchtitan_llama_6_layers_nvidia_h200": "six layers of Llama 3 8B",
    "torchtitan_llama_8_layers_2_gpus_nvidia_h200": "eight, FSDP2 on two GPUs",
    "torchtitan_deepseek_4_layers_nvidia_h200": "four layers of DeepSeek-V3 16B",
}
RECIPES = {"bf16": "bf16", "fp8": "FP8", "fp8_fused": "FP8, fused", "torchao_rowwise": "torchao rowwise"}
COLUMNS = ("model", "recipe", "tokens/s a GPU", "× bf16", "MFU %", "peak GiB", "loss")


def trainer(results: Results) -> str:
    return table(COLUMNS, (row for name in RUNS for row in _rows(results, name)), left=2)


def _rows(results: Results, name: str) -> Iterable[list[str]]:
    rows = results.rows(name)
    (bf16,) = select(rows, recipe="bf16")
    for row in rows:
        figures = (tenths(row["MFU %"]), tenths(row["peak GiB"]), f"{row['last loss']:.3f}")
        faster = ratio(row["tokens/s"] / bf16["tokens/s"])
        yield [link(RUNS[name], name), RECIPES[row["recipe"]], whole(row["tokens/s"]), faster, *figures]
