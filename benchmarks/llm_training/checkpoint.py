"""Checkpoints of a recipe's run: written whole or not at all, read without running code from the file."""

from __future__ import annotations

import os
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
    """Write `state` with configuration, data and random generators, which a resumed run continues.

    A reader never sees half a file. The position in the data is the step.
    """
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    state |= {"config": asdict(config), "data": corpus_digest, "rng": rng}
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path, config: RunConfig, corpus_digest: str, device: torch.device) -> dict:
    """The state saved at `path`, on the CPU; random generators are set to where they stood.

    Raises UsageError for a file of another configuration or other data, naming each field.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    fields, rng = difference(state["config"], asdict(config)), state["rng"]
    if state["data"] != corpus_digest:
        fields.append(f"data (sha256): {state['data']} -> {corpus_digest}")
    if fields:
        differs = "; ".join(fields)
        raise UsageError(f"{path} has another configuration: {differs}; use the same, or another --out")
    torch.set_rng_state(rng["cpu"])
    if device.type == "cuda" and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"], device)
    return state
