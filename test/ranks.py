"""Ranks: how tests start processes, join them in a process group, and end them."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(worker, ranks: int, folder: Path, *args) -> list:
    """Run worker(rank, ranks, port, file, *args) in a process a rank; returns what each left in its file, or None."""
    # Held by this process: no rank takes it along when it dies, and no port is chosen before it is bound.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    try:
        mp.spawn(_start, args=(worker, ranks, store.port, files, args), nprocs=ranks)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
        print(e)
    return [torch.load(file, weights_only=True) if file.exists() else None for file in files]


def _start(rank: int, worker, ranks: int, port: int, files: list[Path], args) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    try:
        worker(rank, ranks, port, str(files[rank]), *args)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def leave() -> None:
    """End this rank when all others have come here too; the last thing that a worker does.

    Not by returning: a process group that its last object takes along waits for threads of gloo, which may wait for the
    interpreter, that it holds. And a thread that outlives its group asks for the interpreter that is being taken down,
    which aborts the process: seen in one of five runs of a DTensor program of PyTorch alone (2.13, Python 3.11).
    """
    dist.barrier()
    _end(0)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def join(rank: int, ranks: int, port: int, *, seconds: float = 60, name: str = "") -> None:
    """Make the default process group of these ranks; `name` tells one apart from others before it."""
    store = dist.PrefixStore(name, dist.TCPStore("localhost", port, is_master=False))
    # However long each of them takes to come here: `seconds` is for what is tested.
    store.set(f"rank {rank}", "is here")
    store.wait([f"rank {other}" for other in range(ranks)], datetime.timedelta(minutes=5))
    timeout = datetime.timedelta(seconds=seconds)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
