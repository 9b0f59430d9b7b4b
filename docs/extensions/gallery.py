"""How tutorials are run and shown."""

from __future__ import annotations

import warnings
from pathlib import Path

# In the order in which to read them.
TUTORIALS = (
    "quickstart",
    "trainer",
    "lora",
    "fine_tune_fp8",
    "experts",
    "fsdp2",
    "nvfp4",
    "monitor",
    "checkpoints",
    "unchanged_weights",
    "titan",
    "new_format",
)


class Order:
    """Sorts the files of the gallery as `TUTORIALS` has them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, file: str) -> int:
        return TUTORIALS.index(Path(file).stem)


CONFIGURATION = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "learn",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"__init__\.py|conftest\.py",
    "within_subsection_order": "gallery.Order",
    # A tutorial that fails ends the build.
    "abort_on_example_error": True,
    # What is shown is what was printed.
    "capture_repr": (),
    "reset_modules": ("matplotlib", "gallery.reset"),
    "reset_modules_order": "both",
    "notebook_extensions": set(),
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "matplotlib_animations": False,
}


def reset(configuration: dict, file: str, when: str = "before") -> None:
    """Every tutorial begins with the same random numbers and settings. Figures are small enough for a phone."""
    import matplotlib.pyplot as plt
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.compiler.reset()
    plt.rcParams.update({"figure.figsize": (5, 2.8), "figure.constrained_layout.use": True, "savefig.dpi": 160})
    # Warnings of other packages about versions and missing GPUs contain paths of this machine.
    for message in (".*is deprecated.*", ".*pin_memory.*"):
        warnings.filterwarnings("ignore", message=message)
