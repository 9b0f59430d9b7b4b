"""`from_pretrained` over two ranks: every rank reads its shards, or the first one sends them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("transformers", "5.0")

import pretrained_checks
from helpers import selected_cases
from ranks import spawn

CT = "nvfp4_compressed_tensors"
CASES = [("every_rank_reads", "Qwen3", "fp8_block", "full"), ("every_rank_reads", "Qwen3Moe", CT, "adapters")]
CASES += [("the_first_rank_sends", "Qwen3", "fp8_block"), ("all_ranks_raise", "Qwen3", "fp8_block")]
SLOW = [("every_rank_reads", "Qwen3", CT, "full"), ("every_rank_reads", "Qwen3Moe", "fp8_block", "adapters")]
WITH_PEFT = [("adapters_are_sharded", "Qwen3", "fp8_block"), ("adapters_are_sharded", "Llama", "nvfp4_modelopt")]


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> list[dict]:
    return spawn(pretrained_checks.run, 2, tmp_path_factory.mktemp("pretrained"), selected_cases(request))


def check(case, raised) -> None:
    assert [(of_rank or {}).get(case, "not reached") for of_rank in raised] == [None, None]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids="-".join)
def test_a_model_is_sharded_before_it_has_values(case, raised):
    check(case, raised)


@pytest.mark.slow
@pytest.mark.parametrize("case", WITH_PEFT, ids="-".join)
def test_adapters(case, raised):
    pytest.importorskip("peft")
    check(case, raised)
