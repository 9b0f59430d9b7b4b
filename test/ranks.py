"""Ranks: how tests start processes, join them in a process group, and end them.

Ranks compute on the CPU and talk over gloo. With TORCHAO_BLOCKWISE_TEST_DEVICE=cuda, cases that need no more ranks than
there are GPUs run on those, one a rank, over NCCL; all others are skipped.
"""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machines import without_interpreter
from torch.distributed.tensor import DTensor

_SWITCH = "TORCHAO_BLOCKWISE_TEST_DEVICE"
# NVLink multicast is off on shared hosts, whose other GPUs it can put out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# On a GPU ranks wait for each other while kernels are compiled, each when it is used first.
_LEAST_SECONDS_ON_GPUS = 180
# What takes seconds to import, in each of four ranks.
_IMPORTED_BY_RANKS = [
    "torchao_blockwise",
    "torchao_blockwise.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "pytest",
]
# What is left of a case while it runs.
BEGUN = "did not end"
_device = torch.device("cpu")


def device() -> torch.device:
    """What this rank computes on; the CPU in a process that is no rank."""
    return _device


def gpus() -> int:
    """How many ranks may have a GPU; raises ValueError for a switch that says neither cpu nor cuda, or lies."""
    wanted, count = os.environ.get(_SWITCH, "cpu"), torch.cuda.device_count()
    if wanted not in ("cpu", "cuda") or (wanted == "cuda" and not count):
        raise ValueError(f"{_SWITCH} must be cpu, or cuda where there are GPUs, got {wanted!r} and {count} GPUs")
    return count if wanted == "cuda" else 0


def spawn_cases(worker, ranks: int, folder: Path, cases: Sequence) -> list[dict]:
    """Run worker(rank, ranks, port, file, cases) in `ranks` processes; returns {case: what a rank left of it} a rank.

    A worker leaves a dict and may end at a case that fails: the ones behind it run in new processes.
    """
    ranks, device_type = (min(ranks, gpus()), "cuda") if gpus() else (ranks, "cpu")
    left: list[dict] = [{} for _ in range(ranks)]
    waiting = list(cases)
    while waiting:
        place = folder / str(len(waiting))
        place.mkdir()
        for results, of_rank in zip(left, spawn(worker, ranks, place, waiting, device_type=device_type)):
            results.update(of_rank or {})
        behind = [case for case in waiting if not any(case in results for results in left)]
        # Where not even one was begun, the next attempt would end as this one did.
        waiting = behind if len(behind) < len(waiting) else []
    return left


def spawn(worker, ranks: int, folder: Path, *args, device_type: str = "cpu") -> list:
    """Run worker(rank, ranks, port, file, *args) in a process a rank; returns what each left in its file, or None."""
    # Held by this process: no rank takes it along when it dies, and no port is chosen before it is bound.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    # Libraries take a GPU where they see one, whatever the ranks are told.
    hidden = {"CUDA_VISIBLE_DEVICES": "", _SWITCH: "cpu"} if device_type == "cpu" else {}
    ended = ""
    try:
        with mock.patch.dict(os.environ, hidden):
            given = worker, ranks, store.port, files, device_type, args
            mp.start_processes(_start, given, nprocs=ranks, start_method=_start_method())
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
        ended = str(e).strip()
        print(ended)
    return [_left_in(file, ended) for file in files]


def _left_in(file: Path, ended: str):
    """What a rank left; of a case that it did not end also why the ranks ended, and where this one was."""
    left = torch.load(file, weights_only=True) if file.exists() else None
    if isinstance(left, dict):
        stack = file.with_suffix(".stack")
        where = stack.read_text() if stack.exists() else ""
        for case, result in left.items():
            if isinstance(result, str) and result == BEGUN:
                left[case] = f"{BEGUN}: {ended}\n{where}"
    return left


def _start_method() -> str:
    """By forks of a server that has imported what ranks import; by new processes where CUDA must not be forked."""
    if torch.cuda.is_available():
        return "spawn"
    mp.set_forkserver_preload(_IMPORTED_BY_RANKS)
    return "forkserver"


def _start(rank: int, worker, ranks: int, port: int, files: list[Path], device_type: str, args) -> None:
    global _device
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*view tensor.*")
    # Of a rank that crashes, or that waits when another one has failed, one wants to know where it was.
    stack = files[rank].with_suffix(".stack").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGTERM, stack, chain=True)
    try:
        if device_type == "cuda":
            os.environ.update(_NO_MULTICAST)
            _device = torch.device("cuda", rank)
            torch.cuda.set_device(_device)
        else:
            without_interpreter(pytest.MonkeyPatch())
        worker(rank, ranks, port, str(files[rank]), *args)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def run_in_turn(run: Callable, cases: Sequence, size_of: Callable, rank: int, file: str) -> None:
    """Run `run(case)` on the first size_of(case) ranks, together, up to one that raises; then leave.

    `file` holds what each case raised on this rank, or None.
    """
    # Longer than in the cases, where a rank that hangs is to raise.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=15))
    raised: dict = {}
    for case in cases:
        if rank < size_of(case):
            raised[case] = BEGUN
            torch.save(raised, file)
            try:
                run(case)
                raised[case] = None
            except BaseException:  # such as pytest's, where nothing was raised
                raised[case] = traceback.format_exc()
                raise
            finally:
                torch.save(raised, file)
        dist.barrier(group)
    dist.barrier()
    # Not by returning: a process group that its last object takes along waits for threads of gloo, which may wait for
    # the interpreter, that it holds. And a thread that outlives its group asks for the interpreter that is being taken
    # down, which aborts the process: seen in one of five runs of a DTensor program of PyTorch alone (2.13).
    _end(0)


@contextlib.contextmanager
def shared_folder():
    """One folder for all ranks, gone when all are through."""
    with tempfile.TemporaryDirectory() as folder:
        name = [folder]
        dist.broadcast_object_list(name)
        yield Path(name[0])
        dist.barrier()


def folder_of_all() -> Path:
    """One folder for all ranks, which stays."""
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    return Path(name[0])


def whole(x: torch.Tensor) -> torch.Tensor:
    """`x`, gathered where ranks share it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of a state's tensors, gathered where ranks share them."""
    return {name: whole(x).detach().clone() for name, x in state.items()}


def values_of(model) -> dict[str, torch.Tensor]:
    return whole_state(model.state_dict())


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_environment(rank: int, ranks: int, **more: str) -> None:
    """As torchrun sets it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **more}


def join(rank: int, ranks: int, port: int, *, seconds: float = 60, name: str = "") -> None:
    """Make the default process group of these ranks; `name` tells one apart from others before it."""
    store = dist.PrefixStore(name, dist.TCPStore("localhost", port, is_master=False))
    # However long each of them takes to come here: `seconds` is for what is tested.
    store.set(f"rank {rank}", "is here")
    store.wait([f"rank {other}" for other in range(ranks)], datetime.timedelta(minutes=5))
    on_gpu = device().type == "cuda"
    timeout = datetime.timedelta(seconds=max(seconds, _LEAST_SECONDS_ON_GPUS) if on_gpu else seconds)
    store.set_timeout(timeout)
    # Beside NCCL, gloo takes what lies on the CPU: objects, barriers and the plans of checkpoints.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
