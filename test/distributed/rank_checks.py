"""What runs on the ranks of test_ranks.py."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from ranks import join, run_each, run_in_turn


def one_computes_alone(rank: int, ranks: int, port: int, file: str, cases, seconds: float) -> None:
    """Longer than collectives may take, while the other rank sits the case out."""
    join(rank, ranks, port, seconds=seconds)
    run_in_turn(lambda case: time.sleep(2 * seconds), cases, lambda case: 1, rank, file)


def one_crashes(rank: int, ranks: int, port: int, file: str, cases) -> None:
    """Rank 1 ends by a signal, as in a segmentation fault, while rank 0 computes."""
    join(rank, ranks, port)

    def computes_or_crashes(case):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    run_in_turn(computes_or_crashes, cases, lambda case: ranks, rank, file)


def nothing_raises(rank: int, ranks: int, port: int, file: str, in_turn: bool) -> None:
    """What pytest raises there is no `Exception`."""

    def expects(rank):
        with pytest.raises(ValueError):
            pass

    join(rank, ranks, port)
    if in_turn:
        run_in_turn(expects, ["case"], lambda case: ranks, rank, file)
    run_each({"case": expects}, rank, [("case",)], file)
