"""Which backend AUTO takes for a product: a lookup in tables of times that were measured on a GPU of the kind.

A table is a JSON file named after the GPU, `nvidia_h200.json`, written by `python -m torchao_blockwise.tune`:

    {"schema": 1, "gpu": "NVIDIA H200", ..., "entries": [{"formats": ["fp8_1x128", "fp8_128x128"],
     "features": [7168, 2048], "tokens": 4096, "us": {"cublas": 98.1, "triton": 241.0}}, ...]}

Tables ship in `tables/` beside this file. One in the folder $TORCHAO_BLOCKWISE_TABLES, else ~/.cache/torchao_blockwise,
comes before: its entries replace those of the same formats, features and bucket of tokens.

features and tokens: with square blocks in b (`output`, `grad_input`) b's N and K, and M; with one-row blocks on both
    sides, which contract over tokens (`grad_weight`), M and N, and K.
Bucket of tokens: the nearest power of two, by ratio: 4097 is as 4096, and 6000 as 8192.
Nearest entry: of the same formats, the features nearest by ratio, N and K together at most a factor of 2 away; of those
    the nearest bucket, at most a factor of 4 away, the smaller one of two. Farther away nothing is known, and AUTO
    keeps its fixed order.
"""

from __future__ import annotations

import functools
import json
import math
import os
import reprlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchao_blockwise.formats import BlockFormat
from torchao_blockwise.ops.backend import Backend

SCHEMA = 1
ENVIRONMENT_VARIABLE = "TORCHAO_BLOCKWISE_TABLES"
SHIPPED_TABLES = Path(__file__).parent / "tables"
# Doublings: of both features together, and of tokens.
_FEATURE_REACH, _TOKEN_REACH = 1.0, 2
# Where something else than a layer's features varies, the lookups that are remembered must not grow without end.
_MAX_REMEMBERED = 4096

Ranking = tuple[Backend, ...]
# {(names of the formats, features): {bucket of tokens: backends, fastest first}}
Table = dict[tuple[str, str, int, int], dict[int, Ranking]]

_remembered: dict[tuple, Any] = {}


def ranking(a_fmt: BlockFormat, b_fmt: BlockFormat, m: int, n: int, k: int, device: torch.device) -> Ranking:
    """Backends for a[m, k] · b[n, k]ᵀ on `device`, fastest first as measured; () where no table says."""
    table = table_of(device)
    if not table:
        return ()
    first, second, tokens = (n, k, m) if b_fmt.block[0] > 1 else (m, n, k)
    key = (device, a_fmt.name, b_fmt.name, first, second, token_bucket(tokens))
    return remember(key, lambda: nearest(table, *key[1:]))


def remember(key: tuple, find: Callable[[], Any]) -> Any:
    """`find()`, found once for a key until tables are read again."""
    found = _remembered.get(key)
    if found is None:
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        found = _remembered[key] = find()
    return found


def token_bucket(tokens: int) -> int:
    """log2 of the power of two that is nearest to `tokens` by ratio; -1 for none."""
    # ⌊log2(2 · tokens²) / 2⌋ rounds log2(tokens) at the geometric middle, in integers.
    return ((2 * tokens * tokens).bit_length() - 1) // 2


def nearest(table: Table, a_format: str, b_format: str, first: int, second: int, bucket: int) -> Ranking:
    """The entry of `table` that is nearest to these features and tokens, as the file's docstring says, or ()."""
    if min(first, second, bucket + 1) < 1:
        return ()
    distances = {
        key: abs(math.log2(first / key[2])) + abs(math.log2(second / key[3]))
        for key in table
        if key[:2] == (a_format, b_format)
    }
    if not distances:
        return ()
    distance, key = min((distance, key) for key, distance in distances.items())
    away, found = min((abs(b - bucket), b) for b in table[key])
    return table[key][found] if distance <= _FEATURE_REACH and away <= _TOKEN_REACH else ()


@functools.cache
def table_of(device: torch.device) -> Table:
    """The shipped table for this kind of device with the user's laid over it; {} where there is neither."""
    name = f"{slug_of(device_name(device))}.json"
    table: Table = {}
    for folder in (lambda: SHIPPED_TABLES, user_folder):
        for key, buckets in _read(folder, name).items():
            table.setdefault(key, {}).update(buckets)
    return table


def user_folder() -> Path:
    """Where the user's own tables lie. Raises RuntimeError where that is in a home directory, and there is none."""
    folder = Path(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/torchao_blockwise")
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise RuntimeError(f"no home directory for {folder}; set {ENVIRONMENT_VARIABLE} to a folder") from error


def forget() -> None:
    """Read the tables again at the next lookup."""
    table_of.cache_clear()
    _remembered.clear()


def device_name(device: torch.device) -> str:
    """The GPU's name, `NVIDIA H200`; the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def slug_of(name: str) -> str:
    """A name in a file name: `NVIDIA H200` -> `nvidia_h200`."""
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def table_entries(entries: list[dict]) -> Table:
    """The table that a file's entries make. Backends that this version does not know are left out.

    Raises for entries that are none, or hold numbers that are no sizes or times.
    """
    known = {backend.value for backend in Backend} - {Backend.AUTO.value}
    table: Table = {}
    for entry in entries:
        a_format, b_format = entry["formats"]
        (first, second), tokens = entry["features"], entry["tokens"]
        times = {backend: us for backend, us in entry["us"].items() if backend in known}
        are_sizes = all(type(x) is int and 0 < x <= sys.maxsize for x in (first, second, tokens))
        if not are_sizes or not all(type(us) in (int, float) and 0 < us < math.inf for us in times.values()):
            raise ValueError(f"features, tokens and times must be numbers above 0, got {reprlib.repr(entry)}")
        if times:
            order = tuple(Backend(backend) for backend in sorted(times, key=times.__getitem__))
            table.setdefault((a_format, b_format, first, second), {})[token_bucket(tokens)] = order
    return table


def _read(folder: Callable[[], Path], name: str) -> Table:
    """The table of that name in `folder()`; {} where there is no file, or, with a warning, where it cannot be used."""
    path: Path | str = name
    try:
        path = folder() / name
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"it has schema {reprlib.repr(content['schema'])}, this version reads {SCHEMA}")
        return table_entries(content["entries"])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except Exception as error:
        # Whatever is wrong with a file must not stop a training run: AUTO works without it.
        remedy = "delete it, or write it again with python -m torchao_blockwise.tune"
        warnings.warn(f"matmul: the table {path} is not used: {type(error).__name__}: {error}; {remedy}", stacklevel=2)
        return {}
