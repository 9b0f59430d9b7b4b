"""Tables of studies of several sizes: the gap to bf16 of each, and how it changes with size."""

from __future__ import annotations

from common.report import MISSING, markdown
from llm_training.config import RunConfig
from llm_training.study import BASE, METRICS, gap, growth

from summaries.cells import Results

# Of one family of models.
STUDIES = ("study_6m", "study_12m", "study_25m", "study_50m", "study_85m")
METRIC = next(iter(METRICS))


def sizes(results: Results) -> str:
    """Each study's training loss above bf16, and a recipe's slope over log10 of the size."""
    contents = {name: results.load(name)["runs"] for name in STUDIES}
    configs = [config_of(results, name) for name in STUDIES]
    recipes = list(dict.fromkeys(run["recipe"] for runs in contents.values() for run in runs))
    recipes.remove(BASE)
    gaps = [[gap(runs, recipe, METRIC) for recipe in recipes] for runs in contents.values()]
    rows = [
        [_millions(config.parameters), _millions(_tokens(config)), *(str(g or MISSING) for g in found)]
        for config, found in zip(configs, gaps)
    ]
    slopes = [growth([(c.parameters, g) for c, g in zip(configs, found) if g]) for found in zip(*gaps)]
    rows.append(["change with ten times the size", "", *map(str, slopes)])
    return markdown(("parameters", "tokens", *recipes), rows)


def blocks(results: Results) -> str:
    """In each study, the loss with blocks of 128x128 for `grad_weight` above that with 1x128, the default."""
    rows = []
    for name in STUDIES:
        runs, config = results.load(name)["runs"], config_of(results, name)
        found = [gap(runs, "fp8_128x128", metric, "fp8") for metric in METRICS]
        rows.append([_millions(config.parameters), *map(str, found)])
    return markdown(("parameters", *METRICS.values()), rows)


def config_of(results: Results, name: str) -> RunConfig:
    return RunConfig(**results.load(name)["config"])


def _tokens(config: RunConfig) -> int:
    """Those after the start."""
    return (config.steps - config.bf16_steps) * config.tokens_per_step


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} M"
