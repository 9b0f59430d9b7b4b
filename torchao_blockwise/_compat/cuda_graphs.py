"""Whether what runs now belongs to a CUDA graph."""

from __future__ import annotations

import sys

import torch


def is_capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph records operations on `x`, or inductor runs them first in the memory of its graphs.

    By that run `torch.compile(mode="reduce-overhead")` begins. Inductor takes its memory back afterwards, and raises
    where a tensor lives on in it that it does not know.
    """
    return x.is_cuda and (torch.cuda.is_current_stream_capturing() or _is_first_run(x.device))


def _is_first_run(device: torch.device) -> bool:
    # Only who compiles in this mode has imported it.
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device.index, create_if_none_exists=False)
    except AssertionError:
        # PyTorch 2.11, in a thread that knows nothing of graphs.
        return False
    # Inductor runs and records its graphs on this stream, and nothing else there.
    return manager is not None and bool(torch.cuda.current_stream(device) == manager.stream)
