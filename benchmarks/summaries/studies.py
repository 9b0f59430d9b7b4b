"""Tables of studies of several sizes: the gap to bf16 of each, and how it changes with size."""

from __future__ import annotations

from common.report import MISSING, markdown
from llm_training.config import RunConfig
from llm_training.study import BASE, METRICS, gap, growth

from summaries.cells import Results

# Of one family of models.
STUDIES = ("study_6m", "study_25m")
_METRIC = next(iter(METRICS))


def sizes(results: Results) -> str:
    """A recipe's training loss above bf16 in each study, and the slope of a line through it over log10 of the size."""
    contents = [results.load(name) for name in STUDIES]
    configs = [config_of(results, name) for name in STUDIES]
    columns = [f"{_millions(c.parameters)} parameters, {_millions(_tokens(c))} tokens" for c in configs]
    recipes = dict.fromkeys(run["recipe"] for content in contents for run in content["runs"])
    rows = []
    for recipe in recipes:
        gaps = [gap(content["runs"], recipe, _METRIC) for content in contents]
        if recipe != BASE and None not in gaps:
            slope = growth([(config.parameters, found) for config, found in zip(configs, gaps)])
            rows.append([recipe, *map(str, gaps), str(slope) if slope else MISSING])
    return markdown(("recipe", *columns, "change with ten times the size"), rows)


def config_of(results: Results, name: str) -> RunConfig:
    return RunConfig(**results.load(name)["config"])


def _tokens(config: RunConfig) -> int:
    """Those after the start."""
    return (config.steps - config.bf16_steps) * config.tokens_per_step


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} M"
