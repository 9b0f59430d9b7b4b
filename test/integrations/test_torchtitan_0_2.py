"""torchtitan 0.2 trains its debug models converted, by its own trainer: one rank, and FSDP2 on two."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("torchtitan.protocols.model_converter", reason="needs torchtitan 0.2", exc_type=ImportError)

import titan_0_2_checks
from helpers import selected_cases
from ranks import spawn

CASES = [
    *((1, (check, "llama3")) for check in titan_0_2_checks.CHECKS),
    (1, ("trains_as_by_hand", "qwen3")),
    (2, ("trains_as_by_hand", "llama3")),
    (2, ("saves_products", "llama3")),
]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> dict:
    """{(ranks, case): what each rank raised}."""
    found = {}
    for count in (1, 2):
        cases = [case for of, case in selected_cases(request) if of == count]
        left = spawn(titan_0_2_checks.run, count, tmp_path_factory.mktemp(f"titan_{count}"), cases) if cases else []
        found |= {(count, case): [(x or {}).get(case, "not reached") for x in left] for case in cases}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'-'.join(case[1])}-{case[0]}_ranks")
def test_training(case, raised):
    assert raised[case] == [None] * case[0]
