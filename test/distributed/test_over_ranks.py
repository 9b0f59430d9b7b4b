"""FSDP2, tensor and expert parallelism, ZeRO and DDP over ranks: bitwise identical to one device."""

import rank_suites

SUITES = ("mesh_cases", "primary_weight_checks", "monitor_run", "fusion_run", "master_weight_checks")
NEEDS = {"fusion_run": (("transformers", "5.0"), ("safetensors.torch",))}
POOLS = ({name: NEEDS.get(name, ()) for name in SUITES},)


@rank_suites.cases_of(POOLS)
def test_over_ranks(case, raised):
    rank_suites.check(case, raised)
