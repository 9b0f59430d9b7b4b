"""MasterWeightOptimizer: any optimizer over the fp32 masters of quantized Parameters.

    p.grad ─ fp32 ─▶ master.grad ─ the wrapped optimizer ─▶ master ─ partial cast ─▶ p

The model holds quantized weights and the optimizer their masters; nothing holds both. Other parameters are handed to
the wrapped optimizer as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise import _compat
from torchao_blockwise.distributed.fsdp import lay_out_shards, parameters_of
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
    PrimaryWeight,
    clip_gradients,
    flat_edges,
    gather_parts,
    reduce_gradients,
    send_from_first,
    write_weights,
)


class MasterWeightOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over fp32 masters: master ← step(master, fp32(grad)), then weight ← quantize(dtype(master)).

    optimizer_class: any `torch.optim.Optimizer` class; optimizer_kwargs go to it, as `lr`.
    model: converted with `master_weights=False`. Its quantized Parameters that require a gradient get masters: the
        values from before quantization or of a later load, which they have until their first use in a product; after it
        the quantized values, with a warning. Frozen ones are left alone; `add_param_group` takes them once they train.
    params: as any optimizer takes them: parameters, (name, parameter), or groups of them with options of their own; by
        default all of the model's.
    process_group: ranks that train the same model. They begin with the first rank's values of all parameters and
        buffers, which makes up for `DistributedDataParallel(init_sync=False)`. None: this process looks at no other.
    shard: "zero1" splits masters and optimizer states of the quantized parameters evenly over the ranks of
        process_group (default: all ranks), anywhere in the flat weights. Each rank steps its elements, one MAX
        all-reduce makes scales alike, one all-gather moves the payload: 1 byte an element (FP8), or half a byte
        (NVFP4). Gradients must be whole and alike on all ranks, as DistributedDataParallel leaves them; the optimizer
        must work element by element, as Adam and SGD do. "zero2" splits gradients too: they are each rank's own, of no
        DistributedDataParallel, and `reduce_gradients` averages them. None: every rank has whole masters in the
        weight's shape. Weights that FSDP2 shards are split by it: each rank steps its rows.

    The groups that are seen from outside hold the model's Parameters, so that schedulers, `GradScaler`,
    `clip_grad_norm_` and `zero_grad` work as ever. Values that are copied or loaded into a quantized Parameter become
    its master's before the next step.
    Raises TypeError for no optimizer class, ValueError for a shard that does not exist, a weight whose blocks are not
    square, or ranks that differ in model or options, RuntimeError for a rank that does not come.
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
            raise TypeError(f"{_NAME}: optimizer_class must be an optimizer's class, got {optimizer_class!r}")
        self._group = checked_group(_NAME, process_group, shard)
        # Which part of masters and states this rank has, where ranks split them.
        self._part: dict[str, int] | None = None
        if shard is not None:
            self._part = {"rank": dist.get_rank(self._group), "ranks": dist.get_world_size(self._group)}
        self._reduces, self._averaged = shard == "zero2", False
        self._model = model
        self._names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        lay_out_shards(parameters_of(model, self._names))
        # In the order that ranks exchange them.
        self._weights: dict[torch.Tensor, PrimaryWeight] = {}
        # Calls add_param_group for each group. The options come from the wrapped optimizer.
        super().__init__(model.parameters() if params is None else params, {})
        what = f"{optimizer_class.__name__}, shard {shard}, {described_options(optimizer_kwargs)}"
        check_parameters(_NAME, self.param_groups, self._names, self._group, what)
        self._add_masters(self.param_groups)
        # The wrapped optimizer; its groups hold masters in the place of quantized parameters.
        self.inner = optimizer_class([self._inner_group(g) for g in self.param_groups], **optimizer_kwargs)
        self.defaults = self.inner.defaults
        self._pass_options(self.inner.param_groups, self.param_groups)
        self._begin_alike(self._weights.values(), (*model.parameters(), *model.buffers()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as with any optimizer; its quantized parameters that require a gradient get masters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        drop_frozen(group)
        # The constructor goes on by itself.
        if hasattr(self, "inner"):
            check_parameters(_NAME, [group], self._names, self._group, "add_param_group")
            added = self._add_masters([group])
            self.inner.add_param_group(self._inner_group(group))
            self._begin_alike(added, group["params"])

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 master of a quantized parameter: [.., N, K], or under "zero1" this rank's elements, flat.

        Raises KeyError for a parameter that has none.
        """
        self._adopt([self._weights[parameter]])
        return self._weights[parameter].master.detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters with the gradients of the model, then quantize them into it; a collective under "zero1".

        closure: evaluates the model and returns the loss, as any optimizer takes it; sees the masters' values.
        """
        self._adopt(self._weights.values())
        self._pass_options(self.param_groups, self.inner.param_groups)
        if closure is None:
            self._pass_gradients()
            loss = self.inner.step()
        else:
            loss = self.inner.step(lambda: self._evaluate(closure))
        for weight in self._weights.values():
            weight.master.grad = None
        self._pass_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        self._write()
        self._averaged = False
        return loss

    def reduce_gradients(self) -> None:
        """Under "zero2": average gradients over the ranks and keep this rank's part of them; a collective.

        One reduce-scatter in f32 for all weights with masters, whose whole gradients are dropped, and one all-reduce
        for the other parameters. `step` does it where it was not done since the last backward pass. Call it after each
        microbatch to hold no whole gradients in between: masters' parts add up.
        With two ranks gradients are the bits of DistributedDataParallel's in f32, with more of another order of sums.
        Raises ValueError under no "zero2", or if ranks have gradients of different parameters.
        """
        group = self._reducing_group("reduce_gradients")
        reduce_gradients(list(self._weights.values()), self._others(), group, _NAME)
        self._averaged = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` under "zero2", over all ranks' parts; the norm before; a collective."""
        group = self._reducing_group("clip_grad_norm_")
        self._reduce_if_due()
        return clip_gradients(list(self._weights.values()), self._others(), group, max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that masters have of `reduce_gradients`."""
        super().zero_grad(set_to_none)
        for weight in self._weights.values():
            weight.master.grad = None
        self._averaged = False

    def state_dict(self) -> dict[str, Any]:
        """Any optimizer's state dict, with each parameter's master as "master" among its states.

        Under "zero1" only the masters and states of this rank, to be loaded by the same rank of as many.
        """
        self._adopt(self._weights.values())
        packed = super().state_dict()
        parameters = self._parameters()
        packed["state"] = dict(packed["state"])
        for index, parameter in enumerate(parameters):
            weight = self._weights.get(parameter)
            if weight is not None:
                packed["state"][index] = {**packed["state"].get(index, {}), MASTER: weight.master.detach()}
        if self._part is not None:
            packed["shard"] = self._part
        return packed

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with whole masters and states, the same with any number of ranks; a collective under "zero1"."""
        packed = self.state_dict()
        packed.pop("shard", None)
        packed["state"] = whole_states(packed["state"], self._parameters(), self._weights, self._group)
        return packed

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Any]:
        """The model's state dict with masters in the place of quantized weights: plain, under the original names.

        An unconverted model loads it. A collective under "zero1".
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
        """Load what `state_dict` or `full_state_dict` gave, and quantize the masters into the model.

        A collective under "zero1". A state dict of the wrapped optimizer itself, which knows no masters, leaves them.
        Raises ValueError where groups or shapes differ, or it is another rank's part.
        """
        masters, states = checked_states(_NAME, state_dict, self.param_groups, self._weights, self._part)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.inner.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
        self._pass_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        for weight, values in masters:
            weight.pending.take(self._whole_master)
            weight.master.copy_(values)
        self._adopt(self._weights.values())
        self._write()

    # --- masters ------------------------------------------------------------------------------------------------------

    def _add_masters(self, groups: Sequence[dict[str, Any]]) -> list[PrimaryWeight]:
        """Give the quantized parameters of `groups` masters, and keep of these what this rank steps."""
        weights = [p for g in groups for p in g["params"] if quantized_of(p) is not None and p not in self._weights]
        weights = list(dict.fromkeys(weights))
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
                send_from_first([values], self._group)
            if self._part is not None:
                # A copy, so that the whole is freed.
                values = values.view(-1)[edges[rank] : edges[rank + 1]].clone()
            added.master = nn.Parameter(_compat.with_local(weight, values))
            self._weights[weight] = added
        if quantized_only:
            warnings.warn(
                f"{_NAME}: the masters of {len(quantized_only)} of {len(weights)} weights begin with the quantized "
                f"values: {', '.join(quantized_only[:4])}{', ...' * (len(quantized_only) > 4)}; make the optimizer "
                "before the first forward pass, and let weights require gradients when they are converted",
                stacklevel=3,
            )
        return [self._weights[weight] for weight in weights]

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [self._weights[p].master if p in self._weights else p for p in group["params"]]
        return {**options_of(group), "params": params}

    @torch.no_grad()
    def _adopt(self, weights: Iterable[PrimaryWeight]) -> None:
        """Make values that were copied into weights their masters'."""
        for weight in weights:
            if not weight.pending.changed:
                continue
            values = weight.pending.take(self._whole_master)
            values = weight.quantized.dequantize(torch.float32) if values is None else values
            _compat.local_of(weight.master).copy_(weight.part(values))

    def _whole_master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The master of a quantized weight, where this process has all of it."""
        return self.master(parameter) if parameter in self._weights and self._part is None else None

    def _write(self) -> None:
        write_weights(list(self._weights.values()), None if self._part is None else self._group)

    def _begin_alike(self, weights: Iterable[PrimaryWeight], others: Iterable[torch.Tensor]) -> None:
        """Ranks may hold other values than those that `weights` were quantized from, and other `others`."""
        if self._group is not None:
            send_from_first([x for x in others if x not in self._weights], self._group)
        new = [w for w in weights if self._group is not None or w.shard is not None]
        write_weights(new, None if self._part is None else self._group)

    # --- what passes between the two optimizers -----------------------------------------------------------------------

    def _pass_gradients(self) -> None:
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
            raise ValueError(f'{_NAME}: {what} is for shard="zero2"; else use torch.nn.utils on the model\'s gradients')
        assert self._group is not None
        return self._group

    def _others(self) -> list[torch.Tensor]:
        return [p for p in self._parameters() if p not in self._weights]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.no_grad():
            # Optimizers such as L-BFGS evaluate several times.
            self._write()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._pass_gradients()
        return loss

    @staticmethod
    def _pass_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
        for theirs, mine in zip(source, target):
            mine.update(options_of(theirs))

    def _share_states(self) -> None:
        """Let `state` lead from the model's parameters to the states of their masters."""
        if len(self.state) != len(self.inner.state):
            for parameter in self._parameters():
                key = self._weights[parameter].master if parameter in self._weights else parameter
                if key in self.inner.state:
                    self.state[parameter] = self.inner.state[key]

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters in the order of a state dict's indices."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))


_NAME = MasterWeightOptimizer.__name__
