"""AUTO's table: the lookup, its buckets and nearest entries, where tables come from, what a product makes of one."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_1X128, FP8_128X128, NVFP4_1X16, NVFP4_16X16
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops import matmul as matmul_function
from torchao_blockwise.ops.matmul import choice, reference

CPU = torch.device("cpu")
FP8, FP8_ONE_ROW = ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders in the places of the shipped and of the user's tables."""
    monkeypatch.setattr(choice, "SHIPPED_TABLES", tmp_path / "shipped")
    monkeypatch.setenv(choice.ENVIRONMENT_VARIABLE, str(tmp_path / "user"))
    for name in ("shipped", "user"):
        (tmp_path / name).mkdir()
    choice.forget()
    yield tmp_path
    choice.forget()


def entry(features, tokens, formats=FP8, **us):
    return {"formats": list(formats), "features": list(features), "tokens": tokens, "us": us}


def write(folder, *entries, device="cpu", schema=choice.SCHEMA):
    text = json.dumps({"schema": schema, "gpu": device, "entries": entries})
    (folder / f"{choice.slug_of(device)}.json").write_text(text)
    choice.forget()


def ranking(m, n, k, formats=(FP8_1X128, FP8_128X128), device=CPU):
    return [backend.value for backend in choice.ranking(*formats, m, n, k, device)]


# --- the lookup -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, 2, 3, 64, 90, 91, 4095, 4096, 4097, 5792, 5793, 6000, 32768, 10**9))
def test_a_bucket_is_the_nearest_power_of_two(tokens):
    assert choice.token_bucket(tokens) == round(math.log2(tokens))


def test_no_tokens_are_no_bucket():
    assert choice.token_bucket(0) == -1


def test_without_a_table_nothing_is_chosen():
    assert ranking(64, 256, 128) == []


def test_backends_come_fastest_first(folders):
    write(folders / "shipped", entry((256, 128), 64, reference=3.0, cublas=1.0, triton=2.0))
    assert ranking(64, 256, 128) == ["cublas", "triton", "reference"]


def test_features_are_those_of_the_layer_and_tokens_vary(folders):
    write(
        folders / "shipped",
        entry((256, 128), 64, triton=1.0),
        entry((256, 128), 64, formats=FP8_ONE_ROW, reference=1.0),
        entry((256, 128), 64, formats=("nvfp4_1x16", "nvfp4_16x16"), cublas=1.0),
    )
    assert ranking(64, 256, 128) == ["triton"]
    # grad_weight contracts over the tokens.
    assert ranking(256, 128, 64, (FP8_1X128, FP8_1X128)) == ["reference"]
    assert ranking(64, 256, 128, (NVFP4_1X16, NVFP4_16X16)) == ["cublas"]
    assert ranking(64, 256, 128, (NVFP4_1X16, NVFP4_1X16)) == []


BUCKETS = {64: "reference", 4096: "triton", 16384: "cublas"}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    (
        (64, "reference"), (33, "reference"), (16, "reference"), (8, None), (256, "reference"), (512, None),
        (1024, "triton"), (4097, "triton"), (8192, "triton"), (12000, "cublas"), (65536, "cublas"), (131072, None),
        (0, None),
    ),
)  # fmt: skip
def test_the_nearest_bucket_is_taken_up_to_a_factor_of_four(folders, tokens, expected):
    write(folders / "shipped", *(entry((256, 128), t, **{backend: 1.0}) for t, backend in BUCKETS.items()))
    assert ranking(tokens, 256, 128) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("features", "expected"),
    (
        ((1024, 1024), "reference"),
        ((2048, 1024), "triton"),
        ((1024, 1100), "reference"),
        ((1900, 1000), "triton"),
        ((4096, 1024), "triton"),
        ((2900, 1448), None),
        ((512, 1024), "reference"),
        ((512, 512), None),
        ((0, 1024), None),
    ),
)
def test_the_nearest_features_are_taken_up_to_a_factor_of_two(folders, features, expected):
    write(folders / "shipped", entry((1024, 1024), 64, reference=1.0), entry((2048, 1024), 64, triton=1.0))
    assert ranking(64, *features) == ([expected] if expected else [])


def test_a_lookup_is_made_once_a_bucket(folders, monkeypatch):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    calls = []
    nearest = choice.nearest
    monkeypatch.setattr(choice, "nearest", lambda *args: calls.append(args) or nearest(*args))
    for tokens in (64, 60, 70, 64):
        assert ranking(tokens, 256, 128) == ["triton"]
    assert len(calls) == 1


def test_what_is_remembered_does_not_grow_without_end(folders, monkeypatch):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    monkeypatch.setattr(choice, "_MAX_REMEMBERED", 8)
    for n in range(200, 300):
        ranking(64, n, 128)
        assert len(choice._remembered) <= 8


# --- where tables come from -------------------------------------------------------------------------------------------


def test_the_users_entries_come_before_the_shipped_ones(folders):
    shipped = (entry((256, 128), 64, triton=1.0), entry((256, 128), 4096, triton=1.0))
    write(folders / "shipped", *shipped)
    write(folders / "user", entry((256, 128), 60, reference=1.0))
    assert ranking(64, 256, 128) == ["reference"]
    assert ranking(4096, 256, 128) == ["triton"]


def test_the_users_folder(monkeypatch, folders):
    assert choice.user_folder() == folders / "user"
    monkeypatch.delenv(choice.ENVIRONMENT_VARIABLE)
    assert choice.user_folder().parts[-2:] == (".cache", "torchao_blockwise") and choice.user_folder().is_absolute()


def test_a_table_belongs_to_a_kind_of_gpu(folders, monkeypatch):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0), device="NVIDIA H200")
    assert ranking(64, 256, 128) == []
    names = {0: "NVIDIA H200", 1: "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    assert ranking(64, 256, 128, device=torch.device("cuda", 0)) == ["triton"]
    assert ranking(64, 256, 128, device=torch.device("cuda", 1)) == []


def test_slugs():
    assert choice.slug_of("NVIDIA H100 80GB HBM3 (PCIe)") == "nvidia_h100_80gb_hbm3_pcie"


def test_backends_of_other_versions_are_left_out(folders):
    write(folders / "shipped", entry((256, 128), 64, quantum=0.1, triton=1.0), entry((512, 128), 64, quantum=0.1))
    assert ranking(64, 256, 128) == ["triton"]
    assert list(choice.table_of(CPU)) == [(*FP8, 256, 128)]


def with_entry(**changes) -> str:
    """A table whose last entry has these changes."""
    entries = [entry((256, 128), 64, reference=1.0), entry((512, 128), 64, reference=1.0) | changes]
    return json.dumps({"schema": choice.SCHEMA, "entries": entries})


BROKEN = {
    "no JSON": "{",
    "no entries": json.dumps({"schema": choice.SCHEMA}),
    "another schema": json.dumps({"schema": choice.SCHEMA + 1, "entries": []}),
    "a time of zero": json.dumps({"schema": choice.SCHEMA, "entries": [entry((1, 1), 1, triton=0.0)]}),
    "no features": json.dumps({"schema": choice.SCHEMA, "entries": [entry((0, 1), 1, triton=1.0)]}),
    "entries that are none": json.dumps({"schema": choice.SCHEMA, "entries": ["triton"]}),
    "a list": "[]",
    "lists in lists": "[" * 200_000,
    "bytes that are not UTF-8": b"\xff\xfe{",
    "backends that are none": with_entry(us=["triton"]),
    "formats that are none": with_entry(formats=[["fp8_1x128"], {}]),
    **{f"features {x!r}": with_entry(features=[x, 128]) for x in (1e999, float("nan"), -1, 2.5, "256", True, 10**400)},
    **{f"tokens {x!r}": with_entry(tokens=x) for x in (1e999, float("nan"), -1, None, [64], 10**400)},
    **{f"a time of {x!r}": with_entry(us={"triton": x}) for x in (1e999, float("nan"), -1.0, "1.0", True, None)},
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=(name[:30] for name in BROKEN))
def test_a_broken_table_is_named_once_and_not_used(folders, text):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    path = folders / "user" / "cpu.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_named_once(path)


def test_a_folder_in_a_tables_place_is_named_once_and_not_used(folders):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    (folders / "user" / "cpu.json").mkdir()
    assert_named_once(folders / "user" / "cpu.json")


def test_a_table_that_may_not_be_read_is_named_once_and_not_used(folders, monkeypatch):
    """Root, whom permissions do not stop, may run the tests."""
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    read = Path.read_text

    def refused(path, *args, **kwargs):
        if path.parent.name == "user":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    assert_named_once(folders / "user" / "cpu.json")


def test_without_a_home_directory_products_are_computed_all_the_same(folders, monkeypatch):
    write(folders / "shipped", entry((256, 128), 64, triton=1.0))
    monkeypatch.delenv(choice.ENVIRONMENT_VARIABLE)
    monkeypatch.delenv("HOME", raising=False)

    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert_named_once("no home directory", remedy=f"set {choice.ENVIRONMENT_VARIABLE}")


def assert_named_once(what, remedy="python -m torchao_blockwise.tune"):
    """Of two lookups the first warns of the user's table, and both use the shipped one."""
    choice.forget()
    with pytest.warns(UserWarning, match="is not used") as warned:
        assert ranking(64, 256, 128) == ["triton"]
    (message,) = (str(warning.message) for warning in warned)
    assert str(what) in message and remedy in message and len(message) < 600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranking(64, 256, 128) == ["triton"]


# --- what a product makes of it ---------------------------------------------------------------------------------------


@pytest.fixture
def computed_by(monkeypatch):
    """(backend, N) of the products on the CPU that were computed. Triton, first in the fixed order, is a stand-in."""
    triton = pytest.importorskip("torchao_blockwise.ops.matmul.triton")
    monkeypatch.setattr(sys.modules["torchao_blockwise.ops.matmul"], "why_no_triton", lambda device: None)
    calls, matmul = [], reference.matmul
    for name, module in {"reference": reference, "triton": triton}.items():

        def compute(a, a_scale, a_global, b, *args, name=name):
            calls.append((name, b.shape[0]))
            return matmul(a, a_scale, a_global, b, *args)

        monkeypatch.setattr(module, "matmul", compute)
    return calls


def product(m=64, n=256, k=128, backend=None):
    x, w = torch.randn(m, k), torch.randn(n, k)
    a, b = ops.quantize(x, FP8_1X128, backend="reference"), ops.quantize(w, FP8_128X128, backend="reference")
    return matmul_function(a, b, out_dtype=torch.float32, backend=backend)


def test_auto_takes_the_fastest_and_without_an_entry_keeps_its_order(folders, computed_by):
    product()
    write(folders / "shipped", entry((256, 128), 64, reference=1.0, triton=2.0))
    product()
    product(n=1024)
    assert computed_by == [("triton", 256), ("reference", 256), ("triton", 1024)]


def test_auto_takes_the_next_where_the_fastest_cannot_run(folders, computed_by):
    write(folders / "shipped", entry((256, 128), 64, cublas=1.0, reference=2.0, triton=3.0))
    with pytest.warns(UserWarning, match="auto uses reference instead of cublas: it needs a CUDA device"):
        ops.backend._warned.clear()
        product()
    write(folders / "shipped", entry((256, 128), 64, cublas=1.0))
    product()
    assert computed_by == [("reference", 256), ("triton", 256)]


def test_a_named_backend_is_not_looked_up(folders, computed_by, monkeypatch):
    write(folders / "shipped", entry((256, 128), 64, reference=1.0))
    product(backend=Backend.AUTO)
    monkeypatch.setattr(choice, "ranking", lambda *args: pytest.fail("looked up"))
    product(backend="triton")
    assert computed_by == [("reference", 256), ("triton", 256)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_graph_chooses_when_it_runs(folders, computed_by):
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    compiled()
    write(folders / "shipped", entry((256, 128), 64, reference=1.0))
    compiled()
    assert computed_by == [("triton", 256), ("reference", 256)]


def test_a_choice_is_found_once_until_tables_are_read_again():
    found = []

    def find():
        found.append(len(found))
        return found[-1]

    assert [choice.remember(("key",), find), choice.remember(("key",), find)] == [0, 0]
    choice.forget()
    assert choice.remember(("key",), find) == 1
    choice.forget()
