"""Engines' own kernels: functions out of source files, what is said where they are not there, and what is tallied.

Engines are not installed here: a file written by these tests stands for theirs.
"""

from __future__ import annotations

import inspect
import json

import pytest
import torch

pytest.importorskip("transformers", "5.0")
pytest.importorskip("safetensors")
pytest.importorskip("triton")

import engine_kernels as bench
import engine_source
from engines import BLOCK, ENGINES, Engine, Ours
from report import RESULTS, Report

from torchao_blockwise import ops
from torchao_blockwise.formats import FP8_128X128

TINY = "--steps 2 --hidden 256 --layers 1 --tokens 32 --held-out 4 --shapes 5x200x256"
# Most of it must not run: packages that do not exist, and a platform that nobody has.
SOURCE = """
import an_engine_that_is_not_there
from another import current_platform, triton, tl, helper

BASE = 3
NOISE = an_engine_that_is_not_there.start()


@triton.jit
def _add_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 3, mask=at < n)


def add(x: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    if current_platform.is_special():
        return helper(x)
    out = torch.empty_like(x)
    _add_kernel[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


def imported(x):
    from an_engine_that_is_not_there.deep import twice

    return twice(x) + BASE


def quantize(x, block):
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1) / 448
    return (blocks / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn), scale


def multiply(codes, scales, weight, weight_scale, block, dtype):
    spread = weight_scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    a = codes.float() * scales.repeat_interleave(block, 1)
    return (a @ (weight.float() * spread[: weight.shape[0]]).T).to(dtype)
"""


class StandIn(Engine):
    package, name, files = "stand_in", "Stand-in", ("stand_in/kernels.py",)
    factor = 1.0

    def load(self, source):
        self.functions = source.functions(self.files[0], ["quantize", "multiply"])

    def quantize(self, x, powers):
        return Ours().quantize(x, True) if powers else self.functions.quantize(x, BLOCK[1])

    def multiply(self, codes, scales, weight, dtype):
        return self.factor * self.functions.multiply(codes, scales, *weight, BLOCK[1], dtype)


class Broken(StandIn):
    name = "Broken"

    def linear(self, x, weight, powers):
        raise RuntimeError("no kernel image")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "kernels.py").write_text(SOURCE)
    (tmp_path / "stand_in-1.2.dist-info").mkdir()
    (tmp_path / "stand_in-1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.2\n"
    )
    return tmp_path


def functions(root, *wanted, **given):
    return engine_source.Source.of("stand_in", root).functions("stand_in/kernels.py", wanted, **given)


class Platform:
    special = False

    def is_special(self):
        return self.special


def test_kernels_of_a_file_run_without_its_imports(root, device):
    found = functions(root, "add", "_add_kernel", current_platform=Platform())
    x = torch.arange(5.0, device=device)
    assert vars(found).keys() == {"add", "_add_kernel"}
    torch.testing.assert_close(found.add(x), x + 3, rtol=0, atol=0)
    # As Triton reads a kernel's text when it compiles it.
    text = inspect.getsource(found.add)
    assert text in SOURCE and text.startswith("def add(x: torch.Tensor")


def test_imports_inside_of_functions_are_replaced(root):
    class Deep:
        twice = staticmethod(lambda x: 2 * x)

    assert functions(root, "imported", "BASE", imports={"an_engine_that_is_not_there.deep": Deep}).imported(4) == 11
    with pytest.raises(ModuleNotFoundError, match="an_engine_that_is_not_there"):
        functions(root, "imported", "BASE").imported(4)


def test_a_name_that_nobody_gave_raises_where_it_is_used(root):
    platform = Platform()
    platform.special = True
    add = functions(root, "add", "_add_kernel", current_platform=platform).add
    with pytest.raises(NameError, match=r"kernels\.py uses helper, which nobody gave \(version 1\.2\); give a version"):
        add(torch.zeros(1))
    with pytest.raises(NameError, match="uses current_platform"):
        functions(root, "add", "_add_kernel").add(torch.zeros(1))


def test_what_is_missing_is_named(root):
    with pytest.raises(ValueError, match=r"kernels\.py does not define divide \(version 1\.2\); give a version that"):
        functions(root, "add", "divide")
    (root / "stand_in" / "kernels.py").unlink()
    with pytest.raises(ValueError, match=r"kernels\.py is missing, wanted for add, divide \(version 1\.2\)"):
        functions(root, "add", "divide")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_not_in_the_folder(name, tmp_path):
    with pytest.raises(ValueError, match=f"{ENGINES[name].package}.*--source"):
        ENGINES[name](tmp_path)


@pytest.mark.usefixtures("no_interpreter", "without_gpu")
@pytest.mark.parametrize("powers", [False, True], ids=bench.SCALES.get)
def test_layers_tally_what_differs(root, powers):
    engine = StandIn(root)
    assert engine.label == "Stand-in 1.2" and list(engine.sources) == ["stand_in/kernels.py"]
    weight = ops.quantize(torch.randn(200, 256), FP8_128X128, power_of_2_scales=powers).rowwise
    shape, stored = bench.Shape(16, 200, 256), (weight.qdata, weight.scale)

    row = bench.layer_row(bench.Case(engine, powers, powers), shape, stored)
    # The same products but for the order of sums, so for bf16's last bit.
    assert row["product, ‖·‖"] < 1e-3 and row["weights, ppm"] == 0 and row["layer"] == "16×200×256"
    if powers:
        assert row["codes, ppm"] == row["scales, ppm"] == 0 and row["output, ‖·‖"] == row["product, ‖·‖"]
    else:
        assert 0 < row["scales, ppm"] < 1e6 and row["codes, ppm"] < 5000 and row["output, ‖·‖"] < 1e-2

    engine.factor = 2.0
    row = bench.layer_row(bench.Case(engine, powers, powers), shape, stored)
    assert row["outputs, %"] == 100
    assert row["product, ‖·‖"] == pytest.approx(0.5, abs=1e-3) == row["output, ‖·‖"]


@pytest.mark.usefixtures("no_interpreter", "without_gpu", "one_thread")
def test_reports(root, tmp_path, monkeypatch, capsys):
    """Of layers and of a model: the control differs in nothing, and an engine that fails stops no other."""
    monkeypatch.setitem(ENGINES, "stand-in", StandIn)
    monkeypatch.setitem(ENGINES, "broken", Broken)
    text = tmp_path / "text.txt"
    text.write_text("def read(path): return open(path).read()\n" * 200)
    out = tmp_path / "results"
    argv = [*TINY.split(), "--engines", "broken", "stand-in", "--source", str(root), "--data", str(text)]
    assert bench.main([*argv, "--out", str(out)]) == 0
    assert "no kernel image" in capsys.readouterr().err
    for name, columns, modes in (("engine_layers", bench.LAYERS, 1), ("engine_kernels", bench.MODEL, 2)):
        written = json.loads((out / f"{name}_cpu.json").read_text())
        assert written["arguments"]["sources"]["Stand-in 1.2"].keys() == {"stand_in/kernels.py"}
        control = [row for row in written["rows"] if row["engine"].startswith("this package")]
        assert len(control) == 2 and all(row[c] == 0 for row in control for c in columns if "," in c)
        others = [row for row in written["rows"] if row["engine"].startswith("Stand-in 1.2, ")]
        assert len(others) == 2 * modes and len(written["rows"]) == 2 + len(others)
        assert all(row["output, ‖·‖"] < 0.1 for row in others)
        (alike,) = (row for row in others if (row["training"], row["engine"][14:]) == ("powers of 2", "powers of 2"))
        assert alike["codes, ppm"] == alike["scales, ppm"] == 0
        assert all(row["scales, ppm"] > 0 for row in others if row is not alike)
        assert {note["what"] for note in written["left out"]} == {"Broken 1.2, fp32 scales", "Broken 1.2, powers of 2"}
    assert all(abs(row["KL, nats"]) < 1e-3 for row in others) and any(row["KL, nats"] for row in others)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("engine_[kl]*.json")), ids=lambda path: path.stem)
def test_tables_are_those_of_the_results(path):
    written = json.loads(path.read_text(encoding="utf-8"))
    report = Report(path.stem, torch.device("cpu"), bench.LAYERS if "layers" in path.stem else bench.MODEL, {})
    report.rows = written["rows"]
    assert path.with_suffix(".md").read_text(encoding="utf-8").split("\n\n")[0].strip() == report.table()
    assert "dirty" not in written["environment"]["commit"]
