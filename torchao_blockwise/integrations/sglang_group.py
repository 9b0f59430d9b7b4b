"""SGLang on other hosts: engines that take weights by broadcasts in a process group.

Source of the interface: SGLang 0.5.23, srt/entrypoints/engine.py and http_server.py (`init_weights_update_group`,
`update_weights_from_distributed`), model_executor/model_runner_components/weight_updater.py, which receives, and
weight_sync/tensor_bucket.py, how bytes lie.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchao_blockwise._compat import torch_groups

_NOT_FOUND = 404


class Server:
    """An SGLang server by its address, with those calls of `sglang.Engine` that updates of weights make.

    url: "http://host:30000". key: its `--admin-api-key` or `--api-key`, if it has one.
    A call gives (done, message); it raises ConnectionError where the server does not answer, or not as SGLang's does.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def init_weights_update_group(self, **options: Any) -> tuple[bool, str]:
        return self._ask("init_weights_update_group", options)

    def destroy_weights_update_group(self, **options: Any) -> tuple[bool, str]:
        return self._ask("destroy_weights_update_group", options)

    def update_weights_from_distributed(self, **options: Any) -> tuple[bool, str]:
        return self._ask("update_weights_from_distributed", options)

    def begin_weight_update(self) -> tuple[bool, str]:
        return self._ask("begin_weight_update", {}, is_new=True)

    def end_weight_update(self) -> tuple[bool, str]:
        return self._ask("end_weight_update", {}, is_new=True)

    def _ask(self, path: str, options: dict[str, Any], is_new: bool = False) -> tuple[bool, str]:
        """is_new: servers that do not know the path do without it."""
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(options).encode(), self._headers)
        try:
            try:
                with urllib.request.urlopen(request) as answer:
                    content = json.load(answer)
            except urllib.error.HTTPError as error:
                if is_new and error.code == _NOT_FOUND:
                    return True, ""
                # What SGLang refuses has a status of its own, and says why.
                content = json.loads(error.read() or b"null")
                if not isinstance(content, dict) or "success" not in content:
                    raise
            return bool(content["success"]), str(content["message"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConnectionError(
                f"{self.url}/{path}: {type(error).__name__}: {error}; is it an SGLang server?"
            ) from error


class Connection:
    """Engines in a process group with this process; `update_weights` takes it for an engine. Made by `connect`.

    It ends with `close()`, or as the context of a `with`.
    """

    def __init__(self, engines: Sequence[Any], group: dist.ProcessGroup, name: str, device: torch.device) -> None:
        self._engines, self._group, self._name, self._device = list(engines), group, name, device
        self._is_open = True

    def begin_weight_update(self) -> tuple[bool, str]:
        """Of all engines or of none."""
        engines = self._that_know("begin_weight_update")
        refusals = _refusals(_asked([(engine, "begin_weight_update", {}) for engine in engines]))
        refusal = _first(refusals)
        if refusal is None:
            return True, ""
        begun = [engine for engine, its in zip(engines, refusals, strict=True) if its is None]
        _refusals(_asked([(engine, "end_weight_update", {}) for engine in begun]))
        return False, refusal

    def end_weight_update(self) -> tuple[bool, str]:
        engines = self._that_know("end_weight_update")
        refusal = _first(_refusals(_asked([(engine, "end_weight_update", {}) for engine in engines])))
        return refusal is None, refusal or ""

    def update_weights_from_tensor(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        """Send the tensors' bytes in one broadcast to all engines, and wait until all have loaded them."""
        if not self._is_open:
            return False, "the connection is closed; connect again"
        # Those of the largest elements first: so each begins at a multiple of its element's size, as engines want.
        tensors = sorted(named_tensors, key=lambda named: -named[1].element_size())
        data = [x.detach().to(self._device).reshape(-1).contiguous().view(torch.uint8) for _, x in tensors]
        options = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(x.dtype).removeprefix("torch.") for _, x in tensors],
            "shapes": [list(x.shape) for _, x in tensors],
            "group_name": self._name,
            "flush_cache": flush_cache,
            "load_format": "flattened_bucket",
        }
        answers = _asked([(engine, "update_weights_from_distributed", options) for engine in self._engines])
        sent: Any = self._group.broadcast(torch.cat(data), 0)
        refusal = _first(_refusals(answers))
        if refusal is None:
            sent.wait()
            return True, ""
        # Where an engine refused before it received, it would take what comes next for what it has missed.
        self.close()
        return False, f"{refusal}; the connection is closed, connect again"

    def close(self) -> None:
        """Leave the group, all engines too, whatever they answer; a second time nothing."""
        if self._is_open:
            self._is_open = False
            _left(self._engines, self._name, self._group)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _that_know(self, call: str) -> list[Any]:
        return [engine for engine in self._engines if hasattr(engine, call)]


def connect(
    engines: Sequence[tuple[Any, int]],
    address: str,
    port: int = 0,
    *,
    name: str = "weight_update_group",
    backend: str = "nccl",
    seconds: float = 600,
) -> Connection:
    """A group of this process, rank 0, and all ranks of engines, wherever they run; `update_weights` sends over it.

    Where ranks share the model the first one connects, and the others give `update_weights` None for an engine.
    engines: (engine, its tensor-parallel ranks). An engine is a `Server`, or has `init_weights_update_group`,
        `update_weights_from_distributed` and `destroy_weights_update_group`, as `sglang.Engine` does; it is called in
        a thread. SGLang refuses engines with data-parallel replicas here.
    address, port: where the engines reach this process; 0 takes a port that is free.
    name: of the group, one for each connection of a process. backend: "nccl", or "gloo" for engines on a CPU.
    seconds: that making the group, or a broadcast, may take.
    Raises RuntimeError where an engine refuses, or does not come.
    """
    size = 1 + sum(ranks for _, ranks in engines)
    timeout = timedelta(seconds=seconds)
    # Engines are waited for by the group; here their port must be known first.
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # of the stubs alone
        address, port, size, is_master=True, timeout=timeout, wait_for_workers=False
    )
    shared = {"master_address": address, "master_port": store.port, "world_size": size}
    calls, first = [], 1
    for engine, ranks in engines:
        options = {**shared, "rank_offset": first, "group_name": name, "backend": backend}
        calls.append((engine, "init_weights_update_group", options))
        first += ranks
    answers = _asked(calls)
    group, failed = None, None
    try:
        group = torch_groups.group_with_others(store, size, name, backend, timeout)
    except Exception as error:
        failed = error
    refusal = _first(_refusals(answers))
    together = [engine for engine, _ in engines]
    if group is None or refusal is not None:
        _left(together, name, group)
        raise RuntimeError(
            f"connect: no group of {size - 1} ranks of engines came about ({refusal or failed}); give the ranks that "
            f"each has, an address that they reach, got {address!r}, and a name that is free, got {name!r}"
        ) from failed
    return Connection(together, group, name, torch.device("cuda" if backend == "nccl" else "cpu"))


def refusal_in(answer: Any) -> str | None:
    """What an engine says against it, or None: `Engine` gives (done, message), its HTTP adapter a dict of these."""
    if isinstance(answer, dict):
        answer = answer.get("success", True), answer.get("message", "")
    done, message = answer if isinstance(answer, tuple) else (True, "")
    return None if done else str(message)


def _asked(calls: Sequence[tuple[Any, str, dict[str, Any]]]) -> list[Future[Any]]:
    """What each engine will answer to its call; an engine answers when it has received, so each has a thread."""
    pool = ThreadPoolExecutor(max(len(calls), 1))
    try:
        return [pool.submit(getattr(engine, call), **options) for engine, call, options in calls]
    finally:
        pool.shutdown(wait=False)


def _refusals(answers: Sequence[Future[Any]]) -> list[str | None]:
    """Of each engine; all answers are waited for."""
    refusals: list[str | None] = []
    for answer in answers:
        try:
            refusals.append(refusal_in(answer.result()))
        except Exception as error:
            refusals.append(f"{type(error).__name__}: {error}")
    return refusals


def _first(refusals: Sequence[str | None]) -> str | None:
    return next((refusal for refusal in refusals if refusal is not None), None)


def _left(engines: Sequence[Any], name: str, group: dist.ProcessGroup | None) -> None:
    answers = _asked([(engine, "destroy_weights_update_group", {"group_name": name}) for engine in engines])
    if group is not None:
        # A broadcast that somebody has not received is waited for by nobody.
        group.abort()
        dist.destroy_process_group(group)
    _refusals(answers)
