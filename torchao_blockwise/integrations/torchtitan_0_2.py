"""torchtitan 0.2, which converts models that are built: registers the converters `blockwise_fp8` and `blockwise_nvfp4`.

    --job.custom_config_module torchao_blockwise.integrations.torchtitan_0_2 --model.converters blockwise_fp8
    --blockwise.options '{"exclude": ["layers.0.*"]}'

The options are those of `torchao_blockwise.integrations.torchtitan`, as one JSON object. `--blockwise.selective_ac`
lets torchtitan's selective activation checkpointing of operations save the products of converted layers too.
"""

# No postponed annotations: torchtitan makes a class of the fields here, elsewhere, where names are not known.
import functools
import json
from dataclasses import dataclass, field
from typing import Any

from torch import nn

try:
    from torchtitan.protocols.model_converter import register_model_converter
    from torchtitan.protocols.train_spec import get_train_spec
except ImportError as e:
    raise ImportError(
        "torchao_blockwise.integrations.torchtitan_0_2 needs torchtitan 0.2, whose model converters are not there; "
        "with 0.3 use --override.imports torchao_blockwise.integrations.torchtitan.fp8"
    ) from e

from torchao_blockwise._compat import torchtitan_0_2
from torchao_blockwise.integrations.options import Options
from torchao_blockwise.integrations.recipes import RECIPES
from torchao_blockwise.nn import sac_save_list


@dataclass
class Blockwise:
    options: str = "{}"
    """Which layers are converted and how, as a JSON object."""
    selective_ac: bool = False
    """Whether --activation_checkpoint.selective_ac_option op saves products of converted layers."""


@dataclass
class JobConfig:
    """What torchtitan merges into its own."""

    blockwise: Blockwise = field(default_factory=Blockwise)


class Converter:
    """Converts a model as the section `blockwise` of the job's config says."""

    def __init__(self, format: str, job_config: Any, parallel_dims: Any):
        section = getattr(job_config, "blockwise", Blockwise())
        given = json.loads(section.options)
        if not isinstance(given, dict):
            raise ValueError(f"--blockwise.options must be a JSON object, got {section.options!r}; write {{...}}")
        self.options = Options.of(format, given)
        self._model_name = job_config.model.name
        self._selective_ac = section.selective_ac

    def convert(self, model: nn.Module) -> None:
        self.options.convert(model)
        if self._selective_ac:
            saved = torchtitan_0_2.saved_operations(get_train_spec(self._model_name).parallelize_fn)
            if saved is None:
                raise ValueError(
                    f"--blockwise.selective_ac: {self._model_name} has no list of operations that are saved; leave it "
                    "out, and give sac_save_list() to torchtitan's apply_ac where the model is parallelized"
                )
            saved.update(sac_save_list())

    def post_optimizer_hook(self, model: Any) -> None:
        """Nothing: what is derived from a weight lives no longer than a pass."""


for _format in RECIPES:
    register_model_converter(functools.partial(Converter, _format), f"blockwise_{_format}")
