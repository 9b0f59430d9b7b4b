"""Tables of studies of several sizes: the gap to bf16 of each, and how it changes with size."""

from __future__ import annotations

from common.report import MISSING, markdown
from llm_training.config import RunConfig
from llm_training.study import BASE, METRICS, gap, growth

from summaries.cells import Results

# Of one family of models, trained about equally long; shorter ones of larger models; of a mixture of experts.
STUDIES = ("study_6m", "study_12m", "study_25m", "study_50m", "study_85m")
SHORT = ("study_350m",)
EXPERTS = "study_moe_400m"
METRIC = next(iter(METRICS))


def sizes(results: Results) -> str:
    """Each study's training loss above bf16, and a recipe's slope over log10 of the size, of those equally long."""
    runs = {name: results.load(name)["runs"] for name in (*STUDIES, *SHORT)}
    configs = {name: config_of(results, name) for name in runs}
    recipes = [r for r in dict.fromkeys(run["recipe"] for of in runs.values() for run in of) if r != BASE]
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
    for name in (*STUDIES, *SHORT, EXPERTS):
        runs, config = results.load(name)["runs"], config_of(results, name)
        found = [gap(runs, "fp8_128x128", metric, "fp8") for metric in METRICS]
        size = _millions(config.parameters) + ", mixture of experts" * (name == EXPERTS)
        rows.append([size, _millions(_tokens(config)), *map(str, found)])
    return markdown(("parameters", "tokens", *METRICS.values()), rows)


def config_of(results: Results, name: str) -> RunConfig:
    return RunConfig(**results.load(name)["config"])


def _tokens(config: RunConfig) -> int:
    """Those after the start."""
    return (config.steps - config.bf16_steps) * config.tokens_per_step


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} M"
