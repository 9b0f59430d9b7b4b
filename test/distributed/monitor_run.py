"""The numerics monitor on two and four ranks: the figures of one process, however tensors are split."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from expert_checks import layer as experts_layer
from expert_checks import on_one_device, on_this_rank, tokens
from fsdp_models import blocks, config_of, shard
from helpers import mlp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchao_blockwise.diagnostics import NumericsMonitor
from torchao_blockwise.distributed import ExpertParallel

WHAT_IF = ("fp8", "nvfp4")
RANKS = 2


def batch(rank: int, width: int = 48) -> torch.Tensor:
    return torch.randn(37, width, generator=torch.Generator().manual_seed(rank))


class Alone(NumericsMonitor):
    """The monitor of one process, in a program that has others."""

    def _agree(self):
        self._group = None
        return super()._agree()


def compare(got, expected, kinds=("x", "w", "dy")) -> None:
    """Counts and maxima are the same; sums up to their order."""
    assert got.first_nonfinite == expected.first_nonfinite
    ours, theirs = (
        {(t.layer, t.kind, t.recipe): vars(t) for t in r.tensors if t.tensor in kinds} for r in (got, expected)
    )
    assert ours.keys() == theirs.keys() and ours
    for key, of_one in theirs.items():
        of_ranks = dict(ours[key])
        for name in ("sqnr_db", "cosine"):
            assert math.isclose(of_ranks.pop(name), of_one[name], rel_tol=1e-9), (key, name)
        assert of_ranks == {name: of_one[name] for name in of_ranks}, key
    for of_ranks, of_one in zip(got.gradients, expected.gradients, strict=True):
        assert (of_ranks.layer, of_ranks.recipe) == (of_one.layer, of_one.recipe)
        if len(kinds) == 3:
            # Random projections are sums in fp32.
            assert math.isclose(of_ranks.to_noise, of_one.to_noise, rel_tol=1e-5), of_ranks


def of_one_process(model, run) -> object:
    with Alone(model, what_if=WHAT_IF) as monitor:
        run(model)
        return monitor.step()


def two_layers(config):
    return mlp(config, features=(128, 256, 128))


def run(model, which: int) -> None:
    """One batch. An MLP's gradient is given: sums over ranks have other last bits, and so would a loss of them."""
    if isinstance(getattr(model, "module", model)[0], nn.Linear):
        model(batch(which, 128)).backward(batch(10 + which, 128))
    else:
        model(batch(which)).square().sum().backward()


def by_layers(model, mesh):
    """Each linear layer is a group by itself, whose weight is split again as soon as it has run."""
    for block in model:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block.down, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_tensors(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


# Way → (model, what shards it over a mesh of data and tensors, ranks along data, ranks along tensors).
WAYS = {
    "fsdp": (blocks, lambda model, mesh: shard(model, mesh["data"]), 2, 1),
    "fsdp_of_layers": (blocks, lambda model, mesh: by_layers(model, mesh["data"]), 2, 1),
    "ddp": (blocks, lambda model, mesh: DistributedDataParallel(model), 2, 1),
    "tensor_parallel": (two_layers, lambda model, mesh: by_tensors(model, mesh["tensor"]), 1, 2),
    "fsdp_and_tensor_parallel": (
        two_layers, lambda model, mesh: fully_shard(by_tensors(model, mesh["tensor"]), mesh=mesh["data"]), 2, 2,
    ),
}  # fmt: skip


def reports_as_one_process(way: str, recipe: str | None) -> None:
    """A rank's batch is what one process has as a microbatch; what ranks hold alike counts once."""
    make, shard_by, data, tensors = WAYS[way]
    mesh = dist.device_mesh.init_device_mesh("cpu", (data, tensors), mesh_dim_names=("data", "tensor"))
    config = None if recipe is None else config_of(recipe)
    expected = of_one_process(make(config), lambda model: [run(model, which) for which in range(data)])
    model = shard_by(make(config), mesh)
    with NumericsMonitor(getattr(model, "module", model), what_if=WHAT_IF) as monitor:
        run(model, mesh["data"].get_local_rank())
        compare(monitor.step(), expected)


def expert_parallel(rank: int, recipe: str) -> None:
    """Each expert sees the tokens of all ranks; only NVFP4's tensor scale is that of a rank's experts."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    config = config_of(recipe)
    parts = [tokens(r) for r in range(RANKS)]
    one, spread = nn.ModuleDict({"e": experts_layer(config)}), nn.ModuleDict({"e": experts_layer(config)})
    expected = of_one_process(one, lambda model: on_one_device(model["e"], parts))
    parallelize_module(spread["e"], mesh, ExpertParallel())
    with NumericsMonitor(spread, what_if=WHAT_IF) as monitor:
        on_this_rank(spread["e"], parts[rank])
        got = monitor.step()
    compare(got, expected, ("w",))
    if recipe == "fp8":
        only_fp8 = [vars(r)["tensors"] for r in (got, expected)]
        got, expected = (
            type(got)(0, tuple(t for t in ts if t.recipe == "fp8"), r.gradients[:3], r.first_nonfinite)
            for ts, r in zip(only_fp8, (got, expected))
        )
        compare(got, expected)


def pipeline(rank: int) -> None:
    config = config_of("fp8")
    stage = nn.ModuleDict({f"layers.{rank}".replace(".", "_"): blocks(config, count=1)})
    with NumericsMonitor(stage) as monitor:
        for block in stage.values():
            block(batch(rank)).square().sum().backward()
        report = monitor.step()
    names = [f"layers_{r}.0.{name}" for r in range(RANKS) for name in ("up", "down")]
    assert list(dict.fromkeys(t.layer for t in report.tensors)) == names
    assert {t.elements for t in report.tensors if t.tensor == "w"} == {48 * 150}
    assert len({str(t) for t in report.tensors}) == 4 * 5


def layers_of_one_rank(rank: int) -> None:
    """A pattern that matches on one rank only, a rank without layers, and a pattern that matches on none."""
    stage = nn.ModuleDict({f"layers_{rank}": blocks(config_of("fp8"), count=1)})
    for model, pattern, found in (
        (stage, "layers_0.*", "layers_0"),
        (stage if rank else nn.LayerNorm(4), "*", "layers_1"),
    ):
        with NumericsMonitor(model, layers=pattern) as monitor:
            assert {t.layer.split(".")[0] for t in monitor.step().tensors} == {found}
    with pytest.raises(ValueError, match=r"layers='layers_2\.\*' matches no layer; the nearest names are layers_1"):
        NumericsMonitor(stage, layers="layers_2.*")


def nonfinite(rank: int) -> None:
    model = blocks(config_of("fp8"))
    with NumericsMonitor(model) as monitor:
        x = batch(rank)
        if rank == 1:
            x[3, 3] = math.nan
        model(x).square().sum().backward()
        report = monitor.step()
    assert report.first_nonfinite == ("0.up", "x")
    assert math.isnan(next(t.amax for t in report.tensors if t.layer == "0.up" and t.tensor == "x"))


def ranks_outside(rank: int) -> None:
    """Ranks outside the group take no part in a report, which is said once."""
    group = [dist.new_group([r]) for r in range(RANKS)][rank]
    model = blocks(config_of("fp8"))
    with NumericsMonitor(model, every=1, group=group) as monitor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch(rank)).square().sum().backward()
            monitor.step()
    messages = [str(w.message) for w in caught if "NumericsMonitor" in str(w.message)]
    assert messages == ["NumericsMonitor: step 0 has no figures for ranks outside of `group`"]


RUNS = {run.__name__: run for run in (expert_parallel, pipeline, layers_of_one_rank, nonfinite, ranks_outside)}
# Of two processes and of four.
CASES = {
    2: (
        [("fsdp", "nvfp4"), ("fsdp_of_layers", None), ("tensor_parallel", "fp8"), ("expert_parallel", "fp8"),
         ("pipeline",), ("layers_of_one_rank",), ("nonfinite",), ("ranks_outside",)],
        [("fsdp", "fp8"), ("fsdp_of_layers", "fp8"), ("fsdp_of_layers", "nvfp4"), ("ddp", "fp8"), ("ddp", "nvfp4"),
         ("tensor_parallel", "nvfp4"), ("tensor_parallel", None), ("expert_parallel", "nvfp4")],
    ),
    4: (
        [("fsdp_and_tensor_parallel", "nvfp4")],
        [("fsdp_and_tensor_parallel", "fp8"), ("fsdp_and_tensor_parallel", None)],
    ),
}  # fmt: skip


def start(rank: int, ranks: int):
    return lambda name, *args: reports_as_one_process(name, *args) if name in WAYS else RUNS[name](rank, *args)
