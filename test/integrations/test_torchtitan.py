"""torchtitan trains its debug models converted, by its own trainer: one rank, FSDP2, TP and EP on two."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3", exc_type=ImportError)

import titan_checks
from helpers import selected_cases
from ranks import spawn

# Options are tested in test_recipes.py.
# (check, arguments.., keywords as a tuple), by one rank and by two: in the default tier, and slow.
ALONE = (
    ("trains_as_by_hand", "llama3", "fp8", ()),
    ("trains_as_by_hand", "deepseek_v3", "fp8", ()),
    ("converter_gives_the_same", "llama3", "fp8", ()),
    ("saves_products", "llama3", "fp8", ()),
    ("refuses", "llama3", "fp8", (("min_features", 9999),), "no layer was converted out of", ()),
)
ALONE_SLOW = (
    ("trains_as_by_hand", "qwen3", "fp8", ()),
    ("trains_as_by_hand", "gpt_oss", "fp8", (("layers", 1),)),
    ("trains_as_by_hand", "llama3", "nvfp4", ()),
    ("compiles", "llama3", "fp8", ()),
    ("saves_products", "deepseek_v3", "fp8", ()),
    ("saves_products", "llama3", "nvfp4", ()),
)
BACKEND = "use --parallelism.spmd_backend partial_dtensor"
CUT, WHOLE = "2880 of 5760 rows, which cuts a block of 128", "scales by the amax of the whole weight"
PAIR = (
    ("trains_as_by_hand", "llama3", "fp8", (("tp", 2),)),
    ("trains_as_by_hand", "deepseek_v3", "fp8", (("ep", 2),)),
    ("saves_and_resumes", "llama3", "fp8", ()),
    ("refuses", "llama3", "fp8", (), BACKEND, (("tp", 2), ("backend", "spmd_types"))),
    ("refuses", "gpt_oss", "fp8", (), CUT, (("tp", 2), ("layers", 1))),
    ("refuses", "deepseek_v3", "nvfp4", (("keep_last_blocks", 0),), WHOLE, (("tp", 2),)),
)
PAIR_SLOW = (
    *(("trains_as_by_hand", family, "fp8", ()) for family in ("llama3", "qwen3", "deepseek_v3")),
    *(("trains_as_by_hand", family, "fp8", (("tp", 2),)) for family in ("qwen3", "deepseek_v3")),
    ("trains_as_by_hand", "llama3", "nvfp4", (("tp", 2),)),
    ("trains_as_by_hand", "gpt_oss", "fp8", (("layers", 1),)),
    ("trains_as_by_hand", "gpt_oss", "fp8", (("ep", 2), ("layers", 1))),
    ("saves_products", "llama3", "fp8", ()),
    ("saves_products", "deepseek_v3", "fp8", (("ep", 2),)),
    *(("saves_and_resumes", family, "fp8", ()) for family in ("qwen3", "deepseek_v3")),
    ("saves_and_resumes", "gpt_oss", "fp8", (("layers", 1),)),
    ("saves_and_resumes", "deepseek_v3", "fp8", (("ep", 2),)),
)
CASES = [(count, case) for count, cases in ((1, ALONE), (2, PAIR)) for case in cases]
SLOW = [(count, case) for count, cases in ((1, ALONE_SLOW), (2, PAIR_SLOW)) for case in cases]


def case_id(case) -> str:
    count, (check, *arguments, how) = case
    words = [str(x) for x in (*arguments[:2], *(x for pair in how for x in pair), *arguments[2:3])]
    return "-".join([check, *words, f"{count}_ranks"])


@pytest.fixture(scope="module")
def raised(request, tmp_path_factory) -> dict:
    """{(ranks, case): what each rank raised}: all cases of as many ranks run in one set of processes."""
    found = {}
    for count in (1, 2):
        cases = [case for of, case in selected_cases(request) if of == count]
        folder = tmp_path_factory.mktemp(f"titan_{count}")
        left = spawn(titan_checks.run, count, folder, cases, str(folder)) if cases else []
        found |= {(count, case): [(x or {}).get(case, "not reached") for x in left] for case in cases}
    return found


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)], ids=case_id)
def test_training(case, raised):
    assert raised[case] == [None] * case[0]
