"""Layers and models on an H200: × bf16, × others, and their peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from summaries import experts
from summaries.cells import MISSING, Results, against, column, each, link, select, sizes, span, table, tenths

TORCHAO = {"torchao blockwise": "torchao", "tensorwise": "torchao_tensorwise", "rowwise": "torchao_rowwise"}
FUSED = {"not fused": "fp8", "fused": "fp8_fused", "`round_once`": "fp8_fused_once"}
FORMATS = {"FP8": "fp8", "NVFP4": "nvfp4"}
Row = tuple[str, str, str, str]


def layers(results: Results) -> str:
    columns = ("what", "× bf16", "× others in the same run", "peak memory, × bf16")
    parts: tuple[Callable[[Results], Iterable[Row]], ...] = (
        _linear, _tracker, _models, _experts, _fsdp, _convergence, _small
    )  # fmt: skip
    return table(columns, (row for part in parts for row in part(results)), left=4)


def _linear(results: Results) -> Iterable[Row]:
    name = "linear_nvidia_h200"
    whats = (f"{link('a linear layer', name)}, three shapes, forward and backward", "with the Parameter in FP8")
    for what, recipe in zip(whats, ("fp8", "fp8_primary"), strict=True):
        rows = results.rows(name, recipe=recipe)
        others = {peer: span(column(rows, f"x {key}")) for peer, key in TORCHAO.items()}
        yield what, span(column(rows, "x bf16")), each(others), MISSING


def _tracker(results: Results) -> Iterable[Row]:
    name = "linear_tracker_nvidia_h200"
    # Both matrices of each.
    models = {"16B": ("4096x10944x2048", "4096x2048x10944"), "671B": ("4096x18432x7168", "4096x7168x18432")}
    whats = (f"{link('linear layers', name)} of DeepSeek-V3's dense FFN, 4096 tokens", "with Parameters in FP8")
    for what, recipe in zip(whats, ("fp8", "fp8_primary"), strict=True):
        found = {model: results.rows(name, recipe=recipe, shape=shapes) for model, shapes in models.items()}
        fast, reached = (
            each({model: span(column(rows, key)) for model, rows in found.items()})
            for key in ("x bf16", "reached (measured)")
        )
        yield what, fast, f"of the speed-up that the roofline allows: {reached}", MISSING


def _models(results: Results) -> Iterable[Row]:
    four, fuse, every = (f"model_{what}_nvidia_h200" for what in ("4_layers", "4_layers_fuse", "32_layers"))
    yield from _modes(results, four, f"{link('four Llama-8B layers', four)}, 8192 tokens, AdamW", {"": "fp8"})
    # Layers as Hugging Face has them.
    what = f"the same with {link('`fuse`', fuse)}, q, k, v, gate and up apart, DeepGEMM installed"
    yield from _modes(results, fuse, what, FUSED)
    yield from _modes(results, every, link("all 32 layers", every), {"": "fp8"})


def _modes(results: Results, name: str, what: str, recipes: Mapping[str, str]) -> Iterable[Row]:
    """Eager, then compiled; ranges are over activation checkpointing off and on."""
    for mode, first in (("eager", f"{what}, eager"), ("compiled", "the same, compiled")):
        rows = results.rows(name, mode=mode)
        same = ("checkpointing",)
        ours = select(rows, recipe="fp8")
        others = {peer: span(against(ours, select(rows, recipe=r), "tokens/s", same)) for peer, r in TORCHAO.items()}
        fast, memory = (_over(rows, recipes, key, same=same) for key in ("tokens/s", "peak GiB"))
        yield first, fast, each(others), memory


def _experts(results: Results) -> Iterable[Row]:
    rows = results.rows(experts.RUN, shape=tuple(experts.PUBLISHED))
    beside = results.rows(experts.PEERS) if results.has(experts.PEERS) else []
    whats = (f"{link('an expert MLP', experts.RUN)}, forward and backward, by experts", "with Parameters in FP8")
    peers = (experts.FP8_BESIDE_PEERS, "fp8_primary")
    for what, recipe, peer in zip(whats, ("fp8", "fp8_primary"), peers, strict=True):
        by_experts: dict[int, list[dict]] = {}
        for row in select(rows, recipe=recipe):
            by_experts.setdefault(sizes(row["shape"])[1], []).append(row)
        fast = {f"{count}:": span(column(some, "x bf16")) for count, some in sorted(by_experts.items())}
        others = {link("torchao on DeepGEMM", experts.PEERS): span(column(select(beside, recipe=peer), "x torchao"))}
        memory = _over(rows, {"": recipe}, "memory MiB", same=("shape", "routing"))
        yield what, each(fast), each(others), memory


def _fsdp(results: Results) -> Iterable[Row]:
    whats = {"fsdp_nvidia_h200": ("FSDP2 on two", "eager"), "fsdp_compiled_nvidia_h200": ("the same", "compiled")}
    for name, (what, mode) in whats.items():
        rows = results.rows(name)
        fast, memory, gathered = (_over(rows, FORMATS, key) for key in ("tokens/s", "peak GiB", "gathered MiB"))
        gather = _over(rows, {"": "fp8"}, "tokens/s", "torchao_fp8_gather")
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
        fast, memory = (_over(rows, {"": "fp8"}, key) for key in ("tokens/s", "peak GiB"))
        step, host = (_beside_bf16(rows, key) for key in ("ms a step", "host ms"))
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


def _beside_bf16(rows: Iterable[dict], name: str) -> str:
    ours, bf16 = (tenths(row[name]) for recipe in ("fp8", "bf16") for row in select(rows, recipe=recipe))
    return f"{ours} (bf16 {bf16})"
