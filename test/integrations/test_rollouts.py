"""Rollouts in vLLM's layers, filled by vLLM's loaders, have the trainer's probabilities up to the activation cast.

pip download vllm==0.33.0 --no-deps && unzip vllm-*.whl -d vllm-source
VLLM_SOURCE=vllm-source pytest -m slow -s test/integrations/test_rollouts.py
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
pytest.importorskip("transformers", "5.0")
pytest.importorskip("triton")

import vllm_source
from ranks import spawn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not vllm_source.IS_THERE, reason="VLLM_SOURCE names no folder with vLLM's sources"),
]


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> dict[str, dict]:
    """Results of the first rank."""
    import rollout_checks

    first, second = spawn(rollout_checks.run, 2, tmp_path_factory.mktemp("rollouts"))
    assert first == second and first is not None
    return first


@pytest.fixture(scope="module")
def divergences(left) -> dict[str, dict[str, float]]:
    """Return a KL divergence for each case and rollout."""
    for case, of_rollouts in left["divergences"].items():
        for rollout, kl in of_rollouts.items():
            print(f"KL(trainer | rollout), {case}, {rollout}: {kl:.3g} nats a token")
    return left["divergences"]


@pytest.mark.parametrize("case", ("fp32 masters", "bf16 forward", "powers of 2"))
def test_rollouts_differ_by_the_activation_cast_only(case, divergences):
    found = divergences[case]
    assert found["cast of training"] == 0
    assert found["cast of vLLM"] < found["decoded weights"]


def test_power_of_two_scales_leave_no_difference(divergences):
    assert divergences["powers of 2"]["cast of vLLM"] == 0


def test_exports_in_bf16_are_other_weights_than_fp32_masters(divergences):
    """If FSDP2 gathers in bf16, training itself quantizes the rounded values."""
    found = divergences["fp32 masters"]
    assert found["exports in bf16"] > 100 * found["cast of vLLM"]
    assert divergences["bf16 forward"]["exports in bf16"] == divergences["bf16 forward"]["cast of vLLM"]


@pytest.mark.parametrize("scales", ("fp32", "powers of 2"))
def test_scales_are_those_of_vllms_kernel(scales, left):
    """Codes are not compared, because the conversion to e4m3 in Triton's interpreter loses carries."""
    assert left["scales"][scales]
