"""Frameworks over ranks: bitwise identical to the same steps by hand, and after a run resumes."""

import rank_suites

TRANSFORMERS, ACCELERATE, LIGHTNING = ("transformers", "5.0"), ("accelerate", "1.6"), ("lightning", "2.4")
SAFETENSORS = ("safetensors.torch",)
TITAN = ("torchtitan.config.override", None, "needs torchtitan 0.3")
# Each in processes that no other framework has changed.
POOLS = (
    {"pretrained_checks": (TRANSFORMERS, SAFETENSORS)},
    {"trainer_checks": (ACCELERATE, TRANSFORMERS), "accelerate_checks": (ACCELERATE, TRANSFORMERS, SAFETENSORS)},
    {"lightning_checks": (LIGHTNING,)},
    {"titan_checks": (TITAN,)},
    {"deepspeed_checks": (("deepspeed_checks",),)},
    {"rollout_checks": (("vllm_source",), TRANSFORMERS, SAFETENSORS, ("triton",))},
)


@rank_suites.cases_of(POOLS)
def test_over_ranks(case, raised):
    rank_suites.check(case, raised)
