"""Checkpoints of a recipe's run: written whole or not at all, read without running code from the file."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from pathlib import Path

import torch

from llm_training.config import RunConfig, UsageError, difference


def path_of(folder: Path, recipe: str) -> Path:
    """Where a recipe's checkpoint lies."""
    return folder / f"checkpoint_{recipe}.pt"


def start_of(folder: Path, seed: int) -> Path:
    """Where the state lies that all recipes of a seed begin with after their `bf16_steps`."""
    return folder / f"start_seed_{seed}.pt"


def save(path: Path, config: RunConfig, corpus_digest: str, device: torch.device, **state) -> None:
    """Write `state` with what it depends on; a reader never sees half a file.

    The position in the data is the step, and random generators are saved, so that a resumed run repeats the same draws.
    Raises UsageError where the file cannot be written; the one before it stays.
    """
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    state |= {"config": asdict(config), "data": corpus_digest, "rng": rng}
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error}; free some space, or choose another --out") from None


def load(path: Path, config: RunConfig, corpus_digest: str, device: torch.device) -> dict:
    """The state saved at `path`, on the CPU; random generators are set to where they stood.

    Raises UsageError for a damaged file, and for one of another configuration or other data, naming each field.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved_config, saved_data, rng = state["config"], state["data"], state["rng"]
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} is not a readable checkpoint ({reason}); delete it to start over") from None
    fields = difference(saved_config, asdict(config))
    if saved_data != corpus_digest:
        fields.append(f"data (sha256): {saved_data} -> {corpus_digest}")
    if fields:
        differs = "; ".join(fields)
        raise UsageError(f"{path} has another configuration: {differs}; use the same, or another --out")
    torch.set_rng_state(rng["cpu"])
    if device.type == "cuda" and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"], device)
    return state
