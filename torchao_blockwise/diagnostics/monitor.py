"""The numerics monitor, which observes every tensor that layers quantize on some steps and nothing on the others.

step()   before a report step: observe layers (nn/activations.py), and GEMMs of layers that are not converted
  ...    each pass adds to tallies on the device, without synchronization
step()   sums over ranks, one copy to the host, a report; then nothing is observed until the next report step
"""

from __future__ import annotations

import contextlib
import fnmatch
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat, ops
from torchao_blockwise._compat.modes import without_modes
from torchao_blockwise._names import nearest_names
from torchao_blockwise.diagnostics import statistics
from torchao_blockwise.diagnostics.layers import (
    Layer,
    Place,
    find_layers,
    find_recipes,
    layer_of,
    part_of,
    recipe_name,
    untransformed,
    values_of_weight,
)
from torchao_blockwise.diagnostics.records import Recommendation, Report, recommend
from torchao_blockwise.diagnostics.statistics import Tallies, Tally
from torchao_blockwise.diagnostics.unconverted import watch_products
from torchao_blockwise.diagnostics.writers import checked_writers, close_writer, write_to
from torchao_blockwise.formats import Groups
from torchao_blockwise.nn.activations import GradientObserver, as_rows, observe
from torchao_blockwise.nn.gemms import GemmSpec, cast_options, quantize
from torchao_blockwise.nn.layer import cast_for_compute
from torchao_blockwise.tensors import TrainingConfig
from torchao_blockwise.tensors.weight_operands import amax_over

# Why a report may lack a tensor.
_REASONS = {
    "x": "which did not run, or ran in a CUDA graph, in code compiled after the monitor was created, or in evaluation "
    "mode without backward",
    "w": "whose quantized Parameter has no master, or one that is sharded",
}


class NumericsMonitor(contextlib.AbstractContextManager["NumericsMonitor"]):
    """Report the quantization error of each tensor in every `every`-th step.

    model: the model to observe. Create the monitor last, after `quantize_`, `fuse`, sharding and loading checkpoints.
    every: steps between reports; the first report covers the next step.
    layers: `fnmatch` patterns of the names of linear layers and weights of experts.
    what_if: further recipes ("fp8", "fp8_pow2", "fp8_1x128", "nvfp4", or configs) to try on the tensors of every
        layer.
    writers: receive each report, on the first rank only: objects with `write` and `close`, such as `HTMLWriter`; runs
        of Weights & Biases; TensorBoard's `SummaryWriter`.
    step: the step of the training run, if it continues one.
    group: the ranks that train the model together, None for all. Creating a monitor and `step` are collectives.

    Call `step()` once after each optimizer step; all microbatches before it are part of one report. Used as a context
    manager, the monitor closes itself. Compiled modules run eagerly in steps that are reported.
    Warns once about layers and tensors that it cannot observe, with the reason.
    Raises ValueError for a pattern that matches nothing, or an unknown recipe; TypeError for an unsupported writer.
    Source: FP4 All the Way (arXiv 2505.19115), abstract, for the ratio of the gradient to its quantization noise.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        layers: str | Sequence[str] = "*",
        what_if: Iterable[str | TrainingConfig] = (),
        writers: Iterable[Any] = (),
        *,
        step: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"NumericsMonitor: every must be at least 1, got {every}")
        self.model, self.every = model, every
        self.report: Report | None = None
        self._layers, self._what_if = find_layers(model), find_recipes(what_if)
        self._patterns = [layers] if isinstance(layers, str) else list(layers)
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self._is_first = self._group is None or self._group.rank() == 0
        self._writers = checked_writers(writers) if self._is_first else []
        self._tallies, self._owned = self._agree()
        self._step, self._order = step, 0
        self._armed: contextlib.ExitStack | None = None
        self._is_closed = self._has_warned = False
        self._arm()

    def _agree(self) -> tuple[Tallies, set[str]]:
        """Return tallies for the layers and recipes of all ranks, and the layers whose weight this rank counts.

        The layers that match no pattern are dropped. A pattern may match layers of other ranks only.
        """
        known = [layer.name for layer in self._layers]
        chosen = {name for pattern in self._patterns for name in fnmatch.filter(known, pattern)}
        self._layers = [layer for layer in self._layers if layer.name in chosen]
        mine = (
            {layer.name: part_of(layer.weight) for layer in self._layers},
            {layer.name: recipe_name(layer.config) for layer in self._layers if layer.config is not None},
            list(self._what_if),
            known,
        )
        everyone: list[Any] = [mine]
        rank = 0
        if self._group is not None:
            rank, everyone = self._group.rank(), [None] * self._group.size()
            dist.all_gather_object(everyone, mine, group=self._group)
        parts, trained, asked, known_to_all = zip(*everyone)
        self._check_patterns([name for theirs in known_to_all for name in theirs])
        names = list(dict.fromkeys(name for theirs in parts for name in theirs))
        all_trained = {name: recipe for theirs in trained for name, recipe in theirs.items()}
        recipes = list(dict.fromkeys([*all_trained.values(), *(name for theirs in asked for name in theirs)]))
        # Of the ranks that hold the same part of a weight, only the first one counts it.
        owned = {name for name, part in mine[0].items() if all(part != theirs.get(name) for theirs in parts[:rank])}
        some = self._layers[0].weight if self._layers else next(self.model.parameters())
        device = _compat.local_of(some).device
        if device.type == "meta":
            raise ValueError("NumericsMonitor: the model is on the meta device; materialize it first")
        return Tallies(names, recipes, all_trained, device), owned

    def _check_patterns(self, names: list[str]) -> None:
        """Raise ValueError if there are no layers, or a pattern matches none. names: the layers of all ranks."""
        if not names:
            raise ValueError("NumericsMonitor: the model has no linear layer and no experts")
        for pattern in self._patterns:
            if not fnmatch.filter(names, pattern):
                near = nearest_names(pattern, names)
                raise ValueError(f"NumericsMonitor: layers={pattern!r} matches no layer; the nearest names are {near}")

    # --- steps and reports ---------------------------------------------------------------------------------------

    def step(self) -> Report | None:
        """End a training step; return the report, on every rank, if this step is reported."""
        report = self._finish() if self._armed is not None else None
        self._step += 1
        if self._step % self.every == 0 and not self._is_closed:
            self._arm()
        return report

    def recommend(self, recipe: str | None = None) -> list[Recommendation]:
        """Return layers to keep in bf16 according to the last report, the worst first.

        These are layers with NaN or Inf, with a gradient below √3 times its quantization noise, with twice the error of
        the median layer, or with a tensor that loses most of its elements to zero.
        recipe: a recipe in what_if; default the recipe that each layer trains with.
        Raises RuntimeError before the first report, ValueError for a recipe that is neither trained nor in what_if.
        """
        if self.report is None:
            raise RuntimeError("NumericsMonitor: no report yet; train a step and call step()")
        if recipe is not None and recipe not in self._tallies.recipes:
            known = ", ".join(self._tallies.recipes)
            raise ValueError(f"NumericsMonitor: recommend knows {known}, got {recipe!r}; add it to what_if")
        return recommend(self.report, recipe)

    def close(self) -> None:
        """Stop observing the model and close the writers; an unfinished report is dropped."""
        self._disarm()
        self._is_closed = True
        self._call_writers(close_writer)
        self._writers.clear()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _arm(self) -> None:
        with contextlib.ExitStack() as stack:
            # Compiled code does not call the observer. Dynamo is only used if it is already imported.
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if (before := observe(self._see)) is not None:
                observe(before)
                raise RuntimeError("NumericsMonitor: another monitor observes this step; close it first")
            stack.callback(observe, None)
            modules = {id(layer.module): layer.module for layer in self._layers if layer.config is None}
            stack.enter_context(watch_products(modules.values(), self._see_product))
            self._order = 0
            self._see_weights()
            self._armed = stack.pop_all()

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.close()
            self._armed = None

    def _finish(self) -> Report:
        self._disarm()
        self.report = self._tallies.take(self._step, self._group)
        report = self.report
        if self._is_first and not self._has_warned and (missing := self._missing(report)):
            self._has_warned = True
            figures = "; for ".join(missing)
            warnings.warn(f"NumericsMonitor: step {self._step} has no figures for {figures}", stacklevel=3)
        self._call_writers(lambda writer: write_to(writer, report))
        return report

    def _missing(self, report: Report) -> list[str]:
        """Return what the monitor could not observe, each with the reason."""
        observed = {(t.layer, t.tensor) for t in report.tensors}
        expected = list(self._tallies.index if self._what_if else self._tallies.trained)
        if not expected:
            return ["any layer, because none is converted; name recipes in what_if"]
        missing = []
        for tensor, reason in _REASONS.items():
            if layers := [name for name in expected if (name, tensor) not in observed]:
                some = ", ".join(layers[:4]) + ", .." * (len(layers) > 4)
                missing.append(f"{tensor} in {len(layers)} of {len(expected)} layers ({some}), {reason}")
        if self._group is not None and self._group.size() < dist.get_world_size():
            missing.append("ranks outside of `group`")
        return missing

    def _call_writers(self, call: Callable[[Any], None]) -> None:
        """Call each writer; a writer that fails is removed with a warning, and training continues."""
        for writer in list(self._writers):
            try:
                call(writer)
            except Exception as e:
                self._writers.remove(writer)
                failed = f"{type(writer).__name__} failed and is not used from now on: {type(e).__name__}: {e}"
                warnings.warn(f"NumericsMonitor: {failed}", stacklevel=2)

    # --- observed tensors ----------------------------------------------------------------------------------------

    def _recipes_of(self, config: TrainingConfig | None) -> dict[str, TrainingConfig]:
        own = {} if config is None else {recipe_name(config): config}
        return {**self._what_if, **own}

    def _see_weights(self) -> None:
        with torch.no_grad(), without_modes(), _compat.no_torch_function():
            for layer in self._layers:
                values, over = values_of_weight(layer.weight)
                owned = layer.name in self._owned
                if values is None or not (owned or over):
                    continue
                order = self._next()
                for name, config in self._recipes_of(layer.config).items():
                    fmt, backend = config.weight_format, ops.casting_backend(config.backend)
                    options: dict[str, Any] = {"power_of_2_scales": config.power_of_2_scales, "backend": backend}
                    # With one scale for each expert, ranks that hold different experts share no amax.
                    if fmt.has_global_scale and not (config.scale_per_expert and values.dim() > 2):
                        options["tensor_amax"] = amax_over(values, over)
                    copy = ops.quantize(values, fmt, scale_per_group=config.scale_per_expert, **options).rowwise
                    if owned:
                        self._tallies.add(layer.name, "w", name, statistics.tally(values, copy, order)[0])

    def _see(self, weight: Any, x: torch.Tensor, spec: GemmSpec, grad_enabled: bool) -> GradientObserver | None:
        layer = layer_of(weight, self._layers)
        if layer is None or not (layer.module.training or grad_enabled):
            return None
        return self._see_input(layer, x, spec)

    def _see_product(self, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor | None, out: torch.Tensor) -> None:
        layer = layer_of(_compat.local_of(weight), self._layers)
        if layer is None or layer.config is not None or not (layer.module.training or out.requires_grad):
            return
        with torch.no_grad():
            rows = as_rows(_compat.local_of(x).detach())
            # No config is needed: `_measure` uses the config of each recipe.
            spec = GemmSpec(None if ends is None else Groups(ends), None)  # type: ignore[arg-type]
            see_gradient = self._see_input(layer, cast_for_compute(rows), spec)
        if out.requires_grad:
            out.register_hook(lambda dy: see_gradient(as_rows(_compat.local_of(dy).detach())))

    def _see_input(self, layer: Layer, x: torch.Tensor, spec: GemmSpec) -> GradientObserver:
        """Count x [T, K], and return a function that counts the gradient of the same pass.

        In evaluation mode x is counted only if backward runs, so evaluation is not counted.
        """
        place, name, training = Place.of(layer.weight), layer.name, layer.module.training
        recipes, seed = self._recipes_of(spec.config), 3 * self._tallies.index[name]
        with without_modes(), _compat.no_torch_function():
            tokens, of_x = self._measure("x", x, recipes, spec, place.split.x)
            # Activation checkpointing runs a layer again in backward; it was counted in forward.
            if training and place.counts_x and not _compat.in_backward():
                self._add(name, of_x)
            projected = statistics.project(x, seed, place.first[1] if spec.groups is None else 0)

        def see_gradient(dy: torch.Tensor) -> None:
            if self._armed is None:
                return
            with torch.no_grad(), without_modes(), _compat.no_torch_function():
                over = place.split.grad_output
                dy_tokens, of_dy = self._measure("dy", dy, recipes, spec, over)
                if place.counts_gradient:
                    self._add(name, of_dy)
                if place.counts_x and not training:
                    self._add(name, of_x)
                first = place.first[0]
                other = statistics.project(dy, seed + 1, first if spec.groups is None else 0)
                probes = statistics.gradient_probes(projected, other, spec.groups, seed + 2, first)
                noise = {recipe: statistics.gradient_noise(tokens[recipe], dy_tokens[recipe]) for recipe in recipes}
                self._tallies.add_gradient(name, probes, noise)

        return see_gradient

    def _measure(
        self, tensor: str, x: torch.Tensor, recipes: dict[str, TrainingConfig], spec: GemmSpec, over: str
    ) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, Tally]]]:
        """Return the squares of each token by recipe, and (kind, recipe, tally) of both copies of x [T, K]."""
        orders, tokens, tallies = (self._next(), self._next()), {}, []
        for name, config in recipes.items():
            # Tables of groups are specific to a block size.
            groups = None if spec.groups is None else spec.groups if config is spec.config else Groups(spec.groups.ends)
            by = GemmSpec(groups, untransformed(config))
            split = over if config.activation_format.has_global_scale else ""
            copies = quantize(x, by, cast_options(by.config, True, True, is_input=tensor == "x"), split)
            for direction, copy, order in zip(("rowwise", "columnwise"), copies, orders):
                is_columnwise = direction == "columnwise"
                found, tokens[name] = statistics.tally(x, copy, order, columnwise=is_columnwise, groups=groups)
                tallies.append((f"{tensor} {direction}", name, found))
        return tokens, tallies

    def _add(self, layer: str, tallies: Iterable[tuple[str, str, Tally]]) -> None:
        for kind, recipe, tally in tallies:
            self._tallies.add(layer, kind, recipe, tally)

    def _next(self) -> int:
        self._order += 1
        return self._order
