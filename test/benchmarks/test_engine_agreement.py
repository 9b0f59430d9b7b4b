"""Agreement with engines: their formulas, what must be equal and what must not, and the table that was written."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", "5.0")

import engine_agreement as bench
from llm.data import Corpus
from report import Report

from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

pytestmark = pytest.mark.usefixtures("no_interpreter", "without_gpu", "one_thread")
TINY = ["--steps", "2", "--hidden", "256", "--layers", "1", "--tokens", "32", "--held-out", "4"]


def corpus() -> Corpus:
    return Corpus.from_bytes(b"def read(path): return open(path).read()\n" * 200, "code", 32, 4)


def test_scales_are_raised_to_powers_of_2():
    x = torch.tensor([1.0, 1.0 + 2**-23, 2.0 - 2**-23, 2.0, 0.75, 2.0**-30, 3e-13])
    expected = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0, 2.0**-30, 2.0**-41])
    assert_bitwise_equal(bench.raised_to_power_of_2(x), expected)


@pytest.mark.parametrize("name", bench.ENGINES)
def test_an_engine_quantizes_each_block_of_a_token(name):
    """One value after the other, by the formula; a block of zeros too."""
    x = random_tensor(3, 256, dtype=torch.bfloat16)
    x[1, :128] = 0
    got = bench.ENGINES[name](x)
    assert got.qdata.shape == (3, 256) and got.scale.shape == (2, 3)
    for token in range(3):
        for block in range(2):
            values = x[token, 128 * block : 128 * (block + 1)].float()
            scale = values.abs().max().clamp(min=1e-10) / 448
            if name == bench.POWERS:
                scale = 2 ** scale.log2().ceil()
            rounded = values * (1 / scale) if name == bench.MULTIPLIES else values / scale
            codes = rounded.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            assert_bitwise_equal(got.qdata[token, 128 * block : 128 * (block + 1)].view(torch.uint8), codes)
            assert_bitwise_equal(got.scale[block, token], scale)


def test_rows():
    rows = list(bench.rows_of(bench.arguments().parse_args(TINY), corpus()))
    by = {(row["training"], row["engine"]): row for row in rows}
    assert len(by) == len(rows) == 2 * (len(bench.ENGINES) + 1)
    alike = by["powers of 2", bench.POWERS]
    assert alike["codes, ppm"] == alike["scales, ppm"] == alike["KL, nats"] == 0
    for name in (bench.DIVIDES, bench.MULTIPLIES):
        close = by["fp32 scales", name]
        assert 0 < close["codes, ppm"] < 5000 and 0 < close["scales, ppm"] < 1e6
        assert by["powers of 2", name]["codes, ppm"] > 100 * close["codes, ppm"]
    assert all("codes, ppm" not in row for (_, engine), row in by.items() if engine == bench.HIGH_PRECISION)
    assert all(row["KL, nats"] > -1e-12 for row in rows)


def test_a_difference_where_none_may_be_ends_the_run(monkeypatch):
    """The control: what is taken for training's way is another one."""
    monkeypatch.setattr(bench, "of_training", lambda powers: bench.ENGINES[bench.MULTIPLIES])
    with pytest.raises(AssertionError, match="KL, nats"):
        next(bench.rows_of(bench.arguments().parse_args(TINY), corpus()))


def test_the_table_is_that_of_the_results():
    path = bench.RESULTS / "engine_agreement_cpu.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    report = Report("engine_agreement", torch.device("cpu"), bench.COLUMNS, {})
    report.rows = written["rows"]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.table() + "\n"
    assert "dirty" not in written["environment"]["commit"]
