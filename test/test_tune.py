"""The tuner: what it times and checks, and the table it writes, for a CPU, where the reference is the only backend."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from torchao_blockwise import ops, tune
from torchao_blockwise.formats import FP8_1X128, FP8_128X128
from torchao_blockwise.ops import Backend
from torchao_blockwise.ops.matmul import choice
from torchao_blockwise.testing import assert_bitwise_equal, relative_error
from torchao_blockwise.tuning import products, tables, timing
from torchao_blockwise.tuning.products import KINDS, RECIPES, Product, error_budget, product_error
from torchao_blockwise.tuning.shapes import LAYERS, features_of
from torchao_blockwise.tuning.timing import Timing, host_time, input_sets, set_count, time_eager, time_runs

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(choice.ENVIRONMENT_VARIABLE, str(tmp_path))
    choice.forget()
    yield tmp_path
    choice.forget()


# --- timing -----------------------------------------------------------------------------------------------------------


def test_a_timing_is_median_and_quartiles():
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5, False)
    assert Timing.of([7.0], captured=True) == Timing(7.0, 7.0, 7.0, 1, True)
    with pytest.raises(ValueError, match="no samples"):
        Timing.of([])


@pytest.mark.parametrize(
    ("nbytes", "count"),
    ((0, 1024), (1, 1024), (10**6, 240), (120 * 10**6, 4), (2**30, 4), (2**31, 2), (2**33, 1)),
)
def test_input_sets_overflow_the_cache_and_not_the_memory(nbytes, count):
    assert set_count(nbytes, cache_bytes=60 * 10**6) == count


def test_inputs_are_fresh_in_every_set(monkeypatch):
    monkeypatch.setattr(timing, "set_count", lambda nbytes, cache: 3 if nbytes == 64 else 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: type("", (), {"L2_cache_size": 1})())
    sets = input_sets(lambda: (torch.randn(8), [torch.randn(8)]), "cuda")
    assert len({float(x[0]) for x, _ in sets}) == 3
    assert len(input_sets(lambda: (torch.randn(8),), "cpu")) == 1


def test_runs_are_timed_side_by_side_and_a_failure_leaves_the_others_alone():
    turns = []

    def run(name, x):
        turns.append(name)
        if name == "broken":
            raise RuntimeError("out of luck\nat line 3")
        return x + 1

    sets = [(torch.ones(4),)]
    runs = {name: (lambda x, name=name: run(name, x), sets) for name in ("a", "broken", "b")}
    times = time_runs(runs, CPU, seconds=0.0)
    assert list(times) == ["a", "broken", "b"] and times["broken"] == "RuntimeError: out of luck"
    assert times["a"].us > 0 and times["a"].repeats == times["b"].repeats == 5
    assert turns[-6:] == ["a", "b"] * 3


def test_an_output_that_no_replay_writes_is_found():
    out = torch.zeros(300)
    timing._check_written(type("", (), {"replay": lambda self: out.fill_(1.5)})(), [out])
    with pytest.raises(RuntimeError, match="left an output unwritten"):
        timing._check_written(type("", (), {"replay": lambda self: None})(), [(torch.zeros(3), out)])


@pytest.fixture
def stand_in_for_cuda(monkeypatch):
    """A GPU whose graphs call again what was called, and on which each call of `work` takes 3 µs."""
    clock = SimpleNamespace(us=0.0, capturing=None)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.us = clock.us

        def elapsed_time(self, end):
            return (end.us - self.us) / 1e3

    class Graph:
        def replay(self):
            for call in self.calls:
                call()

    @contextlib.contextmanager
    def capture(graph):
        clock.capturing = graph.calls = []
        try:
            yield
        finally:
            clock.capturing = None

    def work(x, out=None):
        out = torch.empty_like(x) if out is None else out

        def launch():
            clock.us += 3
            out.copy_(x)

        launch() if clock.capturing is None else clock.capturing.append(launch)
        return out

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "synchronize": lambda device: None,
        "Stream": lambda device: stream, "current_stream": lambda device: stream,
        "stream": lambda s: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    clock.work = work
    return clock


def test_on_a_gpu_graphs_are_replayed_and_their_time_is_a_calls(stand_in_for_cuda):
    work, sets = stand_in_for_cuda.work, [(torch.randn(8),) for _ in range(4)]

    def uncapturable(x):
        if stand_in_for_cuda.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work(work(x))

    def on_another_stream(x):
        return work(x) if stand_in_for_cuda.capturing is None else torch.empty_like(x)

    def broken(x):
        raise ValueError

    runs = {f.__name__: (f, sets) for f in (work, uncapturable, on_another_stream, broken)}
    times = time_runs(runs, torch.device("cuda"))
    assert times["work"] == Timing(3.0, 3.0, 3.0, 50, True)
    assert times["uncapturable"] == Timing(6.0, 6.0, 6.0, 50, False)
    assert "left an output unwritten" in times["on_another_stream"]
    assert times["broken"] == "ValueError"


def test_eager_and_host_time_are_a_calls():
    for measure in (time_eager, host_time):
        calls = []
        result = measure(lambda calls=calls: calls.append(1), CPU, calls=4, repeats=3)
        assert len(calls) == 3 + 4 * 3 and result.repeats == 3 and 0 < result.us < 1e5


# --- products ---------------------------------------------------------------------------------------------------------

LAYER = (48, 320, 192)  # tokens, N, K


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_layers(kind, recipe):
    tokens, n, k = LAYER
    product = Product(kind, *LAYER, recipe)
    torch.manual_seed(0)
    a, b = product.high_precision(CPU)
    assert (*a.shape, b.shape[0]) == (product.mnk[0], product.mnk[2], product.mnk[1]) and a.shape[1] == b.shape[1]
    stored = {"output": (a, b), "grad_input": (a, b.t()), "grad_weight": (a.t(), b.t())}[kind]
    shapes = {
        "output": ((tokens, k), (n, k)),
        "grad_input": ((tokens, n), (n, k)),
        "grad_weight": ((tokens, n), (tokens, k)),
    }
    assert tuple(tuple(x.shape) for x in stored) == shapes[kind]
    assert all(x.is_contiguous() for x in stored)
    qa, qb = product.quantize(a, b)
    assert (qa.format_name, qb.format_name) == tuple(fmt.name for fmt in product.formats)
    assert product.flops == 2 * tokens * n * k
    out = ops.matmul(qa, qb, out_dtype=torch.bfloat16)
    held = sum(t.nbytes for t in (*qa, *qb, out) if t is not None)
    assert product.nbytes() == held
    assert relative_error(out, a.float() @ b.float().t()) < (0.05 if recipe == "fp8" else 0.2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ((300, 272, 400), (1, 1, 1), (128, 128, 128), (129, 257, 16)), ids=str)
def test_the_error_of_a_right_product_is_within_budget_and_of_a_wrong_one_is_not(kind, recipe, layer):
    product = Product(kind, *layer, recipe)
    a, b = product.operands(CPU)
    for dtype in (torch.bfloat16, torch.float32):
        out = ops.matmul(a, b, out_dtype=dtype)
        assert product_error(out, a, b) < error_budget(product.mnk[2], dtype)
    for row, column in ((0, 0), (-1, -1), (0, -1), (-1, 0)):
        wrong = out.clone()
        wrong[row, column] += out.norm()
        assert product_error(wrong, a, b) > error_budget(product.mnk[2])
        wrong[row, column] = math.nan
        assert product_error(wrong, a, b) == math.inf


def test_products_are_checked_and_timed(monkeypatch):
    times = products.time_product(Product("output", *LAYER), CPU, seconds=0)
    assert list(times) == [Backend.REFERENCE] and times[Backend.REFERENCE].us > 0
    matmul = ops.matmul
    monkeypatch.setattr(ops, "matmul", lambda *args, **kwargs: matmul(*args, **kwargs) * 1.05)
    assert "wrong: relative error 0.05" in products.time_product(Product("output", *LAYER), CPU)[Backend.REFERENCE]


def test_the_reference_is_left_out_where_another_backend_runs(monkeypatch):
    reasons = {Backend.CUBLAS: "no", Backend.TRITON: None, Backend.REFERENCE: None}
    monkeypatch.setattr(products, "candidates", lambda *args: reasons)
    asked, matmul = set(), ops.matmul

    def stand_in(a, b, *, out_dtype, backend):
        asked.add(backend)
        return matmul(a, b, out_dtype=out_dtype, backend="reference")

    monkeypatch.setattr(ops, "matmul", stand_in)
    times = products.time_product(Product("output", 16, 128, 128), CPU, seconds=0)
    assert asked == set(times) == {Backend.TRITON} and times[Backend.TRITON].us > 0


def test_a_backend_that_fails_is_reported_and_left_out(monkeypatch):
    lines = []
    reasons = {Backend.CUBLAS: None, Backend.TRITON: "no", Backend.REFERENCE: None}
    monkeypatch.setattr(products, "candidates", lambda *args: reasons)
    assert tables.tune([Product("output", 16, 128, 128)], CPU, lines.append) == []
    assert "cublas failed (ValueError: matmul: backend cublas cannot run" in lines[0]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_products_that_are_looked_up_alike_are_measured_once():
    square = tables.products_of([(256, 256)], tokens=(64, 65, 4096))
    assert [(p.kind, p.tokens) for p in square] == [
        ("output", 64), ("output", 4096), ("grad_weight", 64), ("grad_weight", 4096),
    ]  # fmt: skip
    both = tables.products_of([(256, 128), (128, 256)], tokens=(64,), recipes=RECIPES)
    assert len(both) == 2 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_finds_the_entry_that_it_wrote(kind, user_folder):
    product = Product(kind, 64, 320, 192)
    assert choice.ranking(*product.formats, *product.mnk, CPU) == ()
    tables.write_table(user_folder, CPU, [tables.entry_of(product, {"triton": 2.0, "reference": 1.0})])
    assert choice.ranking(*product.formats, *product.mnk, CPU) == (Backend.REFERENCE, Backend.TRITON)


def test_a_table_keeps_what_was_measured_with_the_same_versions(user_folder, monkeypatch):
    def write(tokens, us):
        entries = [tables.entry_of(Product("output", tokens, 256, 128), {"reference": us})]
        path, kept = tables.write_table(user_folder, CPU, entries)
        content = json.loads(path.read_text())
        return kept, {e["tokens"]: e["us"]["reference"] for e in content["entries"]}, content

    assert write(64, 1.0)[:2] == (0, {64: 1.0})
    assert write(4096, 2.0)[:2] == (1, {64: 1.0, 4096: 2.0})
    kept, times, content = write(60, 3.0)
    assert (kept, times) == (1, {60: 3.0, 4096: 2.0})
    assert content["gpu"] == "cpu" and content["versions"]["torch"] == torch.__version__
    monkeypatch.setattr(tables, "versions", lambda: {"torch": "99"})
    assert write(64, 4.0)[:2] == (0, {64: 4.0})
    (user_folder / "cpu.json").write_text("[" * 200_000)
    assert write(64, 5.0)[:2] == (0, {64: 5.0})


def test_layers_are_the_models():
    assert (10944, 2048) in features_of() and (576, 7168) in features_of() and (28672, 8192) in features_of()
    assert len(set(features_of())) == len(features_of()) <= sum(map(len, LAYERS.values()))
    assert features_of(["llama_8b"]) == [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_auto_reads(user_folder, capsys):
    argv = ["--device", "cpu", "--model-shapes", "256,128", "--tokens", "16", "64", "--recipes", "fp8"]
    assert tune.main(argv) == 0
    printed = capsys.readouterr().out
    assert "6 products" in printed and "fp8   grad_input  16x128x256: reference" in printed
    assert f"wrote {user_folder / 'cpu.json'}: 6 entries, and 0 that were there" in printed
    assert choice.ranking(FP8_1X128, FP8_128X128, 64, 256, 128, CPU) == (Backend.REFERENCE,)
    a, b = Product("output", 64, 256, 128).operands(CPU)
    named = ops.matmul(a, b, out_dtype=torch.float32, backend="reference")
    assert_bitwise_equal(ops.matmul(a, b, out_dtype=torch.float32), named)


@pytest.mark.parametrize(
    ("argv", "message"),
    (
        ("--model-shapes 256", "must be N,K, the shape of a weight, got '256'"),
        ("--model-shapes 12x4", "must be N,K, the shape of a weight, got '12x4'"),
        ("--model-shapes 256,0", "must be a whole number above 0, got '0'"),
        ("--tokens x", "must be a whole number above 0, got 'x'"),
        ("--models llama_8b --model-shapes 1,1", "not allowed with argument"),
        ("--models gpt", "invalid choice: 'gpt'"),
    ),
)
def test_a_wrong_argument_is_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        tune.main(["--device", "cpu", *argv.split()])
    assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        tune.main([])
    assert exit_info.value.code == 2 and "needs a CUDA GPU" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_refused_before_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        tune.main(["--device", "cpu", "--folder", str(tmp_path / "file" / "tables")])
    assert "choose another --folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("broken", "error"),
    (("tempfile.TemporaryFile", PermissionError("read-only")), ("pathlib.Path.expanduser", RuntimeError())),
    ids=("read-only", "no home"),
)
def test_a_folder_that_cannot_be_written_is_refused_before_measuring(broken, error, monkeypatch, capsys):
    """Broken by hand: root, whom permissions do not stop and who has a home, may run the tests."""

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(broken, refuse)
    monkeypatch.setattr(tune, "tune", lambda *args: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as exit_info:
        tune.main(["--device", "cpu"])
    assert exit_info.value.code == 2 and "choose another --folder" in capsys.readouterr().err


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_times_are_captured_and_near_those_of_a_long_loop():
    device = torch.device("cuda")
    sets = input_sets(lambda: (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16),), device)
    times = time_runs({"copy": (torch.clone, sets), "matmul": (lambda x: x @ x, sets)}, device)
    assert all(t.captured for t in times.values())
    # 64 MiB moved and 137 GFLOP: no GPU does that faster than 10 TB/s and 5 PFLOP/s.
    assert times["copy"].us > 64 * 2**20 / 10e6 and times["matmul"].us > 2 * 4096**3 / 5e9

    def agree() -> bool:
        x = sets[0][0]
        graph = time_runs({"matmul": (lambda x: x @ x, sets)}, device)["matmul"].us
        return graph == pytest.approx(time_eager(lambda: x @ x, device, calls=100).us, rel=0.3)

    # Others, tests among them, may use the GPU at the same time: the two need to agree once.
    assert any(agree() for _ in range(5))


@pytest.mark.gpu
def test_gpu_backends_are_timed():
    times = products.time_product(Product("output", 512, 1024, 512), "cuda")
    assert times and Backend.REFERENCE not in times
    assert all(isinstance(t, Timing) and t.captured for t in times.values()), times
