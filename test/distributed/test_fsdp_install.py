"""What an import leaves alone, what a conversion installs for FSDP2, and what is refused where it is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import fsdp_install_checks


@pytest.mark.parametrize("check", fsdp_install_checks.CHECKS, ids=lambda check: check.__name__)
def test_fsdp_install(check):
    command = [sys.executable, fsdp_install_checks.__file__, check.__name__]
    # Triton's interpreter, once it runs, replaces what kernels call.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
