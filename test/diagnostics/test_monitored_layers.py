"""Every kind of layer is seen, by its name in the model, with the tensors that it quantizes."""

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import FP8, HADAMARD, NVFP4, both_formats, mlp, replace, weight
from shared_inputs import attention, tokens
from torch import nn
from torch.nn.utils import prune
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, NormLinear, linears_and_experts, weights_unchanged
from torchao_blockwise.diagnostics import NumericsMonitor
from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts, SwiGLUMLP


def report_of(model, run, **options):
    """The report of one pass, in which all layers must have been seen."""
    with NumericsMonitor(model, **options) as monitor:
        torch.manual_seed(1)
        out = run()
        out.backward(torch.randn_like(out))
        return monitor.step()


def seen(report) -> dict[str, set[str]]:
    found = {}
    for tensor in report.tensors:
        found.setdefault(tensor.layer, set()).add(tensor.kind)
    return found


ALL = {"x rowwise", "x columnwise", "w", "dy rowwise", "dy columnwise"}


def test_figures_of_transformed_layers_are_about_the_tensors():
    """With a Hadamard transform the columnwise copy is of other values; figures are of the tensors themselves."""
    reports = []
    for config in (NVFP4, HADAMARD):
        torch.manual_seed(0)
        model, x = mlp(config), weight(50, 64)
        reports.append(report_of(model, lambda: model(x)))  # noqa: B023
    # The second layer's gradients are the same, those behind it are not.
    first, second = ({(t.layer, t.kind): vars(t) for t in report.tensors} for report in reports)
    for key in (("0", "x rowwise"), ("0", "x columnwise"), ("2", "x columnwise"), ("2", "dy columnwise")):
        assert first[key] == second[key]


def test_layers_with_a_parametrized_or_pruned_weight_are_left_out():
    model = mlp(FP8).append(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)))
    model.append(prune.random_unstructured(nn.Linear(32, 32), "weight", amount=0.5))
    assert seen(report_of(model, lambda: model(weight(50, 64)))) == {"0": ALL, "2": ALL}


@both_formats
def test_fused_modules(config):
    """Layers that share their input stay fused, and figures are those without fusion."""
    reports = []
    for fused in (False, True):
        model, x = attention(config, fused=fused), tokens(5, 9)
        reports.append(report_of(model, lambda: model(x), what_if=("fp8",)))  # noqa: B023
    assert seen(reports[1]) == dict.fromkeys("qkvo", ALL)
    assert reports[0] == reports[1]


@both_formats
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("make", "layers"), ((NormLinear, ["linear"]), (SwiGLUMLP, ["gate_up", "down"])), ids=("norm", "swiglu")
)
def test_layers_that_compute_their_activation(make, layers, dtype, config):
    model, x = make(64, 96, dtype=dtype), weight(30, 64, dtype=dtype).requires_grad_()
    quantize_(model, config)
    report = report_of(model, lambda: model(x))
    assert seen(report) == dict.fromkeys(layers, ALL)
    if make is NormLinear:
        y = model.norm(x.detach().float()).to(dtype)
        amax = next(t.amax for t in report.tensors if t.tensor == "x")
        assert amax == pytest.approx(y.abs().max().item(), rel=1e-2)


ENDS = torch.tensor([7, 7, 31, 45], dtype=torch.int32)


class ModelsExperts(nn.Module):
    """As models write them: stored [E, N, K], or transposed, multiplied by grouped_mm or expert by expert."""

    def __init__(self, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        shape = (4, 64, 96) if way == "stored_transposed" else (4, 96, 64)
        self.up = nn.Parameter(torch.randn(shape))

    def forward(self, x, ends):
        if self.way == "one_by_one":
            starts = [0, *ends.tolist()]
            return torch.cat([F.linear(x[a:b], self.up[e]) for e, (a, b) in enumerate(itertools.pairwise(starts))])
        return F.grouped_mm(x, self.up if self.way == "stored_transposed" else self.up.mT, offs=ends)


@both_formats
@pytest.mark.parametrize("way", ("swiglu", "grouped", "stored_transposed", "one_by_one"))
def test_experts(config, way):
    """The same experts unconverted, asked what if, and converted: the same x, and the same w."""
    name, reports = "fp8" if config is FP8 else "nvfp4", []
    # Of 50 tokens five belong to no expert; F.linear of one after the other takes no others.
    x = weight(45 if way == "one_by_one" else 50, 64)
    for convert in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": SwiGLUExperts(4, 64, 96) if way == "swiglu" else ModelsExperts(way)})
        if convert:
            quantize_(model, config, filter_fn=linears_and_experts())
        reports.append(report_of(model, lambda: model["experts"](x, ENDS), what_if=(name,)))  # noqa: B023
    first, n = ("experts.gate_up", 192) if way == "swiglu" else ("experts.up", 96)
    found = {first: ALL, **({"experts.down": ALL} if way == "swiglu" else {})}
    kinds = ("x", "w") if way == "swiglu" else ("x", "w", "dy")
    of_first = []
    for report in reports:
        assert seen(report) == found
        tensors = [t for t in report.tensors if t.layer == first]
        assert {t.tensor: t.elements for t in tensors} == {"x": 45 * 64, "w": 4 * 64 * n, "dy": 45 * n}
        of_first.append([vars(t) | {"trains": None} for t in tensors if t.tensor in kinds])
        assert {t.trains for t in tensors} == {report is reports[1]}
    assert of_first[0] == of_first[1]
    asked, trained = reports
    assert way == "swiglu" or asked.gradients[0].to_noise == trained.gradients[0].to_noise
    assert math.isnan(asked.gradient_to_noise) and trained.gradient_to_noise > 0


def test_layers_inside_of_a_module_of_experts_are_counted_once():
    class Outer(ModelsExperts):
        def __init__(self):
            super().__init__("grouped")
            self.shared = nn.Linear(64, 96)

        def forward(self, x, ends):
            return super().forward(x, ends) + self.shared(x)

    model, x = Outer(), weight(45, 64)
    report = report_of(model, lambda: model(x, ENDS), what_if=("fp8",))
    assert seen(report) == {"up": ALL, "shared": ALL}
    assert {t.elements for t in report.tensors if t.tensor == "x"} == {45 * 64}


@both_formats
def test_weights_that_are_quantized_themselves(config):
    """Beside their masters, which the optimizer has; without one there is nothing to compare with."""
    reports = []
    for masters in (True, False):
        model = mlp(replace(config, master_weights=masters))
        optimizer = None if masters else MasterWeightOptimizer(torch.optim.SGD, model, lr=1e-3)
        x = weight(30, 64)
        reports.append(report_of(model, lambda: model(x)))  # noqa: B023
        assert seen(reports[-1]) == {"0": ALL, "2": ALL}
    assert reports[0] == reports[1] and optimizer is not None
    model = mlp(replace(config, master_weights=False))
    model(x)
    report = report_of(model, lambda: model(x))
    assert seen(report) == {"0": ALL - {"w"}, "2": ALL - {"w"}}


@both_formats
@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
@pytest.mark.parametrize("how", ("function", "module", "layer"))
def test_compiled_models(config, backend, how):
    """A step that is reported runs eagerly, the others compiled; nothing is compiled again because of it."""
    torch._dynamo.reset()
    model, x = mlp(config).append(nn.Linear(32, 16)), weight(30, 64)
    run = torch.compile(model, backend=backend, fullgraph=True) if how == "function" else model
    if how != "function":
        (model if how == "module" else model[2]).compile(backend=backend, fullgraph=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    with NumericsMonitor(model, every=2, what_if=("fp8",)) as monitor:
        frames = []
        for step in range(4):
            run(x).square().sum().backward()
            report = monitor.step()
            frames.append(counters["stats"]["unique_graphs"])
            assert (report is not None) == (step % 2 == 0)
            if report is not None:
                assert seen(report) == {"0": ALL, "2": ALL, "3": ALL}
    assert frames[0] == 0 < frames[1] == frames[2] == frames[3]


def test_the_compiler_is_not_loaded_for_models_that_are_not_compiled(monkeypatch):
    model = mlp(FP8)
    # Converting may load it.
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "set_stance", None)
    with NumericsMonitor(model):
        pass


@both_formats
def test_under_autocast(config):
    """Activations are quantized from autocast's dtype."""
    x = weight(30, 64)
    found = []
    for model in (mlp(config), mlp()):
        with NumericsMonitor(model, what_if=("fp8", "nvfp4")) as monitor:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            out.float().square().sum().backward()
            found.append(
                [vars(t) | {"trains": None} for t in monitor.step().tensors if t.layer == "0" and t.tensor == "x"]
            )
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))
    assert found[0][0]["amax"] == x.bfloat16().abs().max()


def test_tied_and_kept_weights():
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "second": nn.Linear(64, 64)})
    model["second"].weight = model["first"].weight
    quantize_(model, FP8)
    x = weight(30, 64)
    with NumericsMonitor(model) as monitor:
        with weights_unchanged(model):
            for _ in range(2):
                model["second"](model["first"](x)).square().sum().backward()
        report = monitor.step()
    assert seen(report) == {"first": ALL}
    assert {t.tensor: t.elements for t in report.tensors} == {"x": 4 * 30 * 64, "w": 64 * 64, "dy": 4 * 30 * 64}


def test_a_weight_of_nobody_is_not_seen():
    model = mlp(FP8)
    other = nn.Parameter(MasterWeightTensor(weight(32, 64), NVFP4))
    with NumericsMonitor(model) as monitor, pytest.warns(UserWarning, match="x in 2 of 2 layers"):
        F.linear(weight(4, 64), other).sum().backward()
        assert {t.tensor for t in monitor.step().tensors} == {"w"}
