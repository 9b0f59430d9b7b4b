"""Weights that go to engines by broadcasts: trainers and engines in their own processes, by gloo or NCCL, and HTTP."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ranks import gpus, spawn
from sglang_run import CONFIGS, run

# Ranks that train, ranks of each engine, cases.
RUNS = {
    "sharded": (2, [2], [("sends", format) for format in CONFIGS]),
    "two_engines": (1, [1, 1], [("sends", "fp8_block"), ("refused",), ("begun_elsewhere",)]),
    "one_engine": (1, [1], [("not_let_in",), ("beside_a_group_of_a_gpu",)]),
}


@pytest.mark.parametrize(("trainers", "engines", "cases"), RUNS.values(), ids=RUNS)
def test_engines_hold_what_trains(trainers, engines, cases, tmp_path):
    left = spawn(run, trainers + sum(engines), tmp_path, trainers, engines, cases)
    for of_rank in left[:trainers]:
        assert of_rank == dict.fromkeys(cases)


def test_engines_on_gpus_hold_what_trains(tmp_path):
    if gpus() < 2:
        pytest.skip("needs two GPUs, and TORCHAO_BLOCKWISE_TEST_DEVICE=cuda")
    cases = [("sends", format) for format in CONFIGS]
    of_trainer, _ = spawn(run, 2, tmp_path, 1, [1], cases, device_type="cuda")
    assert of_trainer == dict.fromkeys(cases)
