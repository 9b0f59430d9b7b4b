"""Layers, experts and models: × bf16, × others, and their peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from summaries.cells import (
    MISSING,
    Results,
    against,
    column,
    each,
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
TORCHAO = {"torchao blockwise": "torchao", "tensorwise": "torchao_tensorwise", "rowwise": "torchao_rowwise"}
FP8, FORMATS = {"": "fp8"}, {"FP8": "fp8", "NVFP4": "nvfp4"}
Row = tuple[str, str, str, str]


def layers(results: Results) -> str:
    columns = ("what", "× bf16", "× others in the same run", "peak memory, × bf16")
    parts = (_linear, _tracker, _models, _experts, _fsdp, _convergence, _small)
    return table(columns, (row for part in parts for row in part(results)), left=4)


def _linear(results: Results) -> Iterable[Row]:
    name = "linear_nvidia_h200"
    whats = (f"{link('a linear layer', name)}, three shapes, forward and backward", "with the Parameter in FP8")
    for what, recipe in zip(whats, OURS, strict=True):
        rows = results.rows(name, recipe=recipe)
        others = {peer: span(column(rows, f"x {key}")) for peer, key in TORCHAO.items()}
        yield what, span(column(rows, "x bf16")), each(others), MISSING


def _tracker(results: Results) -> Iterable[Row]:
    name = "linear_tracker_nvidia_h200"
    # Both matrices of each.
    models = {"16B": ("4096x10944x2048", "4096x2048x10944"), "671B": ("4096x18432x7168", "4096x7168x18432")}
    whats = (f"{link('linear layers', name)} of DeepSeek-V3's dense FFN, 4096 tokens", "with Parameters in FP8")
    for what, recipe in zip(whats, OURS, strict=True):
        found = {model: results.rows(name, recipe=recipe, shape=shapes) for model, shapes in models.items()}
        fast, reached = (
            each({model: span(column(rows, key)) for model, rows in found.items()})
            for key in ("x bf16", "reached (measured)")
        )
        yield what, fast, f"of the speed-up that the roofline allows: {reached}", MISSING


def _models(results: Results) -> Iterable[Row]:
    """Eager, then compiled; ranges are over activation checkpointing off and on."""
    four, fuse, every = (f"model_{what}_nvidia_h200" for what in ("4_layers", "4_layers_fuse", "32_layers"))
    fused = {"not fused": "fp8", "fused": "fp8_fused", "`round_once`": "fp8_fused_once"}
    # Layers as Hugging Face has them.
    apart = f"the same with {link('`fuse`', fuse)}, q, k, v, gate and up apart, DeepGEMM installed"
    for name, what, recipes in (
        (four, f"{link('four Llama-8B layers', four)}, 8192 tokens, AdamW", FP8),
        (fuse, apart, fused),
        (every, link("all 32 layers", every), FP8),
    ):
        for mode, first in (("eager", f"{what}, eager"), ("compiled", "the same, compiled")):
            rows = results.rows(name, mode=mode)
            same = ("checkpointing",)
            others = {peer: _over(rows, FP8, "tokens/s", recipe, same) for peer, recipe in TORCHAO.items()}
            fast, memory = (_over(rows, recipes, key, same=same) for key in ("tokens/s", "peak GiB"))
            yield first, fast, each(others), memory


def _experts(results: Results) -> Iterable[Row]:
    rows, compared = results.rows(MOE, shape=tuple(PUBLISHED)), results.rows(MOE_PEERS)
    whats = (f"{link('an expert MLP', MOE)}, forward and backward, by experts", "with Parameters in FP8")
    for what, recipe, peer in zip(whats, OURS, (FP8_AND_PEERS, "fp8_primary"), strict=True):
        by_experts: dict[int, list[dict]] = {}
        for row in select(rows, recipe=recipe):
            by_experts.setdefault(sizes(row["shape"])[1], []).append(row)
        fast = {f"{count}:": span(column(some, "x bf16")) for count, some in sorted(by_experts.items())}
        others = {link("torchao on DeepGEMM", MOE_PEERS): span(column(select(compared, recipe=peer), "x torchao"))}
        memory = _over(rows, {"": recipe}, "memory MiB", same=("shape", "routing"))
        yield what, each(fast), each(others), memory


def _fsdp(results: Results) -> Iterable[Row]:
    whats = {"fsdp_nvidia_h200": ("FSDP2 on two", "eager"), "fsdp_compiled_nvidia_h200": ("the same", "compiled")}
    for name, (what, mode) in whats.items():
        rows = results.rows(name)
        fast, memory, gathered = (_over(rows, FORMATS, key) for key in ("tokens/s", "peak GiB", "gathered MiB"))
        gather = _over(rows, FP8, "tokens/s", "torchao_fp8_gather")
        others = f"torchao's FP8 gather {gather}; bytes gathered, × bf16: {gathered}"
        yield f"{link(what, name)}, {mode}", fast, others, memory


def _convergence(results: Results) -> Iterable[Row]:
    name = "convergence_1b_nvidia_h200"
    written = results.load(name)
    recipes = FORMATS | {"NVFP4": "nvfp4_full"}
    fast, memory = (_over(written["table"], recipes, key) for key in ("tokens_per_second", "peak_bytes"))
    parameters, steps = written["config"]["parameters"] / 1e9, written["config"]["steps"]
    what = link(f"a decoder of {parameters:.2f} billion parameters", name)
    yield f"{what}, {steps} steps on text, compiled", fast, MISSING, memory


def _small(results: Results) -> Iterable[Row]:
    """Steps that Python launches, one operation after the other."""
    whats = {
        "throughput_1b_compiled": "on an H100, {}, compiled: a decoder of 1.07 billion parameters",
        "throughput_125m_compiled": "{} of 125 million parameters",
        "throughput_moe_400m_compiled": "{} of 400 million parameters, a mixture of experts",
        "throughput_125m": "{} of 125 million parameters, eager",
        "throughput_moe_400m": "{}, a mixture of experts, eager",
    }
    for stem, what in whats.items():
        name = f"{stem}_nvidia_h100_80gb_hbm3"
        rows = results.rows(name)
        fast, memory = (_over(rows, FP8, key) for key in ("tokens/s", "peak GiB"))
        ours, bf16 = (select(rows, recipe=recipe)[0] for recipe in ("fp8", "bf16"))
        step, host = (f"{tenths(ours[key])} (bf16 {tenths(bf16[key])})" for key in ("ms a step", "host ms"))
        first = "steps of `train_llm.py`" if stem == "throughput_1b_compiled" else "the same"
        yield what.format(link(first, name)), fast, f"ms a step: {step}, of the host {host}", memory


def _over(
    rows: Iterable[dict], recipes: Mapping[str, str], name: str, base: str = "bf16", same: Sequence[str] = ()
) -> str:
    """`name` of each recipe over that of `base`, in rows that are the `same`."""
    there = list(rows)
    others = select(there, recipe=base)
    return each(
        {what: span(against(select(there, recipe=recipe), others, name, same)) for what, recipe in recipes.items()}
    )


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
    columns = (SHAPE, "FP8", "weights in FP8", "eager against eager", "kernels alone")
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
