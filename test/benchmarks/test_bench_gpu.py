"""Every benchmark on the GPU, on small shapes: it finds its own results right and has figures for them."""

from __future__ import annotations

import json

import bench_fused
import bench_grouped_matmul
import bench_linear
import bench_matmul
import bench_model
import bench_moe
import bench_permute
import bench_quantize
import pytest
import tune_quantize

pytestmark = pytest.mark.gpu

# Without peers that compile for long. Ceilings are the real ones but for --smoke, which measures what is too small.
RUNS = {
    bench_quantize: "--shapes 512x384x1024 33x96x144 --recipes fp8 nvfp4 --peers",
    bench_fused: "--shapes 512x384x1024 33x96x144",
    bench_matmul: "--shapes 512x384x1024 33x96x144 --recipes fp8 nvfp4 --peers bf16 tensorwise cublaslt",
    bench_grouped_matmul: "--shapes 300x4x256x512 --recipes fp8 nvfp4 --peers bf16",
    bench_linear: "--shapes 512x384x1024 --only fp8 nvfp4 bf16",
    bench_moe: "--shapes 300x4x256x512 --routings empty --only fp8 nvfp4 bf16",
    bench_permute: "--smoke",
    bench_model: "--smoke --modes eager --only fp8 bf16",
}


@pytest.mark.parametrize(("bench", "argv"), RUNS.items(), ids=[bench.__name__ for bench in RUNS])
def test_on_the_gpu(bench, argv, tmp_path):
    assert bench.main([*argv.split(), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    bad = [e for e in content["left out"] if "WRONG" in e["why"] or e["what"] in ("all", "ours", "fp8", "nvfp4")]
    assert content["rows"] and bad == []


def test_ways_to_quantise_have_the_references_bits(capsys):
    assert tune_quantize.main(["--smoke", "--shapes", "512x1024"]) == 0
    printed = capsys.readouterr().out
    assert "| columnwise |" in printed and "WRONG" not in printed
