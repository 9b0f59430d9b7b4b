"""Layers, experts and models: × bf16, × others, and their peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from common.report import MISSING, markdown

from summaries.cells import Results, against, column, link, select, sizes, span, tenths, times, whole

MOE, MOE_PEERS = "moe_nvidia_h200", "moe_peers_nvidia_h200"
TRACKER, STUDY_1B = "linear_tracker_nvidia_h200", "study_1b"
LINEAR_H100, MODEL_H100, MOE_H100 = (f"{what}_nvidia_h100_80gb_hbm3" for what in ("linear", "model_4_layers", "moe"))
MOE_SQUARE = "moe_128x128_nvidia_h200"
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
SHAPE = "tokens × experts × hidden × dim"
OURS = ("fp8", "fp8_primary")
# What "fp8" does, by its name in the run with torchao's: there "fp8" kept quantized copies from forward to backward.
FP8_AND_PEERS = "fp8_on_demand"
# Column -> recipe.
TORCHAO = {"torchao blockwise": "torchao", "tensorwise": "torchao_tensorwise", "rowwise": "torchao_rowwise"}
PEERS = {"bf16": "bf16", "compiled bf16": "bf16_compiled"} | TORCHAO
# Name -> recipe.
FP8 = {"FP8, 1×128": "fp8"}
PARAMETERS = FP8 | {"FP8 Parameters": "fp8_primary"}
SQUARE = FP8 | {"FP8": "fp8_128x128"}
SAVED = SQUARE | {"FP8, 1×128, saved weights": "fp8_saved", "FP8, saved weights": "fp8_128x128_saved"}
# With `fuse` and `round_once`.
FUSED = SQUARE | {"FP8, 1×128, `fuse`": "fp8_fused_once", "FP8, `fuse`": "fp8_128x128_fused_once"}
# Benchmark -> columns of speed and memory of its rows, and columns in which rows that are compared agree.
COMPARED = {
    "linear": ("TFLOP/s", "", ("shape",)),
    "moe": ("TFLOP/s", "memory MiB", ("shape", "routing")),
    "model": ("tokens/s", "peak GiB", ("checkpointing",)),
    "fsdp": ("tokens/s", "peak GiB", ()),
    "throughput": ("tokens/s", "peak GiB", ()),
    "study": ("tokens_per_second", "peak_bytes", ("seed", "draw")),
}


class Part(NamedTuple):
    """Rows of a table from one result, a row for each recipe that it has.

    text: the label, a link to the result. end: the rest of the label. recipes: name -> recipe in the result.
    where: values of the rows that are used.
    """

    name: str
    text: str
    recipes: Mapping[str, str]
    end: str = ""
    where: Mapping[str, object] = {}

    def cells(self, results: Results) -> Iterable[list[str]]:
        """The labels, and ranges of ratios: to each of PEERS, of peak memory to that of bf16."""
        benchmark = self.name.split("_")[0]
        speed, memory, same = COMPARED[benchmark]
        gpu = "H200" if self.name.endswith("h200") else "H100"
        rows = results.rows(self.name, **self.where)
        # With FSDP2, the recipe with an all-gather in FP8.
        peers = PEERS | {"tensorwise": "torchao_fp8_gather"} if benchmark == "fsdp" else PEERS
        for name, recipe in self.recipes.items():
            if not (ours := select(rows, recipe=recipe)):
                continue
            ratios = [
                column(ours, f"x {peer}") or against(ours, select(rows, recipe=peer), speed, same)
                for peer in peers.values()
            ]
            ratios.append(against(ours, select(rows, recipe="bf16"), memory, same))
            yield [link(self.text, self.name) + self.end, gpu, name, *map(span, ratios)]


def _table(rows: Iterable[Sequence[str]]) -> str:
    """A table of rows, without the columns in which none has a figure."""
    columns = ("benchmark", "GPU", "recipe", *(f"× {peer}" for peer in PEERS), "peak memory, × bf16")
    shown = [cells for cells in zip(columns, *rows, strict=True) if set(cells[1:]) != {MISSING}]
    head, *body = zip(*shown)
    return markdown(head, body, left=3)


def _parts(results: Results, *parts: Part) -> str:
    return _table(row for part in parts for row in part.cells(results))


def linear(results: Results) -> str:
    # Both matrices of each.
    dense = {"16B": ("4096x10944x2048", "4096x2048x10944"), "671B": ("4096x18432x7168", "4096x7168x18432")}
    return _parts(
        results,
        Part("linear_nvidia_h200", "three shapes", PARAMETERS),
        *(
            Part(TRACKER, f"DeepSeek-V3 {model}", SQUARE | PARAMETERS, ", dense FFN, 4096 tokens", {"shape": shapes})
            for model, shapes in dense.items()
        ),
        Part(LINEAR_H100, "three shapes", SQUARE),
    )


def models(results: Results) -> str:
    """Steps of large models; ranges are over activation checkpointing off and on."""

    def steps(name: str, *part, end: str = "") -> list[Part]:
        return [Part(name, *part, f"{end}, {mode}", {"mode": mode}) for mode in ("eager", "compiled")]

    fsdp = "the four layers, FSDP2 on two GPUs"
    return _parts(
        results,
        *steps(MODEL_H100, "four Llama-8B layers", FUSED, end=", DeepGEMM"),
        Part("model_32_layers_nvidia_h100_80gb_hbm3", "all 32 layers", FUSED, ", DeepGEMM, compiled"),
        Part("fsdp_compiled_nvidia_h100_80gb_hbm3", fsdp, SQUARE, ", DeepGEMM, compiled"),
        *steps("model_4_layers_nvidia_h200", "four Llama-8B layers", FP8),
        *steps("model_32_layers_nvidia_h200", "all 32 layers", FP8),
        *(
            Part(name, fsdp, FP8 | {"NVFP4": "nvfp4"}, f", {mode}")
            for name, mode in (("fsdp_nvidia_h200", "eager"), ("fsdp_compiled_nvidia_h200", "compiled"))
        ),
        Part("fsdp_compiled_128x128_nvidia_h200", fsdp, FUSED, ", DeepGEMM, compiled"),
        Part(STUDY_1B, "1.07 billion parameters", SQUARE | {"NVFP4": "nvfp4_full"}, ", compiled, in a CUDA graph"),
    )


def experts(results: Results) -> str:
    rows = []
    for (recipe, key), peer in zip(PARAMETERS.items(), (FP8_AND_PEERS, "fp8_primary"), strict=True):
        for count in sorted({_experts(shape) for shape in PUBLISHED}):
            where = {"shape": tuple(shape for shape in PUBLISHED if _experts(shape) == count)}
            (ours,), (compared,) = (
                Part(name, f"{count} experts", {recipe: key}, "", where).cells(results)
                for name, key in ((MOE, key), (MOE_PEERS, peer))
            )
            # torchao ran in the other result.
            rows.append([cell if cell != MISSING else other for cell, other in zip(ours, compared)])
    for name in (MOE_SQUARE, MOE_H100):
        for shape in dict.fromkeys(row["shape"] for row in results.rows(name)):
            _, count, hidden, dim = sizes(shape)
            rows += Part(name, f"{count} experts, {hidden}×{dim}", SAVED, "", {"shape": shape}).cells(results)
    return _table(rows)


def _experts(shape: str) -> int:
    return sizes(shape)[1]


def small(results: Results) -> str:
    """Steps that Python launches, one operation after the other, and steps that one CUDA graph launches."""
    h100, h200 = "nvidia_h100_80gb_hbm3", "nvidia_h200"
    runs = {
        f"1b_compiled_{h100}": "1.07 B, compiled",
        f"350m_compiled_graph_{h100}": "350 M, compiled, in a CUDA graph",
        f"125m_{h100}": "125 M, eager",
        f"125m_compiled_{h200}": "125 M, compiled",
        f"125m_compiled_graph_{h100}": "125 M, compiled, in a CUDA graph",
        f"moe_400m_{h100}": "400 M, a mixture of experts, eager",
        f"moe_400m_compiled_{h100}": "400 M, a mixture of experts, compiled",
        f"moe_400m_compiled_graph_{h100}": "400 M, a mixture of experts, compiled, in a CUDA graph",
    }
    return _parts(
        results,
        *(Part(f"throughput_{run}", text, FUSED | SAVED) for run, text in runs.items()),
    )


def energy(results: Results) -> str:
    """A compiled step of four layers: its share of the peak rate, and energy of the board."""
    columns = ("recipe", "tokens/s", "× bf16", "MFU, %", "J for 1,000 tokens")
    rows = {row["recipe"]: row for row in results.rows(MODEL_H100, mode="compiled")}
    names = {"bf16": "bf16", **{key: name for name, key in FUSED.items()}}
    names |= {key: f"torchao {name.removeprefix('torchao ')}" for name, key in TORCHAO.items()}

    def cells(recipe: str) -> list[str]:
        row = rows[recipe]
        fast = MISSING if row["x bf16"] is None else f"{row['x bf16']:.2f}"
        return [names[recipe], f"{row['tokens/s']:,.0f}", fast, f"{row['MFU %']:.1f}", f"{row['J']:.2f}"]

    return markdown(columns, map(cells, names))


# --- experts' MLPs ----------------------------------------------------------------------------------------------------


def moe_speed(results: Results) -> str:
    """× bf16 by routing, the share of quantizing, and the host's time of a step."""
    columns = ("model, share of experts", SHAPE, "tokens per expert", "balanced", "skewed", "empty")
    columns += ("FP8 Parameters: balanced", "skewed", "empty", "quantization, % of kernels", "host ms", "bf16 host ms")
    rows = results.rows(MOE)

    def host_ms(some: Iterable[dict]) -> str:
        return span((us / 1e3 for us in column(some, "host us")), tenths)

    def cells(shape: str) -> list[str]:
        tokens, experts, *_ = sizes(shape)
        of_shape = select(rows, shape=shape)
        fast = [
            span(column(select(of_shape, recipe=recipe, routing=routing), "x bf16"))
            for recipe in OURS
            for routing in ("balanced", "skewed", "empty")
        ]
        quantizing = span(column(select(of_shape, recipe="fp8"), "quantize %"), whole)
        host = [host_ms(select(of_shape, recipe=recipes)) for recipes in (OURS, "bf16")]
        return [MODELS.get(shape, MISSING), times(shape), whole(tokens // experts), *fast, quantizing, *host]

    return markdown(columns, map(cells, _in_order(rows)), left=2)


def moe_memory(results: Results) -> str:
    """MiB of a step at its peak, over all routings."""
    columns = (SHAPE, "bf16", "bf16 and x", "FP8", "`master_weights=False`", "torchao")
    rows, torchao = results.rows(MOE), results.rows(MOE_PEERS, recipe="torchao")

    def cells(shape: str) -> list[str]:
        bf16, fp8, primary = (select(rows, shape=shape, recipe=recipe) for recipe in ("bf16", *OURS))
        owning_x = [row["memory"]["step_owning_x"] / 2**20 for row in bf16]
        peaks = [column(some, "memory MiB") for some in (bf16, fp8, primary, select(torchao, shape=shape))]
        return [times(shape), *(span(peak, whole) for peak in (peaks[0], owning_x, *peaks[1:]))]

    return markdown(columns, map(cells, _in_order(rows)))


def moe_peers(results: Results) -> str:
    """× torchao's: each at its best, both eager, and only the time of kernels."""
    columns = (SHAPE, "FP8", "FP8 Parameters", "eager vs. eager", "kernels only")
    rows = [row | {"kernels us": sum(kernel["us"] for kernel in row["kernels"])} for row in results.rows(MOE_PEERS)]

    def cells(shape: str) -> list[str]:
        recipes = (FP8_AND_PEERS, "fp8_primary", "torchao")
        fp8, primary, torchao = (select(rows, shape=shape, recipe=recipe) for recipe in recipes)
        eager, kernels = (against(torchao, fp8, name, ("routing",)) for name in ("eager us", "kernels us"))
        best = [span(column(some, "x torchao")) for some in (fp8, primary)]
        return [times(shape), *best, span(eager, tenths), span(kernels, tenths)]

    return markdown(columns, map(cells, _in_order(rows)))


def _in_order(rows: Iterable[dict]) -> Sequence[str]:
    """The shapes of `rows`: those of `MODELS` first, in its order."""
    there = dict.fromkeys(row["shape"] for row in rows)
    return [*(shape for shape in MODELS if shape in there), *(shape for shape in there if shape not in MODELS)]


HEADLINES = (MODEL_H100, "memory_nvidia_h200", "fsdp_compiled_nvidia_h200")


def headlines(results: Results) -> str:
    """The figures of the first page, a cell each."""
    layers, memory, gather = HEADLINES
    (default, fast) = (
        results.rows(layers, recipe=recipe, mode="compiled")[0] for recipe in ("fp8_128x128", "fp8_128x128_fused_once")
    )
    held = {name: row["held between forward and backward MiB"] for name, row in results.load(memory)["rows"].items()}
    gathered = {row["recipe"]: row["gathered MiB"] for row in results.rows(gather)}

    def of_bf16(amounts: dict[str, float], recipe: str) -> str:
        return f"{amounts[recipe] / amounts['bf16']:.2f} ×"

    cells = (
        f"**{default['x bf16']:.2f} × the speed** of bf16: four Llama-8B layers in FP8, compiled, with DeepGEMM, on an "
        f"H100; {fast['x bf16']:.2f} × with `fuse` ({link('measured', layers)})",
        f"**{of_bf16(held, 'fp8')} the memory** saved for backward in bf16, in MLPs; {of_bf16(held, 'nvfp4')} in NVFP4 "
        f"({link('measured', memory)})",
        f"**{of_bf16(gathered, 'fp8')} the traffic** of bf16 when FSDP2 all-gathers weights; "
        f"{of_bf16(gathered, 'nvfp4')} in NVFP4 ({link('measured', gather)})",
    )
    return markdown(("", "", ""), [cells], left=3)
