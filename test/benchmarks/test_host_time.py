"""benchmarks/host_time.py runs without a GPU, with kernels that are built and not launched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "host_time.py"


def test_prints_a_time_for_every_way(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--seconds", "0.001", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    times = {(row[0], row[1]): float(row[2].replace(",", "")) for row in rows[1:]}
    ways = ("forward without grad", "forward", "forward + backward", "forward + backward, compiled")
    wanted = {(who, f"{layer}{way}") for who in ("bf16", "fp8_128x128") for layer in ("", "experts ") for way in ways}
    assert times.keys() == wanted
    assert all(time > 0 for time in times.values())
