"""MasterWeightOptimizer: any optimizer, applied to fp32 masters of quantized Parameters.

    p.grad ─ fp32 ─▶ master.grad ─ the wrapped optimizer ─▶ master ─ partial cast ─▶ p

The model holds the quantized weights, and the optimizer their masters. Other parameters go to the wrapped optimizer
unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise._compat import torch_fsdp
from torchao_blockwise.distributed.fsdp import lay_out_shards
from torchao_blockwise.distributed.zero.groups import (
    MASTER,
    UNNAMED,
    check_parameters,
    checked_group,
    checked_states,
    described_options,
    drop_frozen,
    options_of,
    quantized_of,
    whole_states,
)
from torchao_blockwise.distributed.zero.weights import (
    NAME,
    PrimaryWeight,
    broadcast_from_first,
    clip_gradients,
    flat_edges,
    gather_parts,
    reduce_gradients,
    write_weights,
)


class MasterWeightOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over fp32 masters: master ← step(master, fp32(grad)), then weight ← quantize(dtype(master)).

    optimizer_class: any `torch.optim.Optimizer` class; optimizer_kwargs, such as `lr`, are passed to it.
    model: converted with `master_weights=False`. Its quantized Parameters that require a gradient get masters: the
        values before quantization or of a later load, which are kept until the first GEMM with the weight; after that
        GEMM the decoded values, with a warning. `add_param_group` accepts frozen ones when they train.
    params: parameters, (name, parameter) pairs, or groups of them with options, as for any optimizer; by default all
        parameters of the model.
    process_group: ranks that train the same model. They start with the first rank's values of all parameters and
        buffers, so use `DistributedDataParallel(init_sync=False)`. None: only this process.
    shard: "zero1" splits masters and optimizer states of the quantized parameters evenly over the ranks of
        process_group (default: all ranks), at any element of the flat weights. Each rank steps its elements. One MAX
        all-reduce makes the scales equal, and one all-gather moves the payload, with 1 byte per element (FP8) or half a
        byte (NVFP4). Gradients must be unsharded and equal on all ranks, as DistributedDataParallel leaves them. The
        optimizer must work element by element, as Adam and SGD do. "zero2" splits gradients too: do not use
        DistributedDataParallel, `reduce_gradients` averages the gradients of the ranks. None: every rank has whole
        masters in the weight's shape. FSDP2's shards have masters of the same rows.

    `param_groups` holds the model's Parameters, so schedulers, `GradScaler`, `clip_grad_norm_` and `zero_grad` work as
    usual. With "zero2", use this optimizer's `clip_grad_norm_`, and no `GradScaler`, which would check only the
    gradients of this rank. Values that are copied or loaded into a quantized Parameter go to its master before the next
    step.
    Raises TypeError if optimizer_class is not an optimizer class, or model not a module; ValueError for an unknown
    shard, for a weight whose blocks are not square, and if ranks differ in model or options; RuntimeError if a rank is
    missing.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3; ZeRO (arXiv 1910.02054), stages 1 and 2.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        shard: str | None = None,
        **optimizer_kwargs: Any,
    ):
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"{NAME}: optimizer_class must be an optimizer's class, got {optimizer_class!r}")
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise TypeError(f"{NAME}: model must be the converted nn.Module, got a {got}; pass parameters as params=")
        self._group = checked_group(process_group, shard)
        # This rank and the number of ranks, if they split masters and states.
        self._part: dict[str, int] | None = None
        if shard is not None:
            self._part = {"rank": dist.get_rank(self._group), "ranks": dist.get_world_size(self._group)}
        self._reduces, self._averaged = shard == "zero2", False
        self._model = model
        self._names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        lay_out_shards(torch_fsdp.parameters_of(torch_fsdp.states_of(model.modules()), self._names))
        # In the order of the collectives.
        self._weights: dict[torch.Tensor, PrimaryWeight] = {}
        # Calls add_param_group for each group. The options come from the wrapped optimizer.
        super().__init__(model.parameters() if params is None else params, {})
        what = f"{optimizer_class.__name__}, shard {shard}, {described_options(optimizer_kwargs)}"
        check_parameters(self.param_groups, self._names, self._group, what)
        self._add_masters(self.param_groups)
        # The wrapped optimizer; its groups hold masters instead of quantized parameters.
        self.inner = optimizer_class([self._inner_group(g) for g in self.param_groups], **optimizer_kwargs)
        self.defaults = self.inner.defaults
        self._copy_options(self.inner.param_groups, self.param_groups)
        self._start_from_first_rank(self._weights.values(), (*model.parameters(), *model.buffers()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as with any optimizer; its quantized parameters that require a gradient get masters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        drop_frozen(group)
        # Not while the constructor runs, which does this for all groups.
        if hasattr(self, "inner"):
            try:
                check_parameters([group], self._names, self._group, "add_param_group")
            except (RuntimeError, ValueError):
                self.param_groups.pop()
                raise
            added = self._add_masters([group])
            self.inner.add_param_group(self._inner_group(group))
            self._start_from_first_rank(added, group["params"])

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the fp32 master of a quantized parameter: [.., N, K], or with ZeRO this rank's elements, flat.

        Raises KeyError for a parameter without a master.
        """
        self._take_loaded_values([self._weights[parameter]])
        return self._weights[parameter].master.detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters with the gradients of the model, and quantize them into it; a collective with ZeRO.

        closure: evaluates the model and returns the loss, as for any optimizer; masters are quantized before each call.
        """
        self._take_loaded_values(self._weights.values())
        self._copy_options(self.param_groups, self.inner.param_groups)
        if closure is None:
            self._set_master_gradients()
            loss = self.inner.step()
        else:
            loss = self.inner.step(lambda: self._evaluate(closure))
        for weight in self._weights.values():
            weight.master.grad = None
        self._copy_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        self._write()
        self._averaged = False
        return loss

    def train(self) -> None:
        """Call `train()` of a schedule-free optimizer, and quantize the values that it trains; a collective with ZeRO.

        Does nothing if the wrapped optimizer has no such method, and neither does `eval`.
        """
        self._set_mode("train")

    def eval(self) -> None:
        """Call `eval()` of a schedule-free optimizer, and quantize the averaged values; a collective with ZeRO."""
        self._set_mode("eval")

    @torch.no_grad()
    def _set_mode(self, mode: str) -> None:
        if hasattr(self.inner, mode):
            self._take_loaded_values(self._weights.values())
            getattr(self.inner, mode)()
            self._copy_options(self.inner.param_groups, self.param_groups)
            self._write()

    def reduce_gradients(self) -> None:
        """Average gradients over the ranks and keep this rank's shard of them; only for "zero2", a collective.

        One reduce-scatter in f32 for all weights with masters, whose unsharded gradients are dropped, and one
        all-reduce for the other parameters. `step` calls it if there are new gradients. Call it after each
        microbatch to keep no unsharded gradients between microbatches: shards are accumulated.
        With two ranks gradients are bitwise identical to DistributedDataParallel's in f32; with more ranks, the order
        of summation differs.
        Raises ValueError without "zero2", or if ranks have gradients of different parameters.
        """
        group = self._reducing_group("reduce_gradients")
        reduce_gradients(list(self._weights.values()), self._others(), group)
        self._averaged = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the shards of all ranks, for "zero2"; a collective."""
        group = self._reducing_group("clip_grad_norm_")
        self._reduce_if_due()
        return clip_gradients(list(self._weights.values()), self._others(), group, max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of masters from `reduce_gradients`."""
        super().zero_grad(set_to_none)
        for weight in self._weights.values():
            weight.master.grad = None
        self._averaged = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of an optimizer, with each parameter's master as "master" in its state.

        With ZeRO it has only this rank's masters and states, for the same rank of the same number of ranks.
        """
        self._take_loaded_values(self._weights.values())
        packed = super().state_dict()
        for index, parameter in enumerate(self._parameters()):
            if (weight := self._weights.get(parameter)) is not None:
                packed["state"][index] = {**packed["state"].get(index, {}), MASTER: weight.master.detach()}
        if self._part is not None:
            packed["shard"] = self._part
        return packed

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with unsharded masters and states, independent of the ranks; a collective with ZeRO."""
        packed = self.state_dict()
        packed.pop("shard", None)
        packed["state"] = whole_states(packed["state"], self._parameters(), self._weights, self._group)
        return packed

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with masters instead of quantized weights: plain, under the original names.

        An unconverted model loads it. A collective with ZeRO.
        """
        state = self._model.state_dict()
        wholes: dict[torch.Tensor, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            weight = self._weights.get(parameter)
            if weight is not None and name in state:
                if parameter not in wholes:
                    wholes[parameter] = gather_parts(weight, self.master(parameter), self._group)
                state[name] = wholes[parameter]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` or `full_state_dict`, and quantize the masters into the model.

        A collective with ZeRO. A state dict without masters, like the wrapped optimizer's, does not change masters.
        Raises ValueError if groups or shapes differ, or for another rank's shard.
        """
        masters, states = checked_states(state_dict, self.param_groups, self._weights, self._part)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.inner.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
        self._copy_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        for weight, values in masters:
            weight.pending.take(self._whole_master)
            weight.master.copy_(values)
        self._take_loaded_values(self._weights.values())
        self._write()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{NAME}: cannot be copied or pickled, because it belongs to its model; create one for the copied model, "
            "and load state_dict() (with ZeRO, full_state_dict()) into it"
        )

    # --- masters ------------------------------------------------------------------------------------------------------

    def _add_masters(self, groups: Sequence[dict[str, Any]]) -> list[PrimaryWeight]:
        """Create masters of the quantized parameters in `groups`, with ZeRO this rank's shards."""
        given = dict.fromkeys(p for group in groups for p in group["params"])
        weights = [p for p in given if quantized_of(p) is not None and p not in self._weights]
        rank, ranks = (self._part or {"rank": 0, "ranks": 1}).values()
        quantized_only = []
        for weight, edges in zip(weights, flat_edges([w.numel() for w in weights], ranks)):
            added = PrimaryWeight(self._names.get(weight, UNNAMED), weight, edges, rank)
            values = added.pending.take(self._whole_master)
            if values is None:
                quantized_only.append(added.name)
                values = added.quantized.dequantize(torch.float32)
            values = values.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous()
            if self._group is not None:
                broadcast_from_first([values], self._group)
            if self._part is not None:
                # A copy, so that the unsharded master is freed.
                values = values.view(-1)[edges[rank] : edges[rank + 1]].clone()
            added.master = nn.Parameter(_compat.with_local(weight, values))
            self._weights[weight] = added
        if quantized_only:
            warnings.warn(
                f"{NAME}: the masters of {len(quantized_only)} of {len(weights)} weights start from the quantized "
                f"values: {', '.join(quantized_only[:4])}{', ...' * (len(quantized_only) > 4)}; create the optimizer "
                "before the first forward pass, and convert weights while they require gradients",
                stacklevel=3,
            )
        return [self._weights[weight] for weight in weights]

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [self._weights[p].master if p in self._weights else p for p in group["params"]]
        return {**options_of(group), "params": params}

    @torch.no_grad()
    def _take_loaded_values(self, weights: Iterable[PrimaryWeight]) -> None:
        """Copy values that were loaded into weights to their masters."""
        for weight in weights:
            if not weight.pending.changed:
                continue
            values = weight.pending.take(self._whole_master)
            values = weight.quantized.dequantize(torch.float32) if values is None else values
            _compat.local_of(weight.master).copy_(weight.part(values))

    def _whole_master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the master of a quantized weight if this process has all of it."""
        return self.master(parameter) if parameter in self._weights and self._part is None else None

    def _write(self) -> None:
        write_weights(list(self._weights.values()), None if self._part is None else self._group)

    def _start_from_first_rank(self, weights: Iterable[PrimaryWeight], others: Iterable[torch.Tensor]) -> None:
        """Give all ranks the first rank's values of `others`, and quantize the masters of `weights`."""
        if self._group is not None:
            broadcast_from_first([x for x in others if x not in self._weights], self._group)
        new = [w for w in weights if self._group is not None or w.shard is not None]
        write_weights(new, None if self._part is None else self._group)

    # --- between the two optimizers -----------------------------------------------------------------------

    def _set_master_gradients(self) -> None:
        if self._reduces:
            self._reduce_if_due()
            return
        for weight in self._weights.values():
            grad = weight.weight.grad
            weight.master.grad = None if grad is None else weight.part(grad.detach()).to(torch.float32)

    def _reduce_if_due(self) -> None:
        if not self._averaged or any(w.weight.grad is not None for w in self._weights.values()):
            self.reduce_gradients()

    def _reducing_group(self, what: str) -> dist.ProcessGroup:
        if not self._reduces:
            raise ValueError(f'{NAME}: {what} is for shard="zero2"; else use torch.nn.utils on the model\'s gradients')
        assert self._group is not None
        return self._group

    def _others(self) -> list[torch.Tensor]:
        return [p for p in self._parameters() if p not in self._weights]

    @torch.no_grad()
    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        # Optimizers such as L-BFGS evaluate several times.
        self._write()
        with torch.enable_grad():
            loss = closure()
        self._set_master_gradients()
        return loss

    @staticmethod
    def _copy_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
        for theirs, mine in zip(source, target):
            mine.update(options_of(theirs))

    def _share_states(self) -> None:
        """Let `state` map the model's parameters to the states of their masters."""
        if len(self.state) != len(self.inner.state):
            for parameter in self._parameters():
                key = self._weights[parameter].master if parameter in self._weights else parameter
                if key in self.inner.state:
                    self.state[parameter] = self.inner.state[key]

    def _parameters(self) -> list[torch.Tensor]:
        """Return all parameters in the order of a state dict's indices."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))
