"""MasterWeightOptimizer: any optimizer over the fp32 masters of quantised Parameters.

    p.grad ─ fp32 ─▶ master.grad ─ the wrapped optimizer ─▶ master ─ partial cast ─▶ p

The model holds quantised weights and the optimizer their masters; nothing holds both. Other parameters are handed to
the wrapped optimizer as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchao_blockwise.distributed.agreement import check_same
from torchao_blockwise.distributed.param_groups import as_groups, described_options, described_parameter, options_of
from torchao_blockwise.distributed.primary_weight import (
    PrimaryWeight,
    flat_edges,
    gather_parts,
    send_from_first,
    write_weights,
)
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.tensors.original import Original

# The key of a master among the states of its parameter.
_MASTER = "master"


class MasterWeightOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over fp32 masters: master ← step(master, fp32(grad)), then weight ← quantise(dtype(master)).

    optimizer_class: any `torch.optim.Optimizer` class; optimizer_kwargs go to it, as `lr`.
    model: converted with `master_weights=False`. Its quantised Parameters that require a gradient get masters: the
        values from before quantisation or of a later load, which they have until their first use in a product; after it
        the quantised values, with a warning. Frozen ones are left alone; `add_param_group` takes them once they train.
    params: as any optimizer takes them: parameters, (name, parameter), or groups of them with options of their own; by
        default all of the model's.
    process_group: ranks that train the same model. They begin with the first rank's values of all parameters and
        buffers, which makes up for `DistributedDataParallel(init_sync=False)`. None: this process looks at no other.
    shard: "zero1" splits masters and optimizer states of the quantised parameters evenly over the ranks of
        process_group (default: all ranks), anywhere in the flat weights. Each rank steps its elements, one MAX
        all-reduce makes scales alike, one all-gather moves the payload: 1 byte an element (FP8), or half a byte
        (NVFP4). Gradients must be whole and alike on all ranks, as DistributedDataParallel leaves them; the optimizer
        must work element by element, as Adam and SGD do. None: every rank has whole masters in the weight's shape.

    The groups that are seen from outside hold the model's Parameters, so that schedulers, `GradScaler`,
    `clip_grad_norm_` and `zero_grad` work as ever. Values that are copied or loaded into a quantised Parameter become
    its master's before the next step.
    Raises TypeError for no optimizer class, ValueError for a shard that does not exist, a weight whose blocks are not
    square, or ranks that differ in model or options, RuntimeError for a rank that does not come.
    Source: DeepSeek-V3 report (arXiv 2412.19437), §3.3; ZeRO (arXiv 1910.02054), stage 1.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        model: nn.Module,
        params: Iterable | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        shard: str | None = None,
        **optimizer_kwargs,
    ):
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise TypeError(f"{_NAME}: optimizer_class must be an optimizer's class, got {optimizer_class!r}")
        self._group = _checked_group(process_group, shard)
        self._splits = shard is not None
        self._model = model
        self._names = {p: name for name, p in model.named_parameters()}
        self._weights: list[PrimaryWeight] = []
        self._of: dict[torch.Tensor, PrimaryWeight] = {}
        groups = as_groups(model.parameters() if params is None else params, _NAME)
        self._check_ranks(groups, f"{optimizer_class.__name__}, shard {shard}, {described_options(optimizer_kwargs)}")
        self._add_masters(groups)
        self._inner: torch.optim.Optimizer | None = None
        inner = optimizer_class([self._inner_group(g) for g in groups], **optimizer_kwargs)
        super().__init__(groups, inner.defaults)
        self._inner = inner
        self._pass_options(inner.param_groups, self.param_groups)
        if self._group is not None:
            rest = [x for x in (*model.parameters(), *model.buffers()) if x not in self._of]
            send_from_first(rest, self._group)
            self._write()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer; its groups hold masters in the place of quantised parameters."""
        assert self._inner is not None
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as with any optimizer; its quantised parameters that require a gradient get masters."""
        if self._inner is None:
            # Called by the base class for the groups of the constructor, which have their masters.
            super().add_param_group(param_group)
            return
        groups = as_groups([param_group], _NAME)
        self._check_ranks(groups, "add_param_group")
        super().add_param_group(groups[0])
        self._add_masters(groups)
        self.inner.add_param_group(self._inner_group(groups[0]))
        if self._group is not None:
            send_from_first([p for p in groups[0]["params"] if p not in self._of], self._group)
            self._write()

    def master(self, parameter: torch.Tensor) -> torch.Tensor:
        """The fp32 master of a quantised parameter: [.., N, K], or under "zero1" this rank's elements, flat.

        Raises KeyError for a parameter that has none.
        """
        weight = self._of[parameter]
        self._adopt(weight)
        return weight.master.detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None):  # type: ignore[override]
        """Step the masters with the gradients of the model, then quantise them into it; a collective under "zero1".

        closure: evaluates the model and returns the loss, as any optimizer takes it; sees the masters' values.
        """
        self._adopt_all()
        self._pass_options(self.param_groups, self.inner.param_groups)
        if closure is None:
            self._pass_gradients()
            loss = self.inner.step()
        else:
            loss = self.inner.step(lambda: self._evaluate(closure))
        for weight in self._weights:
            weight.master.grad = None
        self._pass_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        self._write()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Any optimizer's state dict, with each parameter's master as "master" among its states.

        Under "zero1" the masters and states of this rank alone, to be loaded by the same rank of as many.
        """
        self._adopt_all()
        packed = super().state_dict()
        parameters = self._parameters()
        packed["state"] = dict(packed["state"])
        for index, parameter in enumerate(parameters):
            weight = self._of.get(parameter)
            if weight is not None:
                packed["state"][index] = {**packed["state"].get(index, {}), _MASTER: weight.master.detach()}
        if self._splits:
            packed["shard"] = {"rank": dist.get_rank(self._group), "ranks": dist.get_world_size(self._group)}
        return packed

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict` with whole masters and states, the same with any number of ranks; a collective under "zero1"."""
        packed = self.state_dict()
        packed.pop("shard", None)
        for index, parameter in enumerate(self._parameters()):
            weight = self._of.get(parameter)
            if weight is not None:
                packed["state"][index] = {
                    key: gather_parts(weight, value, self._group) if _is_like(value, weight.master) else value
                    for key, value in packed["state"][index].items()
                }
        return packed

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Any]:
        """The model's state dict with masters in the place of quantised weights: plain, under the original names.

        An unconverted model loads it. A collective under "zero1"; else `model.state_dict()` gives the same.
        """
        state = self._model.state_dict()
        wholes: dict[torch.Tensor, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            weight = self._of.get(parameter)
            if weight is not None and name in state:
                if parameter not in wholes:
                    wholes[parameter] = gather_parts(weight, self.master(parameter), self._group)
                state[name] = wholes[parameter]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or `full_state_dict` gave, and quantise the masters into the model.

        A collective under "zero1". A state dict of the wrapped optimizer itself, which knows no masters, leaves them.
        Raises ValueError where groups or shapes differ, or it is another rank's part.
        """
        masters, states = self._checked_states(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.inner.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
        self._pass_options(self.inner.param_groups, self.param_groups)
        self._share_states()
        for weight, values in masters:
            self._original(weight.weight).take(self._saved_master)
            weight.master.copy_(values)
        self._adopt_all()
        self._write()

    def bytes_at_rest(self) -> dict[str, float]:
        """Bytes that this rank holds an element of the weights with masters: "weight", "master", "states", "total"."""
        states = (self.inner.state.get(w.master, {}) for w in self._weights)
        held = {
            "weight": sum(w.weight.nbytes for w in self._weights),
            "master": sum(w.master.nbytes for w in self._weights),
            "states": sum(x.nbytes for s in states for x in s.values() if isinstance(x, torch.Tensor)),
        }
        elements = max(sum(w.weight.numel() for w in self._weights), 1)
        return {key: count / elements for key, count in (*held.items(), ("total", sum(held.values())))}

    def __getstate__(self):
        raise TypeError(f"{_NAME}: it belongs to its model and cannot be copied or pickled; save state_dict()")

    # --- masters ------------------------------------------------------------------------------------------------------

    def _add_masters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give the quantised parameters of `groups` masters, and keep of these what this rank steps."""
        weights = [p for g in groups for p in g["params"] if isinstance(p, QuantizedTensor) and p not in self._of]
        weights = list(dict.fromkeys(weights))
        ranks, rank = 1, 0
        if self._splits:
            ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        quantized_only = []
        for weight, edges in zip(weights, flat_edges([w.numel() for w in weights], ranks)):
            values = self._original(weight).take(self._saved_master)
            if values is None:
                quantized_only.append(self._name(weight))
                values = weight.dequantize(torch.float32)
            values = values.detach().to(torch.float32, memory_format=torch.contiguous_format).contiguous()
            if self._group is not None:
                send_from_first([values], self._group)
            if self._splits:
                # A copy, so that the whole is freed.
                values = values.view(-1)[edges[rank] : edges[rank + 1]].clone()
            self._of[weight] = PrimaryWeight(self._name(weight), weight, nn.Parameter(values), edges, rank)
            self._weights.append(self._of[weight])
        if quantized_only:
            warnings.warn(
                f"{_NAME}: the masters of {len(quantized_only)} of {len(weights)} weights begin with the quantised "
                f"values: {', '.join(quantized_only[:4])}{', ...' * (len(quantized_only) > 4)}; make the optimizer "
                "before the first forward pass, and let weights require gradients when they are converted",
                stacklevel=3,
            )

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [self._of[p].master if p in self._of else p for p in group["params"]]
        return {**options_of(group), "params": params}

    @staticmethod
    def _original(weight: QuantizedTensor) -> Original:
        if weight.original is None:
            weight.original = Original()
        return weight.original

    def _adopt_all(self) -> None:
        for weight in self._weights:
            self._adopt(weight)

    @torch.no_grad()
    def _adopt(self, weight: PrimaryWeight) -> None:
        """Make values that were copied into the weight its master's."""
        original = self._original(weight.weight)
        if original.changed:
            values = original.take(self._saved_master)
            weight.set_master(weight.weight.dequantize(torch.float32) if values is None else values)

    def _saved_master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What a state dict of the model holds in the place of a quantised weight."""
        return self.master(parameter) if parameter in self._of and not self._splits else None

    def _write(self) -> None:
        write_weights(self._weights, self._group if self._splits else None)

    # --- what passes between the two optimizers -----------------------------------------------------------------------

    def _pass_gradients(self) -> None:
        for weight in self._weights:
            grad = weight.weight.grad
            weight.master.grad = None if grad is None else weight.part(grad.detach()).to(torch.float32)

    def _evaluate(self, closure: Callable[[], Any]):
        with torch.no_grad():
            # Optimizers such as L-BFGS evaluate several times.
            self._write()
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._pass_gradients()
        return loss

    @staticmethod
    def _pass_options(source, target) -> None:
        for theirs, mine in zip(source, target):
            mine.update(options_of(theirs))

    def _share_states(self) -> None:
        """Let `state` lead from the model's parameters to the states of their masters."""
        if len(self.state) != len(self.inner.state):
            for parameter in self._parameters():
                key = self._of[parameter].master if parameter in self._of else parameter
                if key in self.inner.state:
                    self.state[parameter] = self.inner.state[key]

    def _parameters(self) -> list[torch.Tensor]:
        """All parameters in the order of a state dict's indices."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))

    def _checked_states(self, state_dict: dict[str, Any]):
        """(weights with masters of their shape, states of the wrapped optimizer), this rank's part of whole ones."""
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        of_index = dict(zip(indices, (p for group in self.param_groups for p in group["params"])))
        saved_by, masters, states = state_dict.get("shard"), [], {}
        mine = {"rank": dist.get_rank(self._group), "ranks": dist.get_world_size(self._group)} if self._splits else None
        if saved_by is not None and saved_by != mine:
            raise ValueError(
                f"{_NAME}: the state dict is the part of rank {saved_by['rank']} of {saved_by['ranks']}, this is "
                + (f"rank {mine['rank']} of {mine['ranks']}" if mine else "an optimizer with whole masters")
                + "; save full_state_dict() to load it elsewhere"
            )
        for index, state in state_dict["state"].items():
            weight = self._of.get(of_index.get(index))  # type: ignore[arg-type]
            if weight is not None:
                whole, split = weight.weight.shape, weight.is_split
                state = {
                    key: weight.part(value).clone() if split and getattr(value, "shape", None) == whole else value
                    for key, value in state.items()
                }
                master = state.pop(_MASTER, None)
                if master is not None and master.shape != weight.master.shape:
                    raise ValueError(
                        f"{_NAME}: the master of {weight.name} must have shape {list(whole)}"
                        + f" or {list(weight.master.shape)}" * split
                        + f", got {list(master.shape)}; load the state of the same model"
                    )
                if master is not None:
                    masters.append((weight, master))
            if state or weight is None:
                states[index] = state
        return masters, states

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter, "a parameter that is not the model's")

    def _check_ranks(self, groups: Sequence[dict[str, Any]], what: str) -> None:
        """Check the weights that will get masters, and that ranks are about to do the same."""
        for p in (p for g in groups for p in g["params"]):
            if isinstance(p, QuantizedTensor) and not p.fmt.is_square:
                rows, columns = p.fmt.block
                raise ValueError(f"{_NAME}: {self._name(p)} has blocks of {rows}x{columns}; make it with square blocks")
        if self._group is not None:
            entries = [what]
            for i, group in enumerate(groups):
                entries.append(f"group {i}: {described_options(group)}")
                entries += [f"{self._name(p)} ({described_parameter(p)}) in group {i}" for p in group["params"]]
            entries += [f"{name} ({described_parameter(p)})" for p, name in self._names.items()]
            check_same(_NAME, sorted(dist.get_process_group_ranks(self._group)), entries)


_NAME = MasterWeightOptimizer.__name__


def _checked_group(group: dist.ProcessGroup | None, shard: str | None) -> dist.ProcessGroup | None:
    if shard not in (None, "zero1"):
        raise ValueError(f'{_NAME}: shard must be "zero1" or None, got {shard!r}')
    if group is None and shard is not None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(f"{_NAME}: shard={shard!r} needs ranks; call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"{_NAME}: rank {dist.get_rank()} is not in process_group; make it on the group's ranks alone")
    return group


def _is_like(value: Any, master: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == master.shape
