"""A thousand damaged checkpoints, in a process of their own: a read out of bounds ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import triton

SCRIPT = Path(__file__).with_name("fuzz_checkpoints.py")


def version(package) -> tuple[int, ...]:
    return tuple(map(int, package.__version__.split(".")[:2]))


pytestmark = pytest.mark.skipif(
    version(triton) < (3, 7) and version(numpy) >= (2, 4), reason="the interpreter of Triton 3.6 needs numpy < 2.4"
)


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_damaged_files_are_refused_or_multiply_in_bounds():
    done = run("--count", "1000")
    assert done.returncode in (0, 1), done.stderr[-2000:]
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert result["failures"] == []
    totals = result["totals"]
    # Undamaged files load, damage is refused often, and often harmless.
    assert totals["none: multiplied"] == 50
    assert totals["usual: refused"] > 300 and totals["usual: multiplied"] > 5
    assert totals["bytes: refused"] > 60 and totals["bytes: multiplied"] > 5
    assert result["layouts"] > 20


@pytest.mark.skipif(sys.platform != "linux", reason="pages are forbidden by mprotect")
def test_a_read_out_of_bounds_is_noticed():
    assert run("--overrun").returncode == -signal.SIGSEGV
