"""Detect the capture of CUDA graphs."""

from __future__ import annotations

import sys

import torch


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph captures operations on `x`, or inductor does the warm-up run for its CUDA graphs.

    `torch.compile(mode="reduce-overhead")` begins with that run, in the memory pool of its graphs. Inductor frees the
    pool afterwards, and raises if a tensor that it does not know is still alive in it.
    """
    return x.is_cuda and (torch.cuda.is_current_stream_capturing() or _is_first_run(x.device))


def _is_first_run(device: torch.device) -> bool:
    # Imported only if something was compiled in this mode.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:
        # PyTorch 2.11 raises in a thread without CUDA graphs.
        return False
    # Inductor runs and records its graphs on this stream, and nothing else there.
    return manager is not None and bool(torch.cuda.current_stream(device) == manager.stream)
