"""Exports of models that ranks share: the bytes of the model on one device."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from helpers import selected_cases

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("safetensors.torch")

from export_checks import run_cases
from ranks import spawn_cases

FORMATS = ("fp8_block", "nvfp4_compressed_tensors")
# (check, ranks, its arguments)
CASES = [
    *(("gathers_bytes", size, format, masters) for size in (2, 3) for format in FORMATS for masters in (True, False)),
    *(("shards", size, format, masters) for size in (2, 3) for format in FORMATS for masters in (True, False)),
    *(("shards", size, "fp8_block", True, True) for size in (2, 3)),
    ("loads", 3, "fsdp", "fp8_block"),
    *(("loads", 2, kind, format) for kind in ("fsdp", "tensor", "experts") for format in FORMATS),
    *(("joins_sharded_nvfp4", size) for size in (2, 3)),
    *(("reads_what_it_exports", size, kind, format)
      for kind, sizes in {"masters": (2, 3), "quantized": (2, 3), "ddp": (2,), "zero1": (2,), "zero2": (2,)}.items()
      for size in sizes
      for format in FORMATS),
    *(("streams", 2, masters) for masters in (True, False)),
    *(("splits_shards", 4, format) for format in FORMATS),
    *(("spreads_and_shards_experts", 4, dim, format) for dim in (0, 1) for format in FORMATS),
    ("raises_on_all_ranks", 2),
]  # fmt: skip


def on_gpus(case) -> bool:
    """What is counted is the CPU's memory."""
    return case[0] != "streams"


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> dict:
    """By case what each rank of it raised; those of as many ranks run in one group."""
    left: dict = {}
    for size in (2, 3, 4):
        cases = [case for case in selected_cases(request) if case[1] == size]
        folder = tmp_path_factory.mktemp(f"export{size}")
        results = spawn_cases(run_cases, size, folder, cases, lambda case: case[1], on_gpus)
        left |= {case: [of_rank.get(case, "did not run") for of_rank in results] for case in cases}
    return left


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bytes_are_those_of_one_device(case, raised):
    assert raised[case] == [None] * case[1]
