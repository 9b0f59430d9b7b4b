"""What an import leaves alone, what a conversion installs for FSDP2, and what is refused where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import fsdp_install_checks
import pytest


@pytest.mark.parametrize("check", fsdp_install_checks.CHECKS, ids=lambda check: check.__name__)
def test_fsdp_install(check):
    command = [sys.executable, fsdp_install_checks.__file__, check.__name__]
    # Triton's interpreter, once it runs, replaces what kernels call.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
