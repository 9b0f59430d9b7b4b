"""Tables of measured times: made for a set of layers, and written where AUTO finds them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import torch

from torchao_blockwise.ops.matmul import choice
from torchao_blockwise.tuning.products import KINDS, Product, time_product
from torchao_blockwise.tuning.timing import Timing

# No count of tokens up to 128 Ki is farther than a factor of 2 from one of these.
TOKENS = (64, 256, 1024, 4096, 16384, 65536)


def products_of(
    layers: Iterable[tuple[int, int]], tokens: Iterable[int] = TOKENS, recipes: Iterable[str] = ("fp8",)
) -> list[Product]:
    """The products that layers (N, K) train with at these counts of tokens; of those that AUTO looks up alike, one."""
    tokens, recipes = list(tokens), list(recipes)
    found: dict[tuple, Product] = {}
    for n, k in layers:
        for kind in KINDS:
            for count in tokens:
                for recipe in recipes:
                    product = Product(kind, count, n, k, recipe)
                    found.setdefault(_key(entry_of(product, {})), product)
    return list(found.values())


def entry_of(product: Product, us: dict[str, float]) -> dict:
    """The table's entry of times `us` in microseconds of each backend."""
    m, n, k = product.mnk
    a_fmt, b_fmt = product.formats
    features = (m, n) if product.kind == "grad_weight" else (n, k)
    us = {backend: round(value, 3) for backend, value in us.items()}
    return {"formats": [a_fmt.name, b_fmt.name], "features": [*features], "tokens": product.tokens, "us": us}


def tune(products: Iterable[Product], device: torch.device | str, report: Callable[[str], None] = print) -> list[dict]:
    """Entries with the times of every backend that can compute these products on `device`; a line each to `report`."""
    entries = []
    for product in products:
        times = time_product(product, device)
        us = {b.value: t.us for b, t in times.items() if isinstance(t, Timing)}
        failed = [f"{b} failed ({t})" for b, t in times.items() if isinstance(t, str)]
        shown = [f"{backend} {value:.1f} us" for backend, value in sorted(us.items(), key=lambda item: item[1])]
        m, n, k = product.mnk
        report(f"{product.recipe:5} {product.kind:11} {m}x{n}x{k}: {', '.join(shown + failed)}")
        if us:
            entries.append(entry_of(product, us))
    return entries


def write_table(folder: Path, device: torch.device | str, entries: Iterable[dict]) -> tuple[Path, int]:
    """Write the table of `device` into `folder`; (its path, entries kept of the table that was there).

    Entries that were there stay, but for those measured again, if they were measured with the same versions.
    """
    name = choice.device_name(torch.device(device))
    path = folder / f"{choice.slug_of(name)}.json"
    content = {"schema": choice.SCHEMA, "gpu": name, "versions": versions()}
    old = _entries_in(path, content)
    merged = {_key(entry): entry for entry in [*old, *entries]}
    # Broken entries would be found only when AUTO reads them.
    choice.table_entries(list(merged.values()))
    lines = ",\n".join(json.dumps(merged[key], allow_nan=False) for key in sorted(merged))
    text = json.dumps(content, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n'
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    choice.forget()
    return path, len(merged.keys() & {_key(entry) for entry in old} - {_key(entry) for entry in entries})


def versions() -> dict[str, str | None]:
    """What the times depend on beside the GPU."""
    found: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "torchao_blockwise"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _key(entry: dict) -> tuple:
    """Sorts as formats, features, tokens; equal for entries that AUTO cannot tell apart."""
    return *entry["formats"], *entry["features"], choice.token_bucket(entry["tokens"])


def _entries_in(path: Path, content: dict) -> list[dict]:
    """The entries of the table at `path` that were measured as `content` says; none where there is no usable table."""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        if all(old[name] == value for name, value in content.items()):
            choice.table_entries(old["entries"])
            return old["entries"]
    except Exception:  # whatever is wrong with it: it is written anew
        pass
    return []
