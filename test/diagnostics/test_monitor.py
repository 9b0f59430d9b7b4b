"""The monitor's life: which steps it looks at, what it costs the others, what it leaves, and what it refuses."""

import itertools
import math
import warnings

import pytest
import torch
from helpers import FP8, NVFP4, assert_same, mlp, replace
from shared_inputs import Counter
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchao_blockwise import ops
from torchao_blockwise.diagnostics import NumericsMonitor
from torchao_blockwise.nn import activations as layer_activations
from torchao_blockwise.testing import sqnr

TOKENS = 50


@pytest.fixture(autouse=True)
def nobody_is_left_watching():
    yield
    left = layer_activations.observe(None)
    assert left is None


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(seed))


def train(model, monitor, steps: int = 1, run=None):
    """Reports of some steps of SGD."""
    optimizer, reports = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for step in range(steps):
        (model if run is None else run)(tokens(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(monitor.step())
    return reports


def tensor_of(report, layer, kind, recipe):
    return next(t for t in report.tensors if (t.layer, t.kind, t.recipe) == (layer, kind, recipe))


def test_figures_are_those_of_what_conversion_quantizes():
    """Of x, w and dy, in the recipe of the layer and in another, from `ops.quantize` and in float64."""
    model = mlp(FP8)
    values = {0: model[0].weight.hp.clone(), 2: model[2].weight.hp.clone()}
    inputs, gradients = {}, {}
    for i in (0, 2):
        model[i].register_forward_hook(lambda module, args, out, i=i: inputs.update({i: args[0].detach()}))
        model[i].register_full_backward_hook(lambda module, gi, go, i=i: gradients.update({i: go[0]}))
    with NumericsMonitor(model, what_if=("nvfp4", "fp8_1x128")) as monitor:
        (report,) = train(model, monitor)
    # Of activations, of the columnwise copy of the input, of weights.
    formats = {
        "fp8": ("fp8_1x128", "fp8_128x128", "fp8_128x128"),
        "fp8_1x128": ("fp8_1x128", "fp8_1x128", "fp8_128x128"),
        "nvfp4": ("nvfp4_1x16", "nvfp4_1x16", "nvfp4_16x16"),
    }
    for i, (recipe, (activations, of_input, weights)) in itertools.product((0, 2), formats.items()):
        for kind, x, fmt, of_columns in (
            ("x", inputs[i], activations, of_input),
            ("w", values[i], weights, weights),
            ("dy", gradients[i], activations, activations),
        ):
            for name, copy in ops.quantize(x, fmt, columnwise=of_columns)._asdict().items():
                found = tensor_of(report, str(i), kind if kind == "w" else f"{kind} {name}", recipe)
                decoded = ops.dequantize(copy)
                decoded = decoded[:, : x.shape[0]].mT if name == "columnwise" else decoded[:, : x.shape[1]]
                assert found.sqnr_db == pytest.approx(sqnr(decoded, x), abs=1e-4)
                assert found.elements == x.numel() and found.amax == x.abs().max()
                assert found.underflow == 100 * ((decoded == 0) & (x != 0)).sum() / x.numel()
                assert found.trains == (recipe == "fp8")


def test_training_is_not_changed():
    results = []
    for monitored in (False, True):
        model = mlp(NVFP4)
        monitor = NumericsMonitor(model, every=1 if monitored else 100, what_if=("fp8",))
        train(model, monitor, 3)
        monitor.close()
        results.append([p.detach().hp if hasattr(p, "hp") else p.detach() for p in model.parameters()])
    assert_same(*results)


def policy(ctx, op, *args, **kwargs):
    saved = (torch.ops.torchao_blockwise.quantize_both.default, torch.ops.torchao_blockwise.quantize.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(policy)},
}


def test_modes_do_not_see_what_the_monitor_computes():
    """Such as selective checkpointing, which would save it, and counters of operations."""
    model, counts = mlp(FP8), []
    with NumericsMonitor(model, what_if=("nvfp4",)) as monitor:
        for is_armed in (True, False):
            assert (monitor._armed is not None) == is_armed
            with Counter() as counter:
                model(tokens()).sum().backward()
            monitor.step()
            counts.append({op: count for op, count in counter.ran.items() if "torchao_blockwise" in str(op)})
    assert counts[0] == counts[1] and counter.quantized == 4


def test_the_first_layer_with_nan_is_named():
    model = mlp(FP8)
    with NumericsMonitor(model, every=1) as monitor:
        assert train(model, monitor)[0].first_nonfinite is None
        model(tokens()).backward(torch.full((TOKENS, 32), math.inf))
        assert monitor.step().first_nonfinite == ("2", "dy")
        model.register_forward_pre_hook(lambda module, args: (args[0].index_fill(1, torch.tensor([3]), math.nan),))
        (report,) = train(model, monitor)
        assert report.first_nonfinite == ("0", "x") and tensor_of(report, "0", "x rowwise", "fp8").nonfinite == TOKENS
        assert monitor.recommend()[0].layer == "0" and "NaN or Inf first in 0 x" in str(report)


@pytest.mark.parametrize("count", (0, 1, 129))
def test_any_number_of_tokens(count):
    for config in (FP8, NVFP4):
        model = mlp(config)
        with NumericsMonitor(model, what_if=("fp8", "nvfp4")) as monitor:
            model(torch.ones(count, 64)).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if count == 0 else "error")
                report = monitor.step()
            assert {t.elements for t in report.tensors if t.layer == "0" and t.tensor == "x"} <= {64 * count}


@pytest.mark.parametrize("options", (None, *CHECKPOINTS.values()), ids=("plain", *CHECKPOINTS))
@pytest.mark.parametrize("config", (FP8, None), ids=("fp8", "unconverted"))
def test_passes_whose_backward_runs_are_counted_once(config, options):
    """Also recomputed ones, and in evaluation mode, in which `from_pretrained` leaves models; validation is not."""
    runs = []
    for training, how in ((True, None), (True, options), (False, options)):
        model = mlp(config).train(training)
        run = model if how is None else lambda x, m=model: checkpoint(m, x.requires_grad_(), **options)
        with NumericsMonitor(model, what_if=("nvfp4",)) as monitor:
            if not training:
                model(tokens(7))
                with torch.no_grad():
                    model(tokens(8))
            (report,) = train(model, monitor, run=run)
        runs.append((report.tensors, report.gradients, [getattr(p, "hp", p).tolist() for p in model.parameters()]))
    assert runs[0] == runs[1] == runs[2]
    elements = [t.elements for t in runs[0][0] if t.recipe == "nvfp4"]
    assert elements == [3200, 3200, 10240, 8000, 8000, 8000, 8000, 5120, 1600, 1600]


NOT_RUN = (
    "which did not run, or ran in a CUDA graph, in code compiled after the monitor was created, or in evaluation mode "
    "without backward"
)
NO_MASTER = "whose quantized Parameter has no master, or one that is sharded"
UNSEEN = {
    "evaluation": (lambda: mlp(FP8).eval(), lambda model: model(tokens()), f"x in 2 of 2 layers (0, 2), {NOT_RUN}"),
    "some_layers": (lambda: mlp(FP8), lambda model: model[0](tokens()), f"x in 1 of 2 layers (2), {NOT_RUN}"),
    "no_master": (
        lambda: mlp(replace(FP8, master_weights=False)), lambda model: [model(tokens()) for _ in range(2)],
        f"w in 2 of 2 layers (0, 2), {NO_MASTER}",
    ),
    "many_layers": (
        lambda: nn.ModuleList(mlp(replace(FP8, master_weights=False))[0] for _ in range(5)), lambda model: None,
        f"x in 5 of 5 layers (0, 1, 2, 3, ..), {NOT_RUN}; for w in 5 of 5 layers (0, 1, 2, 3, ..), {NO_MASTER}",
    ),
    "not_converted": (
        mlp, lambda model: model(tokens()), "any layer, because none is converted; name recipes in what_if",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "run", "message"), UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_observed_is_said_once(make, run, message):
    model = make()
    run(model)  # A quantized weight whose master nobody wants drops it when it is read.
    with NumericsMonitor(model, every=1) as monitor, pytest.warns(UserWarning, match="NumericsMonitor") as caught:
        for _ in range(3):
            run(model)
            assert "step " in str(monitor.step())
    assert [str(w.message) for w in caught] == [f"NumericsMonitor: step 0 has no figures for {message}"]


def test_nothing_is_said_of_layers_that_are_observed():
    """Nor of layers that stay in high precision, where no recipe is tried on them."""
    model = mlp(FP8).append(nn.Linear(32, 8))
    with NumericsMonitor(model) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, monitor)


def test_steps_that_are_reported_and_nothing_between_them():
    model = mlp(FP8)
    model.append(nn.Linear(32, 8))

    def armed() -> bool:
        hooks = len(model[3]._forward_hooks), len(model[3]._forward_pre_hooks)
        assert hooks == ((1, 1) if layer_activations._observer is not None else (0, 0))
        return layer_activations._observer is not None

    monitor = NumericsMonitor(model, every=3, step=5, what_if=("fp8",))
    steps = []
    for expected in (True, True, False, False, True, False):
        assert armed() is expected
        steps += [report and report.step for report in train(model, monitor)]
    assert steps == [5, 6, None, None, 9, None]
    train(model, monitor)
    assert armed()
    monitor.close()
    assert train(model, monitor, 3) == [None, None, None] and not armed()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    (
        (lambda: mlp(FP8), {"layers": ("*", "1")}, r"layers='1' matches no layer; the nearest names are "),
        (lambda: mlp(FP8), {"what_if": ("fp4",)}, "what_if must name recipes of fp8, .*, or hold configs, got 'fp4'"),
        (lambda: mlp(FP8), {"every": 0}, "every must be at least 1, got 0"),
        (lambda: mlp(FP8), {"writers": ["a.csv"]}, r"got 'a.csv'; for a file, use HTMLWriter\(path\) or CSVWriter"),
        (lambda: nn.LayerNorm(3), {}, "the model has no linear layer and no experts"),
        (lambda: nn.Linear(3, 3, device="meta"), {}, "the model is on the meta device; materialize it first"),
    ),
    ids=("layers", "what_if", "every", "writers", "no layers", "meta"),
)
def test_what_it_refuses(make, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        NumericsMonitor(make(), **options)


def test_two_monitors_at_a_time_are_refused_and_an_error_leaves_nothing():
    model = mlp(FP8)
    with pytest.raises(RuntimeError, match="another monitor observes this step"), NumericsMonitor(model):
        model(tokens())
        NumericsMonitor(model)
    assert layer_activations._observer is None


def test_recommend_before_a_report_or_of_an_unknown_recipe():
    model = mlp(FP8)
    with NumericsMonitor(model) as monitor:
        with pytest.raises(RuntimeError, match="no report yet"):
            monitor.recommend()
        train(model, monitor)
        with pytest.raises(ValueError, match="recommend knows fp8, got 'nvfp4'; add it to what_if"):
            monitor.recommend("nvfp4")
