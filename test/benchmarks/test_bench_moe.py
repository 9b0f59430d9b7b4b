"""bench_moe.py on tiny shapes on the CPU: what it checks, measures and leaves out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import bench_moe
import experts
import peers
import pytest
import torch
from experts import MODELS, ROUTINGS, Experts, group_ends

from torchao_blockwise.testing import relative_error

pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread", "without_gpu")
CPU = torch.device("cpu")
SHAPE = Experts(40, 3, 128, 128)
ARGUMENTS = ("--shapes", str(SHAPE), "--routings", "empty")


def run(folder: Path, *argv: str) -> dict:
    assert bench_moe.main(["--smoke", "--out", str(folder), *ARGUMENTS, *argv]) == 0
    assert {p.name for p in folder.iterdir()} == {"moe_cpu.json", "moe_cpu.md", "moe_cpu.png"}
    return json.loads((folder / "moe_cpu.json").read_text())


def test_a_row_for_each_recipe_and_a_reason_for_what_is_not_there(tmp_path):
    content = run(tmp_path, "--only", "fp8", "bf16", "torchao")
    fp8, bf16 = content["rows"]
    assert (fp8["shape"], fp8["routing"], fp8["recipe"], bf16["recipe"]) == (str(SHAPE), "empty", "fp8", "bf16")
    assert fp8["x bf16"] == pytest.approx(bf16["us"] / fp8["us"]) and "x bf16" not in bf16
    assert 0 < fp8["error"] < 0.15 and bf16["error"] == 0
    flops = 18 * SHAPE.tokens * SHAPE.hidden * SHAPE.dim
    assert fp8["TFLOP/s"] == pytest.approx(flops / fp8["us"] / 1e6)
    assert 0 < fp8["quantise %"] < 100 and bf16["quantise %"] == 0
    assert [e["why"] for e in content["left out"] if e["what"] == "torchao"] == ["needs sm_90, got cpu"]


def test_wrong_gradients_are_not_timed(tmp_path, monkeypatch):
    original = bench_moe.make_layer

    def wrong(shape, recipe, ends):
        layer = original(shape, recipe, ends)
        if recipe == "fp8":
            step = layer.step
            layer.step = lambda x, dy: (*step(x, dy)[:-1], step(x, dy)[-1] * 1.5)
        return layer

    monkeypatch.setattr(bench_moe, "make_layer", wrong)
    content = run(tmp_path, "--only", "fp8", "bf16")
    assert [row["recipe"] for row in content["rows"]] == ["bf16"]
    assert "WRONG, relative error 0.5" in content["left out"][0]["why"]


@pytest.mark.parametrize("recipe", ("fp8", "fp8_primary", "nvfp4", "bf16_compiled"))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_recipe_computes_what_bf16_does(recipe, routing):
    ends = group_ends(routing, 40, 3, CPU)
    x, dy = (torch.randn(40, 128, dtype=torch.bfloat16) for _ in range(2))
    layers = [bench_moe.make_layer(SHAPE, name, ends) for name in ("bf16", recipe)]
    expected, got = (layer.step(x.requires_grad_(), dy) for layer in layers)
    assert len(got) == 4
    assert max(relative_error(a, b) for a, b in zip(got, expected)) < bench_moe._BUDGETS[recipe]


def test_recipes_of_ours_in_fp8_have_the_same_weights():
    ends = group_ends("skewed", 40, 3, CPU)
    x, dy = (torch.randn(40, 128, dtype=torch.bfloat16) for _ in range(2))
    recipes = ("fp8", "fp8_primary")
    steps = [bench_moe.make_layer(SHAPE, recipe, ends).step(x.requires_grad_(), dy) for recipe in recipes]
    assert all(torch.equal(a, b) for step in steps[1:] for a, b in zip(step, steps[0], strict=True))


def test_bytes_that_must_move():
    ends = group_ends("empty", 40, 3, CPU)
    x, weight = 40 * 128, 3 * 128 * 128
    # One expert of three has tokens; the gradients of all are written.
    assert bench_moe.floor_bytes(SHAPE, ends) == 2 * (4 * x + weight + 3 * weight)


# --- routings and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", (1, 3, 128), ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_an_expert(routing, count):
    ends = group_ends(routing, 1000, count, CPU)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32 and ends[-1] == 1000 and (sizes >= 0).all()
    if count > 1:
        spread = (sizes.max() / sizes.float().mean()).item()
        assert {"balanced": spread < 1.1, "skewed": spread > 1.5, "empty": (sizes == 0).sum() >= count // 2}[routing]


def test_shapes_are_those_of_the_models():
    deepseek = MODELS["deepseek_v3_671b_ep8"]
    assert deepseek.weights == {"gate_up": (32, 4096, 7168), "down": (32, 7168, 2048)}
    assert experts.parse("mixtral_8x7b") == [Experts(16384, 8, 14336, 4096)]
    assert experts.parse("5x4x3x2") == [Experts(5, 4, 3, 2)] and len(experts.parse("all")) == len(MODELS)
    for text in ("mixtral", "5x4x3", "5x4x3x0", "5x4x3xa"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"no experts '{text}'; give tokens x experts x hidden"):
            experts.parse(text)


def test_the_peer_needs_hopper():
    with pytest.raises(peers.Unavailable, match="needs sm_90, got cpu"):
        peers.torchao_grouped_product(CPU, (128,))


def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench_moe.main([])
    assert exit_info.value.code == 2 and "needs a CUDA GPU" in capsys.readouterr().err
