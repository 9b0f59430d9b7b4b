"""What test_sglang_over_ranks.py spawns: ranks that train, and ranks of an engine behind an HTTP server.

The engine follows SGLang 0.5.23: http_server.py (statuses and contents), scheduler_components/weight_updater.py (what
is asked when), model_runner_components/weight_updater.py (how it joins a group and receives) and
weight_sync/tensor_bucket.py (how it cuts bytes).
"""

from __future__ import annotations

import datetime
import functools
import http.server
import json
import threading
import time
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import FP8, NVFP4, mlp
from ranks import device, join, run_each
from sglang_updates import Updates
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchao_blockwise import checkpoint
from torchao_blockwise.integrations import sglang

CONFIGS = {"fp8_block": (FP8, (200, 301, 130)), "nvfp4_compressed_tensors": (NVFP4, (208, 304, 144))}
_MINUTE = datetime.timedelta(minutes=1)


class Worker(Updates):
    """A rank of an engine."""

    def __init__(self, rank: int):
        self.rank, self.groups, self.weights = rank, {}, {}
        self.calls = []

    def init_weights_update_group(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        self.weights, self.calls = {}, []
        try:
            rank = rank_offset + self.rank
            address = f"tcp://{master_address}:{master_port}"
            store, rank, size = next(dist.rendezvous(address, rank, world_size, timeout=_MINUTE))
            store.set_timeout(_MINUTE)
            group, _ = c10d._new_process_group_helper(
                size, rank, [], dist.Backend(backend), dist.PrefixStore(group_name, store), group_name, timeout=_MINUTE
            )
            c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
            self.groups[group_name] = group
            return True, "Succeeded to initialize custom process group."
        except Exception as e:
            return False, f"Failed to initialize custom process group: {e}."

    def destroy_weights_update_group(self, group_name):
        if group_name not in self.groups:
            return False, "The group to be destroyed does not exist."
        dist.destroy_process_group(self.groups.pop(group_name))
        return True, "Succeeded to destroy custom process group."

    def update_weights_from_distributed(self, names, dtypes, shapes, group_name, flush_cache, load_format):
        if not self.is_open:
            return (
                False,
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()",
            )
        assert load_format == "flattened_bucket"
        parts, offset = [], 0
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            dtype, shape = getattr(torch, dtype), torch.Size(shape)
            if offset % dtype.itemsize:
                return False, f"Failed to receive weights: Unaligned received tensor {name}: byte offset {offset}"
            parts.append((name, dtype, shape, offset, offset + shape.numel() * dtype.itemsize))
            offset = parts[-1][-1]
        flat = torch.empty(offset, dtype=torch.uint8, device=device())
        dist.broadcast(flat, src=0, group=self.groups[group_name])
        if "unknown" in names:
            return False, "Failed to update parameter online: unknown. The full weights are partially updated."
        self.calls.append((len(names), flush_cache))
        for name, dtype, shape, start, end in parts:
            self.weights[name] = flat[start:end].view(dtype).reshape(shape)
        return True, "Succeeded to update parameter online."

    def held(self):
        """Nothing that SGLang has: for the test."""
        return True, [checkpoint.checksums(sorted(self.weights.items())), self.calls, sorted(self.groups)]


def engine(rank: int, size: int, folder: Path, number: int) -> None:
    """The first rank hears HTTP requests and tells them to the others."""
    worker, is_over = Worker(rank), threading.Event()

    def answered(asked) -> list:
        given = [asked]
        dist.broadcast_object_list(given)
        path, options = given[0]
        answers = [None] * size
        dist.all_gather_object(answers, getattr(worker, path)(**options) if path != "over" else (True, ""))
        return answers

    if rank:
        while True:
            given = [None]
            dist.broadcast_object_list(given)
            path, options = given[0]
            answer = getattr(worker, path)(**options) if path != "over" else (True, "")
            dist.all_gather_object([None] * size, answer)
            if path == "over":
                return

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_POST(self):
            options = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.removeprefix("/")
            if path != "over" and not hasattr(worker, path):
                status, content = 404, {"detail": "Not Found"}
            elif self.headers.get("Authorization") != "Bearer secret":
                status, content = 401, {"error": "Unauthorized"}
            else:
                answers = answered((path, options))
                done = all(done for done, _ in answers)
                message = answers if path == "held" else " | ".join(message for _, message in answers)
                status, content = 200 if done else 400, {"success": done, "message": message}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())
            if path == "over":
                is_over.set()

    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / f"{number}.part").write_text(str(server.server_port))
    (folder / f"{number}.part").rename(folder / f"{number}.port")
    is_over.wait()


def asked(url: str, path: str):
    request = urllib.request.Request(f"{url}/{path}", b"{}", {"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["message"]


def urls_of(folder: Path, engines: int) -> list[str]:
    files = [folder / f"{i}.port" for i in range(engines)]
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    return [f"http://localhost:{file.read_text()}" for file in files]


# --- what ranks that train do -----------------------------------------------------------------------------------------


def connected(urls: list[str], ranks: list[int], **options) -> sglang.Connection:
    engines = [(sglang.Server(url, "secret"), count) for url, count in zip(urls, ranks, strict=True)]
    backend = "nccl" if device().type == "cuda" else "gloo"
    return sglang.connect(engines, "localhost", backend=backend, seconds=60, **options)


def sends(rank: int, format: str, size: int, urls: list[str], ranks: list[int]) -> None:
    """Two steps, in buckets of one tensor and of several: all ranks of all engines hold the bytes of the step."""
    config, features = CONFIGS[format]
    model = mlp(config, features=features).to(device())
    if size > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=DeviceMesh(device().type, list(range(size))))
        model(torch.randn(4, features[0], device=device()))
    connection = connected(urls, ranks) if rank == 0 else None
    for bucket_bytes in (1, 40_000):
        sent = sglang.update_weights(connection, model, format, bucket_bytes=bucket_bytes)
        weights = sorted((name, x) for name, x in checkpoint.quantized_weights(model, format))
        assert sent == sum(x.nbytes for _, x in weights)
        if rank == 0:
            for url in urls:
                for _, (sums, calls, groups) in asked(url, "held"):
                    assert sums == checkpoint.checksums(weights)
                    flushes = [flush for _, flush in calls]
                    assert flushes.pop() and not flushes.pop()
                    assert groups == ["weight_update_group"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)
    if connection is not None:
        connection.close()
        assert all(groups == [] for url in urls for _, (_, _, groups) in asked(url, "held"))


def refused(rank: int, size: int, urls: list[str], ranks: list[int]) -> None:
    """What the engine cannot load closes the connection, and ends the update; a new connection of this name sends."""
    model, bad = mlp(FP8), torch.nn.Sequential()
    bad.unknown = torch.nn.Parameter(torch.ones(3))
    bad.more = mlp(FP8)
    connection = connected(urls, ranks)
    with pytest.raises(
        RuntimeError, match=r"refused unknown .*partially updated.*closed, connect again\); its weights"
    ):
        sglang.update_weights(connection, bad, bucket_bytes=1)
    with pytest.raises(RuntimeError, match="the connection is closed; connect again"):
        sglang.update_weights(connection, model)
    with connected(urls, ranks) as connection:
        sglang.update_weights(connection, model)
    (_, (sums, _, groups)), *_ = asked(urls[0], "held")
    assert groups == [] and checkpoint.checksums(sorted(checkpoint.quantized_weights(model))).items() <= sums.items()


def begun_elsewhere(rank: int, size: int, urls: list[str], ranks: list[int]) -> None:
    """The second engine is in an update of somebody else's: the first one does not stay in one."""
    asked(urls[1], "begin_weight_update")
    with connected(urls, ranks) as connection:
        with pytest.raises(RuntimeError, match=r"refused begin_weight_update \(.*already open"):
            sglang.update_weights(connection, mlp(FP8))
        asked(urls[1], "end_weight_update")
        sglang.update_weights(connection, mlp(FP8))


def not_let_in(rank: int, size: int, urls: list[str], ranks: list[int]) -> None:
    """A name that the process has already, a key that is wrong, nobody at the address."""
    refusal = r"connect: no group of 1 ranks .* got 'weight_update_group'"
    with connected(urls, ranks), pytest.raises(RuntimeError, match=refusal):
        connected(urls, ranks)
    for server in (sglang.Server(urls[0], "other"), sglang.Server("http://localhost:1", "secret")):
        with pytest.raises(ConnectionError, match="is it an SGLang server"):
            server.begin_weight_update()
    # A server of before, which knows no begin and end.
    before = sglang.Server(f"{urls[0]}/before", "secret")
    assert before.begin_weight_update() == before.end_weight_update() == (True, "")
    with pytest.raises(ConnectionError, match="404"):
        before.update_weights_from_distributed()


def beside_a_group_of_a_gpu(rank: int, size: int, urls: list[str], ranks: list[int]) -> None:
    """PyTorch splits new groups from a default one whose device is known: that one has none of the engines."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = device = torch.device("cuda", 0)
    split = mock.patch.object(c10d, "_get_split_source", side_effect=AssertionError("is split"))
    with split, connected(urls, ranks) as connection:
        sglang.update_weights(connection, mlp(FP8))
    assert dist.group.WORLD.bound_device_id == device


RUNS = {f.__name__: f for f in (sends, refused, begun_elsewhere, not_let_in, beside_a_group_of_a_gpu)}


def run(rank: int, ranks: int, port: int, file: str, trainers: int, engines: list[int], cases) -> None:
    """The first ranks train, and leave what was raised in each case, or None; the others are those of engines."""
    folder = Path(file).parent
    if rank < trainers:
        if trainers > 1:
            join(rank, trainers, port, name="trainers")
        urls = urls_of(folder, len(engines))
        runs = {name: functools.partial(check, size=trainers, urls=urls, ranks=engines) for name, check in RUNS.items()}
        run_each(runs, rank, cases, file)
        if rank == 0:
            for url in urls:
                asked(url, "over")
        return
    first = trainers
    for number, count in enumerate(engines):
        if rank < first + count:
            join(rank - first, count, port, name=f"engine {number}")
            return engine(rank - first, count, folder, number)
        first += count
