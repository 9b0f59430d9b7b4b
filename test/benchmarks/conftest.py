"""Shared set-up of the benchmarks' tests: where scripts lie, threads, and runs that find no GPU, whatever there is."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._triton import has_triton

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "benchmarks")]


@pytest.fixture
def one_thread():
    """At these sizes threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_gpu(monkeypatch):
    """Scripts, and the processes that they start, run on the CPU: what they are expected to say is known for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # PyTorch would remember what it counted while no GPU is to be seen.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Inductor asks once in a process whether Triton has a GPU: these tests and those behind them each ask again.
    has_triton.cache_clear()
    yield
    has_triton.cache_clear()


@pytest.fixture
def smoke(small_heap, tmp_path):
    """(bench, *argv) -> what its smoke run wrote into its JSON, next to a table."""

    def run(bench, *argv: str) -> dict:
        assert bench.main(["--smoke", "--out", str(tmp_path), *argv]) == 0
        (path,) = tmp_path.glob("*.json")
        content = json.loads(path.read_text())
        assert content["environment"]["torch"] == torch.__version__
        table = path.with_suffix(".md").read_text().split("\n\n")[0].splitlines()
        assert len(table) == 2 + len(content["rows"]) and path.stem.endswith("_cpu")
        return content

    return run


@pytest.fixture
def train_llm_alike(one_thread, small_heap, monkeypatch):
    from llm_training import products

    # The eager reference is far faster than Triton's interpreter, and agrees with it bit for bit.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    # What is expected must not depend on how fast the tester's machine multiplies bf16.
    monkeypatch.setattr(products, "pick", lambda: "bf16")


@pytest.fixture
def text_file(tmp_path) -> Path:
    from llm_cases import TEXT

    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path
