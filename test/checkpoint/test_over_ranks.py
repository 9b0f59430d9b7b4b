"""Exports of models that ranks share: the bytes of the model on one device."""

import rank_suites

POOLS = ({"export_checks": (("safetensors.torch",),)},)


@rank_suites.cases_of(POOLS)
def test_bytes_are_those_of_one_device(case, raised):
    rank_suites.check(case, raised)
