"""Input and output of commands: models from a configuration, errors, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchao_blockwise._compat.hugging_face import model_on_meta


class UsageError(Exception):
    """Invalid input. The message has the expected input, the given input and the fix."""


def show(report: object, data: dict[str, Any] | None) -> None:
    """Print `data` as JSON, or the text of the report if it is None."""
    print(report if data is None else json.dumps(data, indent=1))


def meta_model(name: str) -> nn.Module:
    """Build a model in bfloat16 on the meta device; nothing is downloaded.

    name: a config.json, a folder that contains one, or a Hugging Face id in the cache. The class of the model is the
        first known architecture in the configuration, or else the choice of `AutoModelForCausalLM` or `AutoModel`.
    Raises UsageError if the configuration or its class is missing.
    """
    try:
        import transformers
    except ImportError:
        raise UsageError("reading a configuration needs transformers (pip install transformers)") from None
    config = _config(name, transformers)
    try:
        return model_on_meta(config, torch.bfloat16, {})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _config(name: str, transformers: Any) -> Any:
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(f"{name} contains no config.json; give a folder that does, or the file")
    if not path.exists() and (path.suffix == ".json" or name.startswith((".", "/"))):
        raise UsageError(f"{name} does not exist; give a config.json, a folder that contains one, or a model id")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if path.exists():
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"transformers cannot read the configuration in {name}: {why}") from None
        remedy = f"download it (hf download {name} config.json), or give the path of a config.json"
        raise UsageError(f"the Hugging Face cache has no configuration of {name!r}; {remedy}") from None
