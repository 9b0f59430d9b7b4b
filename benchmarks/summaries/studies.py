"""Tables of studies of several sizes: the gap to bf16 of each, and how it changes with size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

from common.report import MISSING, markdown
from llm_training.config import RunConfig
from llm_training.study import BASE, METRICS, Gap, gap, growth

from summaries.cells import Results, column, ratio
from summaries.layers import COMPARED

# Of one family of models, trained about equally long; longer or shorter ones; of a mixture of experts.
STUDIES = ("study_6m", "study_12m", "study_25m", "study_50m", "study_85m")
OTHERS = ("study_6m_long", "study_85m_long", "study_350m", "study_1b")
EXPERTS = "study_moe_400m"
# Study -> the same with more tokens.
LONGER = {"study_6m": "study_6m_long", "study_85m": "study_85m_long"}
# Study -> where the speed of its model in a CUDA graph is measured: its own runs if they had a GPU each.
SPEEDS = {
    "study_85m": "throughput_125m_compiled_graph_nvidia_h100_80gb_hbm3",
    "study_350m": "throughput_350m_compiled_graph_nvidia_h100_80gb_hbm3",
    EXPERTS: "throughput_moe_400m_compiled_graph_nvidia_h100_80gb_hbm3",
    "study_1b": "study_1b",
}
METRIC = next(iter(METRICS))


def sizes(results: Results) -> str:
    """Each study's training loss above bf16, and a recipe's slope over log10 of the size, of those equally long."""
    runs = {name: results.rows(name) for name in (*STUDIES, *OTHERS)}
    configs = {name: config_of(results, name) for name in runs}
    recipes = _recipes(run for of in runs.values() for run in of)
    gaps = {name: [gap(of, recipe, METRIC) for recipe in recipes] for name, of in runs.items()}
    rows = [
        [_millions(configs[name].parameters), _millions(_tokens(configs[name])), *(str(g or MISSING) for g in found)]
        for name, found in gaps.items()
    ]
    points = ([(configs[name].parameters, gaps[name][i]) for name in STUDIES] for i in range(len(recipes)))
    slopes = [growth([(size, g) for size, g in of if g]) for of in points]
    rows.insert(len(STUDIES), ["change with ten times the size", "", *map(str, slopes)])
    return markdown(("parameters", "tokens", *recipes), rows)


def blocks(results: Results) -> str:
    """In each study, the loss with blocks of 128x128 for `grad_weight` above that with 1x128, the default."""
    rows = []
    for name in (*STUDIES, *OTHERS, EXPERTS):
        runs, config = results.rows(name), config_of(results, name)
        found = [gap(runs, "fp8_128x128", metric, "fp8") for metric in METRICS]
        if all(found):
            rows.append([_size(results, name), _millions(_tokens(config)), *map(str, found)])
    return markdown(("parameters", "tokens", *METRICS.values()), rows)


def tokens(results: Results) -> str:
    """How many more tokens a recipe needs for the training loss of bf16, in %.

    The loss of bf16 is taken to fall linearly with the logarithm of the tokens, as it does from a study to a longer one
    with the same seeds.
    """
    rows, recipes = [], _recipes(run for name in LONGER for run in results.rows(name))
    for name in LONGER:
        runs, config, fall = results.rows(name), config_of(results, name), _fall(results, name)
        gaps = [gap(runs, recipe, METRIC) for recipe in recipes]
        more = [MISSING if above is None else _more_tokens(above, fall) for above in gaps]
        rows.append([_millions(config.parameters), _millions(_tokens(config)), f"{fall:.1f} %", *more])
    return markdown(("parameters", "tokens", "bf16 with twice the tokens: lower by", *recipes), rows)


def speeds(results: Results) -> str:
    """The speed of a recipe against bf16, and what is left of it after the tokens that it needs more for bf16's loss.

    Twice the tokens lower the loss as much as at the largest size in LONGER.
    """
    rows, fall = [], _fall(results, list(LONGER)[-1])
    for name, measured in SPEEDS.items():
        runs, (column_of_speed, *_) = results.rows(name), COMPARED[measured.split("_")[0]]
        for recipe in ("fp8", "fp8_128x128"):
            ours, base = (
                statistics.fmean(column(results.rows(measured, recipe=key), column_of_speed)) for key in (recipe, BASE)
            )
            left = [ours / base / more for more in _tokens_factor(gap(runs, recipe, METRIC), fall)]
            rows.append([_size(results, name), recipe, ratio(ours / base), f"{left[0]:.2f} ± {left[0] - left[1]:.2f}"])
    return markdown(("parameters", "recipe", "× bf16", "× bf16 at the same loss"), rows)


def _fall(results: Results, name: str) -> float:
    """How much twice the tokens lower the training loss of bf16, in %."""
    longer = LONGER[name]
    seeds = tuple({run["seed"] for run in results.rows(longer)})
    level, lower = (
        statistics.fmean(run[METRIC] for run in results.rows(of, recipe=BASE, seed=seeds)) for of in (name, longer)
    )
    doublings = math.log2(_tokens(config_of(results, longer)) / _tokens(config_of(results, name)))
    return 100 * (1 - lower / level) / doublings


def _tokens_factor(above: Gap, fall: float) -> tuple[float, float]:
    """How many times the tokens make up for a gap, and for the upper end of its interval."""
    return 2 ** (above.mean / fall), 2 ** ((above.mean + above.half_width) / fall)


def _more_tokens(above: Gap, fall: float) -> str:
    mean, high = (100 * (more - 1) for more in _tokens_factor(above, fall))
    return f"{mean:+.1f} % ± {high - mean:.1f}"


def _recipes(runs: Iterable[Mapping]) -> list[str]:
    return [recipe for recipe in dict.fromkeys(run["recipe"] for run in runs) if recipe != BASE]


def config_of(results: Results, name: str) -> RunConfig:
    return RunConfig(**results.load(name)["config"])


def _size(results: Results, name: str) -> str:
    return _millions(config_of(results, name).parameters) + ", mixture of experts" * (name == EXPERTS)


def _tokens(config: RunConfig) -> int:
    """Those after the start."""
    return (config.steps - config.bf16_steps) * config.tokens_per_step


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} M"
