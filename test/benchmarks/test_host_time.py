"""benchmarks/host_time.py runs without a GPU, with kernels that are built and not launched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "host_time.py"


def test_prints_a_time_for_every_way_and_piece():
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--repeats", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    times = {row[0]: float(row[1]) for row in rows[1:]}
    ways = ["forward without grad", "forward"]
    ways += ["forward + backward" + how for how in ("", ", weight changed", ", in two threads", ", compiled")]
    ways += [f"experts forward + backward{how}" for how in ("", ", compiled")]
    pieces = ("quantize rowwise", "quantize both", "quantize weight", "transpose", "matmul auto", "matmul triton")
    wanted = {f"{who} {way}" for who in ("bf16", "fp8") for way in ways} | {f"pieces {piece}" for piece in pieces}
    assert times.keys() == wanted
    assert all(time > 0 for time in times.values())
