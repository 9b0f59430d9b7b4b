"""Every benchmark on the GPU, on small shapes: it finds its own results right and has figures for them."""

import json
from dataclasses import replace

import bench_fused
import bench_graphs
import bench_grouped_matmul
import bench_linear
import bench_matmul
import bench_model
import bench_moe
import bench_permute
import bench_quantize
import pytest
import torch
import train_llm
from common.layers import OURS
from llm_cases import MODELS, TEXT
from llm_training import training
from llm_training.data import Corpus

pytestmark = pytest.mark.gpu

# Without peers that compile for long. Ceilings are the real ones, except with --smoke, whose sizes are too small.
RUNS = {
    bench_quantize: "--shapes 512x384x1024 33x96x144 --recipes fp8 nvfp4 --peers",
    bench_fused: "--shapes 512x384x1024 33x96x144",
    bench_matmul: "--shapes 512x384x1024 33x96x144 --recipes fp8 nvfp4 --peers bf16 tensorwise cublaslt",
    bench_grouped_matmul: "--shapes 300x4x256x512 --recipes fp8 nvfp4 --peers bf16",
    bench_linear: "--shapes 512x384x1024 --only fp8 fp8_primary nvfp4 bf16",
    bench_moe: "--shapes 300x4x256x512 --routings empty --only fp8 fp8_primary nvfp4 bf16",
    bench_permute: "--smoke",
    bench_graphs: "--smoke",
    bench_model: "--smoke --modes eager --only fp8 bf16",
}


@pytest.mark.parametrize(("bench", "argv"), RUNS.items(), ids=[bench.__name__ for bench in RUNS])
def test_on_the_gpu(bench, argv, tmp_path):
    assert bench.main([*argv.split(), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    bad = [e for e in content["left out"] if "WRONG" in e["why"] or e["what"] in ("all", "ours", *OURS)]
    assert content["rows"] and bad == []


@pytest.mark.parametrize("options", ("--fuse", "--compile --cuda-graph --recipes bf16 fp8 fp8_fused_once"))
def test_where_whole_steps_go_on_the_gpu(options, text_file, tmp_path):
    argv = f"--preset tiny --throughput --profile --steps 10 --data {text_file} --out {tmp_path} {options}"
    assert train_llm.main(argv.split()) == 0
    (path,) = tmp_path.glob("throughput_tiny_*.json")
    content = json.loads(path.read_text())
    assert content["left out"] == []
    for row in content["rows"]:
        assert 0 < row["products ms"] < row["ms a step"] and row["other ms"] > 0 and row["peak GiB"] > 0
        assert (row["quantization ms"] > 0) == (row["recipe"] != "bf16")


@MODELS
@pytest.mark.parametrize("recipe", ("bf16", "fp8_parameters", "nvfp4_full"))
def test_steps_from_a_graph_train_as_eager_ones(recipe, config):
    """Each with its own batch and learning rate; PyTorch's backward kernels add in any order."""
    device, losses = torch.device("cuda"), []
    corpus = Corpus.from_bytes(TEXT, "text", config.seq_len, config.held_out_sequences)
    for steps_before_capture in (3, config.steps):
        trainer = training.Trainer(recipe, replace(config, cuda_graph=True), device)
        trainer._steps_before_capture = steps_before_capture
        batches = (corpus.batch(config.seed, step, config.batch_size).to(device) for step in range(config.steps))
        losses.append([trainer.step(batch, step).item() for step, batch in enumerate(batches)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(set(losses[0])) == config.steps


def test_memory_of_steps_on_the_gpu(tmp_path):
    """Memory of weights, up to the allocator's rounding, and the order of the peaks."""
    from torchao_blockwise.formats import FP8_128X128

    recipes = ("fp8", "fp8_primary")
    argv = f"--shapes 128x4096x4096 --only bf16 {' '.join(recipes)} --seconds 0.01 --out {tmp_path}"
    assert bench_linear.main(argv.split()) == 0
    (path,) = tmp_path.glob("*.json")
    memory = {row["recipe"]: row["memory"] for row in json.loads(path.read_text())["rows"]}
    high, low, rounding = 2 * 4096 * 4096, FP8_128X128.nbytes(4096, 4096), 2**20
    for recipe, weights in {"bf16": high, "fp8": high, "fp8_primary": low}.items():
        got = memory[recipe]
        assert 0 <= got["weights"] - weights < 2 * rounding, (recipe, got)
        assert 0 <= got["gradients"] - high - 2 * 128 * 4096 < 2 * rounding, (recipe, got)
    assert memory["fp8_primary"]["step"] < memory["fp8"]["step"]
