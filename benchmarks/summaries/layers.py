"""Layers, experts and models: × bf16, × others, and their peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from summaries.cells import (
    MISSING,
    Results,
    against,
    column,
    link,
    select,
    sizes,
    span,
    table,
    tenths,
    times,
    whole,
)  # fmt: skip

MOE, MOE_PEERS = "moe_nvidia_h200", "moe_peers_nvidia_h200"
LINEAR_H100, MODEL_H100, MOE_H100 = (f"{what}_nvidia_h100_80gb_hbm3" for what in ("linear", "model_4_layers", "moe"))
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
# Name -> recipe.
FORMATS = {"FP8": "fp8", "NVFP4": "nvfp4"}
PARAMETERS = {"FP8": "fp8", "FP8 Parameters": "fp8_primary"}
SQUARE = {"FP8": "fp8", "FP8, 128×128": "fp8_128x128"}
SAVED = SQUARE | {"FP8, saved weights": "fp8_saved", "FP8, 128×128, saved weights": "fp8_128x128_saved"}
# With `fuse` and `round_once`.
FUSED = SQUARE | {"FP8, `fuse`": "fp8_fused_once", "FP8, 128×128, `fuse`": "fp8_128x128_fused_once"}


class Row(NamedTuple):
    """What was measured, on which GPU, in which recipe; and ranges of its ratios: to bf16, to each of TORCHAO, of peak
    memory."""

    what: str
    gpu: str
    recipe: str
    fast: str
    peers: Mapping[str, str] = {}
    memory: str = MISSING

    def cells(self) -> list[str]:
        peers = (self.peers.get(peer, MISSING) for peer in TORCHAO)
        return [self.what, self.gpu, self.recipe, self.fast, *peers, self.memory]


def _table(*parts: Iterable[Row]) -> str:
    """A table of rows, without the columns that they do not have."""
    columns = ("what", "GPU", "recipe", "× bf16", *(f"× {peer}" for peer in TORCHAO), "peak memory, × bf16")
    rows = [row.cells() for part in parts for row in part]
    there = [place for place in range(len(columns)) if any(row[place] != MISSING for row in rows)]
    return table([columns[place] for place in there], ([row[place] for place in there] for row in rows), left=3)


def linear(results: Results) -> str:
    """Forward and backward of linear layers."""
    name = "linear_nvidia_h200"
    rows = _linear_rows(results, name, "H200", PARAMETERS)
    return _table(rows, _tracker(results), _linear_rows(results, LINEAR_H100, "H100", SQUARE))


def models(results: Results) -> str:
    """Steps of large models."""
    h100 = _model_rows(results, MODEL_H100, f"{link('four Llama-8B layers', MODEL_H100)}, DeepGEMM", "H100", FUSED)
    return _table(_models(results), _fsdp(results), _convergence(results), h100)


def experts(results: Results) -> str:
    """Forward and backward of experts' MLPs."""
    return _table(_experts(results), _experts_h100(results))


def small(results: Results) -> str:
    """Steps of small models."""
    return _table(_small(results))


def _linear_rows(results: Results, name: str, gpu: str, recipes: Mapping[str, str]) -> Iterable[Row]:
    for recipe, key in recipes.items():
        rows = results.rows(name, recipe=key)
        peers = {peer: span(column(rows, f"x {other}")) for peer, other in TORCHAO.items()}
        yield Row(link("three shapes", name), gpu, recipe, span(column(rows, "x bf16")), peers)


def _tracker(results: Results) -> Iterable[Row]:
    name = "linear_tracker_nvidia_h200"
    # Both matrices of each.
    models = {"16B": ("4096x10944x2048", "4096x2048x10944"), "671B": ("4096x18432x7168", "4096x7168x18432")}
    for model, shapes in models.items():
        for recipe, key in PARAMETERS.items():
            rows = results.rows(name, recipe=key, shape=shapes)
            what = f"{link(f'DeepSeek-V3 {model}', name)}, dense FFN, 4096 tokens"
            yield Row(what, "H200", recipe, span(column(rows, "x bf16")))


def _models(results: Results) -> Iterable[Row]:
    """Eager, then compiled; ranges are over activation checkpointing off and on."""
    four, fuse, every = (f"model_{what}_nvidia_h200" for what in ("4_layers", "4_layers_fuse", "32_layers"))
    fp8 = {"FP8": "fp8"}
    fused = fp8 | {"FP8, `fuse`": "fp8_fused", "FP8, `fuse`, `round_once`": "fp8_fused_once"}
    for name, what, recipes in (
        (four, link("four Llama-8B layers", four), fp8),
        # Layers as Hugging Face has them.
        (fuse, f"{link('the same', fuse)}, separate projections, DeepGEMM", fused),
        (every, link("all 32 layers", every), fp8),
    ):
        yield from _model_rows(results, name, what, "H200", recipes)


def _model_rows(results: Results, name: str, what: str, gpu: str, recipes: Mapping[str, str]) -> Iterable[Row]:
    for mode in ("eager", "compiled"):
        rows = results.rows(name, mode=mode)
        for recipe, key in recipes.items():
            peers = {peer: _over(rows, key, "tokens/s", other) for peer, other in TORCHAO.items()}
            fast, memory = (_over(rows, key, column) for column in ("tokens/s", "peak GiB"))
            yield Row(f"{what}, {mode}", gpu, recipe, fast, peers, memory)


def _experts(results: Results) -> Iterable[Row]:
    rows, compared = results.rows(MOE, shape=tuple(PUBLISHED)), results.rows(MOE_PEERS)
    counts = sorted({sizes(shape)[1] for shape in PUBLISHED})
    for recipe, key, peer in zip(PARAMETERS, OURS, (FP8_AND_PEERS, "fp8_primary"), strict=True):
        for count in counts:
            ours = [row for row in rows if sizes(row["shape"])[1] == count]
            theirs = [row for row in select(compared, recipe=peer) if sizes(row["shape"])[1] == count]
            peers = {"torchao blockwise": span(column(theirs, "x torchao"))}
            memory = _over(ours, key, "memory MiB", same=("shape", "routing"))
            yield Row(
                link(f"{count} experts", MOE),
                "H200",
                recipe,
                span(column(select(ours, recipe=key), "x bf16")),
                peers,
                memory,
            )


def _fsdp(results: Results) -> Iterable[Row]:
    for name, mode in (("fsdp_nvidia_h200", "eager"), ("fsdp_compiled_nvidia_h200", "compiled")):
        rows = results.rows(name)
        for recipe, key in FORMATS.items():
            fast, memory = (_over(rows, key, column, same=()) for column in ("tokens/s", "peak GiB"))
            # With an all-gather in FP8.
            peers = {"tensorwise": _over(rows, key, "tokens/s", "torchao_fp8_gather", same=())}
            yield Row(
                f"{link('the four layers, FSDP2 on two GPUs', name)}, {mode}", "H200", recipe, fast, peers, memory
            )


def _convergence(results: Results) -> Iterable[Row]:
    name = "convergence_1b_nvidia_h200"
    written = results.load(name)
    parameters, steps = written["config"]["parameters"] / 1e9, written["config"]["steps"]
    what = f"{link(f'{parameters:.2f} billion parameters', name)}, {steps} steps on text, compiled"
    for recipe, key in {"FP8": "fp8", "NVFP4": "nvfp4_full"}.items():
        fast, memory = (_over(written["table"], key, column, same=()) for column in ("tokens_per_second", "peak_bytes"))
        yield Row(what, "H200", recipe, fast, memory=memory)


def _experts_h100(results: Results) -> Iterable[Row]:
    for shape in dict.fromkeys(row["shape"] for row in results.rows(MOE_H100)):
        rows = results.rows(MOE_H100, shape=shape)
        for recipe, key in SAVED.items():
            own = select(rows, recipe=key)
            peers = {"torchao blockwise": span(column(own, "x torchao"))}
            memory = _over(rows, key, "memory MiB", same=("routing",))
            what = link(f"{sizes(shape)[1]} experts", MOE_H100)
            yield Row(what, "H100", recipe, span(column(own, "x bf16")), peers, memory)


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

    return table(columns, map(cells, names))


def _small(results: Results) -> Iterable[Row]:
    """Steps that Python launches, one operation after the other, and steps that one CUDA graph launches."""
    recipes = FUSED | SAVED
    for stem, what in {
        "1b_compiled": "1.07 B, compiled",
        "350m_compiled_graph": "350 M, compiled, in a CUDA graph",
        "125m": "125 M, eager",
        "125m_compiled": "125 M, compiled",
        "125m_compiled_graph": "125 M, compiled, in a CUDA graph",
        "moe_400m": "400 M, a mixture of experts, eager",
        "moe_400m_compiled": "400 M, a mixture of experts, compiled",
        "moe_400m_compiled_graph": "400 M, a mixture of experts, compiled, in a CUDA graph",
    }.items():
        name = f"throughput_{stem}_nvidia_h100_80gb_hbm3"
        rows = results.rows(name)
        for recipe, key in recipes.items():
            if select(rows, recipe=key):
                fast, memory = (_over(rows, key, column, same=()) for column in ("tokens/s", "peak GiB"))
                yield Row(link(what, name), "H100", recipe, fast, memory=memory)


def _over(
    rows: Iterable[dict], recipe: str, name: str, base: str = "bf16", same: Sequence[str] = ("checkpointing",)
) -> str:
    """The range of `name` over that of `base`, in rows that are the `same`."""
    there = list(rows)
    return span(against(select(there, recipe=recipe), select(there, recipe=base), name, same))


# --- experts' MLPs ----------------------------------------------------------------------------------------------------


def moe_speed(results: Results) -> str:
    """× bf16 by routing, the share of quantizing, and the host's time of a step."""
    columns = ("experts of, on one GPU", SHAPE, "tokens an expert", "balanced", "skewed", "empty")
    columns += ("weights in FP8: balanced", "skewed", "empty", "quantizing, % of kernels", "host ms", "bf16's")
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

    return table(columns, map(cells, _in_order(rows)), left=2)


def moe_memory(results: Results) -> str:
    """MiB of a step at its peak, over all routings."""
    columns = (SHAPE, "bf16", "bf16 and x", "FP8", "`master_weights=False`", "torchao")
    rows, torchao = results.rows(MOE), results.rows(MOE_PEERS, recipe="torchao")

    def cells(shape: str) -> list[str]:
        bf16, fp8, primary = (select(rows, shape=shape, recipe=recipe) for recipe in ("bf16", *OURS))
        owning_x = [row["memory"]["step_owning_x"] / 2**20 for row in bf16]
        peaks = [column(some, "memory MiB") for some in (bf16, fp8, primary, select(torchao, shape=shape))]
        return [times(shape), *(span(peak, whole) for peak in (peaks[0], owning_x, *peaks[1:]))]

    return table(columns, map(cells, _in_order(rows)))


def moe_peers(results: Results) -> str:
    """× torchao's: each at its best, both eager, and only the time of kernels."""
    columns = (SHAPE, "FP8", "weights in FP8", "eager against eager", "only kernels")
    rows = [row | {"kernels us": sum(kernel["us"] for kernel in row["kernels"])} for row in results.rows(MOE_PEERS)]

    def cells(shape: str) -> list[str]:
        recipes = (FP8_AND_PEERS, "fp8_primary", "torchao")
        fp8, primary, torchao = (select(rows, shape=shape, recipe=recipe) for recipe in recipes)
        eager, kernels = (against(torchao, fp8, name, ("routing",)) for name in ("eager us", "kernels us"))
        best = [span(column(some, "x torchao")) for some in (fp8, primary)]
        return [times(shape), *best, span(eager, tenths), span(kernels, tenths)]

    return table(columns, map(cells, _in_order(rows)))


def _in_order(rows: Iterable[dict]) -> Sequence[str]:
    """The shapes of `rows`: those of `MODELS` first, in its order."""
    there = dict.fromkeys(row["shape"] for row in rows)
    return [*(shape for shape in MODELS if shape in there), *(shape for shape in there if shape not in MODELS)]


HEADLINES = (MODEL_H100, "memory_nvidia_h200", "fsdp_compiled_nvidia_h200")


def headlines(results: Results) -> str:
    """The figures of the first page, a cell each."""
    layers, memory, gather = HEADLINES
    (default, fast) = (
        results.rows(layers, recipe=recipe, mode="compiled")[0] for recipe in ("fp8", "fp8_128x128_fused_once")
    )
    held = {name: row["held between forward and backward MiB"] for name, row in results.load(memory)["rows"].items()}
    gathered = {row["recipe"]: row["gathered MiB"] for row in results.rows(gather)}

    def of_bf16(amounts: dict[str, float], recipe: str) -> str:
        return f"{amounts[recipe] / amounts['bf16']:.2f} ×"

    cells = (
        f"**{default['x bf16']:.2f} × the speed** of bf16: four Llama-8B layers in FP8, compiled, with DeepGEMM, on an "
        f"H100; {fast['x bf16']:.2f} × with 128×128 blocks and `fuse` ({link('measured', layers)})",
        f"**{of_bf16(held, 'fp8')} the memory** saved for backward in bf16, in MLPs; {of_bf16(held, 'nvfp4')} in NVFP4 "
        f"({link('measured', memory)})",
        f"**{of_bf16(gathered, 'fp8')} the traffic** of bf16 when FSDP2 all-gathers weights; "
        f"{of_bf16(gathered, 'nvfp4')} in NVFP4 ({link('measured', gather)})",
    )
    return table(("", "", ""), [cells], left=3)
