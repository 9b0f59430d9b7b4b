"""`weights_unchanged`: each weight is quantized once inside, changes raise, and nothing is left behind."""

import copy
import gc
import importlib
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FP8,
    NVFP4,
    Tied,
    assert_same,
    both_formats,
    converted,
    mlp,
    replace,
    saved_and_loaded,
    weight_calls,
)
from machines import Machine
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchao.quantization import quantize_

from torchao_blockwise import weights_unchanged
from torchao_blockwise._compat import modes


@pytest.fixture
def calls():
    with weight_calls() as calls:
        yield calls


def take(calls) -> tuple[int, int, int]:
    """How often weights were quantized rowwise, columnwise and transposed since the last call."""
    counts = calls.quantize - calls.columnwise, calls.columnwise, calls.transpose
    calls.quantize = calls.columnwise = calls.transpose = 0
    return counts


def tokens(seed: int = 0):
    return torch.randn(30, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def passes(model, count: int = 3, run=None):
    """Gradients of all parameters after some microbatches."""
    model.zero_grad()
    for i in range(count):
        (run or model)(tokens(i)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def kept_bytes(model) -> int:
    return sum(m.weight.quantized_bytes for m in model.modules() if isinstance(m, nn.Linear))


def assert_nothing_is_left(model) -> None:
    assert kept_bytes(model) == 0
    assert not any(hasattr(m.weight.hp, "kept_copies") for m in model.modules() if isinstance(m, nn.Linear))


def test_compiled_layers_are_not_compiled_again(fresh_dynamo):
    model = mlp(FP8)
    run = torch.compile(model, fullgraph=True)
    passes(model, 1, run)
    with weights_unchanged(model):
        passes(model, 1, run)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            passes(model, 1, run)
            with weights_unchanged(model, keep="both"):
                passes(model, 1, run)


CHANGES = {
    "data": lambda m: m[0].weight.data.mul_(2),
    "hp": lambda m: m[0].weight.hp.mul_(2),
    "optimizer": lambda m: torch.optim.SGD([m[0].weight], lr=1.0).step(),
    "compiled_optimizer": lambda m: torch.compile(torch.optim.SGD([m[0].weight], lr=1.0).step)(),
    "load": lambda m: m.load_state_dict(mlp(seed=1).state_dict()),
}
REPLACEMENTS = {
    "set_data": lambda m: setattr(m[0].weight, "data", torch.zeros(160, 64)),
    "load_assigned": lambda m: m.load_state_dict(mlp(seed=1).state_dict(), assign=True),
    "plain": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(160, 64))),
    "swapped": lambda m: torch.utils.swap_tensors(m[0].weight, mlp(FP8, seed=1)[0].weight),
}


@pytest.mark.filterwarnings("ignore:.*its weight was replaced")
@pytest.mark.parametrize("change", (CHANGES | REPLACEMENTS).values(), ids=[*CHANGES, *REPLACEMENTS])
@pytest.mark.parametrize("when", ("next use", "exit"))
def test_a_change_inside_raises_with_the_name(change, when, fresh_dynamo):
    """A weight in the place of another is used as it is, and raises at the end."""
    model = mlp(FP8)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    changed = change in CHANGES.values()
    message = rf"weights_unchanged: 0\.weight was {'changed' if changed else 'replaced'} inside the scope"
    with pytest.raises(RuntimeError, match=message), weights_unchanged(model):
        with torch.no_grad():
            model(tokens())
            change(model)
        if when == "next use":
            assert torch.equal(model(tokens()), copy.deepcopy(model)(tokens())) and not changed
    model(tokens())


def test_copies_and_files_of_a_model_inside_keep_nothing(calls):
    """As EMA copies a model, and checkpoints are written."""
    model = mlp(FP8)
    with weights_unchanged(model):
        passes(model, 1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(model)
        weights = [saved_and_loaded(model.state_dict())["0.weight"], pickle.loads(pickle.dumps(model[0].weight)).hp]
        weights += [saved_and_loaded(model[0].weight.hp), copy.deepcopy(model[0].weight.hp)]
        assert kept_bytes(average.module) == 0 and kept_bytes(model) > 0
        before = take(calls)[0]
        assert torch.equal(average.module(tokens()), model(tokens()))
        assert before == 2 and take(calls)[0] == 2
    assert all(torch.equal(w, model[0].weight.hp) for w in weights)
    with weights_unchanged(average.module):
        assert torch.equal(average.module(tokens()), copy.deepcopy(average.module)(tokens()))


def test_an_exception_frees_and_is_not_hidden():
    model = mlp(FP8)
    with pytest.raises(KeyError, match="of the program"), weights_unchanged(model):
        model(tokens())
        with torch.no_grad():
            model[0].weight.add_(1)
        raise KeyError("of the program")
    assert_nothing_is_left(model)
    message = r"keep must be one of \('rowwise', 'both'\), got 'columnwise'"
    with pytest.raises(ValueError, match=message), weights_unchanged(model, keep="columnwise"):
        pass


def test_scopes_nest(calls):
    model, fmt = mlp(FP8), FP8.weight_format
    rowwise = sum(fmt.nbytes(*m.weight.shape) for m in (model[0], model[2]))
    with weights_unchanged(model):
        passes(model)
        with weights_unchanged(model[0], keep="both"):
            passes(model)
            assert kept_bytes(model) == rowwise + fmt.nbytes(64, 160)
        assert kept_bytes(model) == rowwise
        passes(model)
    assert take(calls)[0] == 2
    assert_nothing_is_left(model)


def test_shared_weights_have_one_copy(calls):
    model = converted(Tied(), FP8)
    with weights_unchanged(model):
        for _ in range(2):
            model(torch.arange(20)).sum().backward()
    assert take(calls)[0] == 3


def test_threads_share_the_copies(calls):
    """Also where they begin at once, and scopes are left in another order than they were entered."""
    model, start = mlp(FP8), threading.Barrier(4)
    expected = model(tokens())
    take(calls)

    def work(_):
        with weights_unchanged(model):
            start.wait()
            out = model(tokens()).detach()
            start.wait()
            return out

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(work, range(4)))
    assert take(calls) == (2, 0, 0)
    assert_nothing_is_left(model)


def test_backward_runs_after_the_scope_is_left(calls):
    model = mlp(FP8)
    expected = passes(model, 1)
    take(calls)
    with weights_unchanged(model):
        loss = model(tokens()).square().sum()
    model.zero_grad()
    loss.backward()
    assert take(calls) == (2, 2, 0)
    assert_same((p.grad for p in model.parameters()), expected)


VIEWS = {
    "groups_of_rows": lambda w, x: torch.bmm(x.unflatten(0, (3, 10)), w.view(3, 32, 64).mT),
    "one_by_one": lambda w, x: torch.stack([F.linear(x, part) for part in w.chunk(3)]),
    "in_another_dtype": lambda w, x: torch.bmm(x.unflatten(0, (3, 10)).bfloat16(), w.view(3, 32, 64).bfloat16().mT),
}


@both_formats
@pytest.mark.parametrize("call", VIEWS.values(), ids=VIEWS)
def test_views_are_quantized_once(calls, call, config):
    layer, x = nn.Linear(64, 96), tokens()
    quantize_(layer, config)

    def run():
        out = call(layer.weight, x)
        return [out, *torch.autograd.grad(out.float().sum(), (x, layer.weight))]

    expected, message = run(), r"weights_unchanged: weight was changed inside"
    weights = take(calls)[0]
    with pytest.raises(RuntimeError, match=message), weights_unchanged(layer, keep="both"):
        for _ in range(3):
            assert_same(run(), expected)
        assert take(calls) == (weights, 0, weights)
        with torch.no_grad():
            layer.weight.add_(1)
        run()
    assert_nothing_is_left(layer)
    run()
    assert take(calls)[:2] == (weights, weights)


def test_a_part_of_a_weight_has_scopes_of_its_own():
    whole, part, x = nn.Linear(64, 96), nn.Linear(64, 32), tokens()
    quantize_(whole, FP8)
    with weights_unchanged(whole):
        part.weight = nn.Parameter(whole.weight.detach()[:32])
    with torch.no_grad():
        whole.weight.add_(1)
    with weights_unchanged(part):
        part(x)


def test_nothing_holds_the_model_afterwards():
    model = mlp(NVFP4)
    with weights_unchanged(model, keep="both"):
        passes(model)
    gone = weakref.ref(model[0].weight.hp)
    del model
    gc.collect()
    assert gone() is None


def test_quantized_parameters_and_plain_models_need_no_scope():
    for model in (mlp(), mlp(replace(FP8, master_weights=False))):
        with weights_unchanged(model):
            model(tokens())
            for p in model.parameters():
                p.data.copy_(torch.zeros(p.shape))
            assert not model(tokens()).any()


def test_inference_tensors_are_kept_too(calls):
    with torch.inference_mode():
        model = mlp(FP8)
        with weights_unchanged(model):
            assert torch.equal(model(tokens()), model(tokens()))
    assert take(calls) == (2, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ("own", "other"))
def test_copies_belong_to_the_stream_that_made_them(stream):
    model, x = mlp(FP8).cuda().bfloat16(), tokens().detach().cuda().bfloat16()
    with torch.no_grad(), weights_unchanged(model):
        expected = model(x)
        once = kept_bytes(model)
        other = torch.cuda.current_stream() if stream == "own" else torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            assert torch.equal(model(x), expected)
        assert kept_bytes(model) == (once if stream == "own" else 2 * once)
        torch.cuda.synchronize()


# --- inference tensors, and captures of CUDA graphs, which keep no copy -----------------------------------------------


@pytest.mark.parametrize("keep", ("rowwise", "both"))
@pytest.mark.parametrize("backend", (None, "aot_eager"), ids=("eager", "compiled"))
def test_a_capture_neither_reads_nor_keeps(keep, backend, monkeypatch):
    """Replays of a CUDA graph repeat what it captured: they must not read copies that die with a scope."""
    model = mlp(FP8)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)

    def calls_of_a_step():
        with weight_calls() as calls:
            run(torch.randn(5, 64, requires_grad=True)).sum().backward()
        return calls.quantize, calls.columnwise, calls.transpose

    with weights_unchanged(model, keep=keep):
        for before in (False, True):
            if before:
                calls_of_a_step()
            kept = model[0].weight.quantized_bytes
            with monkeypatch.context() as patch:
                Machine(patch).captures_a_graph()
                assert calls_of_a_step() == (4, 2, 0)
            assert model[0].weight.quantized_bytes == kept and (kept > 0) is before


# The stream of inductor's graphs, and whether this is their first run; "raises": as PyTorch 2.11 does in a thread that
# has no graphs.
FIRST_RUNS = {"graphs": True, "other": False, "none": False, "raises": False, "not_imported": False}


@pytest.mark.parametrize("captures", (True, False))
@pytest.mark.parametrize(("stream", "is_first_run"), FIRST_RUNS.items(), ids=FIRST_RUNS)
def test_inductors_first_run_counts_as_a_capture(stream, is_first_run, captures, monkeypatch):
    """It lies in the memory of graphs, where inductor lets no copy live on. A GPU shows that; this shows the choice."""

    def get_manager(index, create_if_none_exists):
        assert (index, create_if_none_exists) == (0, False) and stream != "raises"
        return None if stream == "none" else SimpleNamespace(stream=stream)

    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    monkeypatch.setattr(trees, "get_manager", get_manager)
    if stream == "not_imported":
        monkeypatch.delitem(sys.modules, trees.__name__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "graphs")
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert modes.is_capturing(x) is (captures or is_first_run)
    assert not modes.is_capturing(torch.zeros(1))
