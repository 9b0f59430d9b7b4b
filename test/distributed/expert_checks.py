"""Checks of experts spread over ranks, sharded by FSDP2, and both; each runs on every rank."""

from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_models import ANOTHER_ROUNDING, adamw, assert_gathers_exactly, raises
from helpers import assert_same, replace
from ranks import device
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torchao.quantization import quantize_

from torchao_blockwise import _compat, experts, weights_unchanged
from torchao_blockwise.distributed import ExpertParallel, sync_weight_scales
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.tensors import MasterWeightTensor, QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

# Experts that every number of ranks here splits unevenly, and leaves one for the last.
EXPERTS, WIDTH, HIDDEN = 7, 144, 48


def layer(config, count: int = EXPERTS) -> SwiGLUExperts:
    torch.manual_seed(0)
    module = SwiGLUExperts(count, WIDTH, HIDDEN).to(device())
    if config is not None:
        quantize_(module, config, filter_fn=experts())
        kind = MasterWeightTensor if config.master_weights else QuantizedTensor
        assert all(isinstance(p, kind) for p in module.parameters())
    return module


class Tokens(NamedTuple):
    """A rank's tokens sorted by expert, some of no expert behind them, what their results' gradients are, and ends."""

    x: torch.Tensor
    dy: torch.Tensor
    group_ends: torch.Tensor

    def of_expert(self, expert: int) -> slice:
        ends = [0, *self.group_ends.tolist()]
        return slice(ends[expert], ends[expert + 1])

    def to(self, where):
        return Tokens(*(x.to(where) for x in self))


def tokens(rank: int, count: int = EXPERTS, routing: str = "ragged") -> Tokens:
    g = torch.Generator().manual_seed(rank)
    sizes = torch.randint(0, 200, (count,), generator=g)
    if routing == "one expert":
        sizes = torch.where(torch.arange(count) == count - 1, 150, 0)
    elif routing == "rank 0 has none":
        sizes = sizes * min(rank, 1)
    rows = int(sizes.sum()) + (0 if routing == "rank 0 has none" else 3)
    x, dy = (torch.randn(rows, WIDTH, generator=g) for _ in range(2))
    return Tokens(x, dy, sizes.cumsum(0).int()).to(device())


def all_by_expert(parts: list[Tokens], values: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all ranks sorted by expert, rank by rank within one."""
    count = len(parts[0].group_ends)
    return torch.cat([value[part.of_expert(e)] for e in range(count) for part, value in zip(parts, values)])


def on_one_device(module, parts: list[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """(results, gradients of tokens) of all ranks' tokens together; gradients of weights are left in `module`."""
    x = all_by_expert(parts, [part.x for part in parts]).requires_grad_()
    out = module(x, sum(part.group_ends for part in parts))
    out.backward(all_by_expert(parts, [part.dy for part in parts]))
    return out.detach(), x.grad


def on_this_rank(module, part: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    x = part.x.clone().requires_grad_()
    out = module(x, part.group_ends)
    out.backward(part.dy)
    tail = slice(int(part.group_ends[-1]), None)
    assert not out[tail].any() and not x.grad[tail].any(), "tokens of no expert"
    return out.detach(), x.grad


def gathered_by_expert(parts: list[Tokens], own: torch.Tensor, group) -> torch.Tensor:
    values = [None] * group.size()
    dist.all_gather_object(values, own.cpu(), group=group)
    return all_by_expert(parts, values)


def sums_alike(config) -> bool:
    """Whether an expert's results do not depend on what others a rank has.

    In NVFP4 activations have the tensor scale of a rank's tokens, unless each expert's have their own; on a GPU kernels
    are chosen by how many those are.
    """
    shares_scale = config.weight_format.has_global_scale and not config.scale_per_expert
    return not shares_scale and device().type == "cpu"


def computes_as_one_device(mesh, config):
    """Results and all gradients; where sums differ, bitwise identical weights, and errors of the same size."""
    rank, cases = mesh.get_local_rank(), [(EXPERTS, r) for r in ("ragged", "one expert", "rank 0 has none")]
    for count, routing in (*cases, (max(mesh.size(), 2), "ragged")):
        what = f"{count} experts, {routing}"
        parts = [tokens(rank, count, routing) for rank in range(mesh.size())]
        one, spread = layer(config, count), layer(config, count)
        parallelize_module(spread, mesh, ExpertParallel())
        wanted = [*on_one_device(one, parts), *(p.grad for p in one.parameters())]
        got = [gathered_by_expert(parts, own, mesh.get_group()) for own in on_this_rank(spread, parts[rank])]
        got += [p.grad.full_tensor() for p in spread.parameters()]
        if sums_alike(config):
            assert_same(got, wanted)
            continue
        _has_bits_of(one, spread, what)
        precise, on_cpu = layer(None, count).cpu(), [part.to("cpu") for part in parts]
        exact = [*on_one_device(precise, on_cpu), *(p.grad for p in precise.parameters())]
        for on_one, on_ranks, truth in zip(wanted, got, exact, strict=True):
            assert relative_error(on_ranks, truth) < 1.1 * relative_error(on_one, truth) + 1e-6, what


def exchanges_no_amaxes(mesh, config):
    for recipe, reduces in ((config, False), (replace(config, scale_per_expert=False), True)):
        spread = parallelize_module(layer(recipe), mesh, ExpertParallel())
        with mock.patch.object(_compat, "max_over_ranks", wraps=_compat.max_over_ranks) as reduce:
            on_this_rank(spread, tokens(mesh.get_local_rank()))
        assert bool(reduce.call_count) == reduces, reduce.call_args_list


def _has_bits_of(one, spread, what: str) -> None:
    """Each rank's quantized experts are a part of all of them quantized, and so are their random bits."""
    for name, whole in one.named_parameters():
        parameter = spread.get_parameter(name)
        own = parameter._local_tensor
        first = -(-whole.shape[0] // parameter.device_mesh.size()) * parameter.device_mesh.get_local_rank()
        assert own.rounding_key is None or own.rounding_key[3] == first, f"{what}: {name}"
        for field in ("qdata", "scale"):
            of_all = getattr(whole.quantized(), field)[first : first + own.shape[0]]
            assert_bitwise_equal(getattr(own.quantized(), field), of_all, f"{what}: {name}.{field}")


def compiles(mesh, config):
    """One graph, bitwise identical to eager mode, and a weight that changes before backward is refused."""
    # Quantized experts are split evenly or not at all.
    for recipe, count in ((config, EXPERTS), (replace(config, master_weights=False), 4)):
        torch._dynamo.reset()
        part, results = tokens(mesh.get_local_rank(), count), []
        for compiled in (False, True):
            spread = parallelize_module(layer(recipe, count), mesh, ExpertParallel())
            if compiled:
                spread.forward = torch.compile(spread.forward, backend="aot_eager", fullgraph=True)
            results.append((*on_this_rank(spread, part), *(p.grad.to_local() for p in spread.parameters())))
        assert_same(*results)
        for weight in spread.parameters():
            x = part.x.clone().requires_grad_()
            out = spread(x, part.group_ends)
            with torch.no_grad():
                weight._local_tensor.copy_(torch.randn(weight._local_tensor.shape, device=device()))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward(part.dy)


def keeps_copies_in_a_scope(mesh, config):
    """A rank's experts keep their quantized copies from one microbatch to the next inside a scope, and no longer."""
    spread = parallelize_module(layer(config), mesh, ExpertParallel())
    optimizer = adamw(spread)
    part = tokens(mesh.get_local_rank())
    own = [p._local_tensor for p in spread.parameters()]

    def copies():
        on_this_rank(spread, part)
        return [weight.quantized().qdata.data_ptr() for weight in own]

    with weights_unchanged(spread):
        first = copies()
        assert copies() == first
        before = [weight.quantized().qdata.clone() for weight in own]
    assert not any(weight.quantized_bytes for weight in own)
    optimizer.step()
    on_this_rank(spread, part)
    for weight, old in zip(own, before):
        assert not weight.shape[0] or not weight.quantized().qdata.view(torch.uint8).equal(old.view(torch.uint8))


def trains_sharded_experts(mesh, config):
    """Only FSDP2, by expert and by rows of each: whole weights and results of one device, averaged gradients."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    parts = [tokens(r) for r in range(ranks)]
    for dim in (0, 1):
        one = layer(config)
        results = [on_this_rank(one, part)[0] for part in parts]
        module = fully_shard(layer(config), mesh=mesh, shard_placement_fn=lambda p, dim=dim: Shard(dim))
        assert_gathers_exactly(module, config)
        seen = []
        hook = module.register_forward_hook(lambda m, *_, seen=seen: seen.extend(type(p) for p in m.parameters()))
        out, _ = on_this_rank(module, parts[rank])
        hook.remove()
        assert MasterWeightTensor not in seen and len(seen) == 2, seen
        if not config.stochastic_rounding:
            assert_bitwise_equal(out, results[rank], f"dim {dim}")
            for name, p in one.named_parameters():
                got = module.get_parameter(name).grad.full_tensor()
                assert relative_error(got, p.grad / ranks) < 1e-6, f"dim {dim}: {name}"


def spreads_and_shards(mesh, config):
    """Experts over one dim of the mesh, FSDP2 over the other, by expert and by rows: as without FSDP2, averaged."""
    over_data, over_experts = mesh["outer"], mesh["inner"]
    group = over_experts.get_group()
    teams = mesh.mesh.tolist()
    team = over_data.get_local_rank()
    for dim in (0, 1):
        one = layer(config, 4)
        outs = [on_one_device(one, [tokens(rank, 4) for rank in ranks]) for ranks in teams]
        module = parallelize_module(layer(config, 4), over_experts, ExpertParallel())
        fully_shard(module, mesh=over_data, shard_placement_fn=lambda p, dim=dim: Shard(dim))
        parts = [tokens(rank, 4) for rank in teams[team]]
        got = [gathered_by_expert(parts, x, group) for x in on_this_rank(module, parts[over_experts.get_local_rank()])]
        if sums_alike(config):
            for on_one, on_ranks in zip(outs[team], got):
                assert_bitwise_equal(on_ranks, on_one, f"dim {dim}")
        for name, p in one.named_parameters():
            mean = module.get_parameter(name).grad.full_tensor()
            limit = 1e-6 if sums_alike(config) else 0.3 if config.weight_format.has_global_scale else ANOTHER_ROUNDING
            assert relative_error(mean, p.grad / len(teams)) < limit, f"dim {dim}: {name}"


def refuses_parts_of_experts(mesh, config):
    """An expert's tensor scale cannot be shared by the ranks that split the expert."""
    module = layer(config, 4)
    for name, p in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh["inner"], [Shard(1)])))
    fully_shard(module, mesh=mesh["outer"])
    with raises(ValueError, "tensor parallelism splits the experts of gate_up [4, 48, 144]"):
        sync_weight_scales(module)


def multiplies_local_experts(mesh, config):
    """A GEMM of DTensors names the one of local tensors, whose results are those of one device, bit for bit."""
    weight = layer(config, 4).gate_up
    x = torch.randn(4, 32, WIDTH, generator=torch.Generator().manual_seed(0)).to(device())
    spread = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
    own = distribute_tensor(x, mesh, [Shard(0)])
    for multiply in (torch.bmm, torch.matmul):
        with raises(NotImplementedError, "; for a DTensor, nn.Linear or one of these with x.to_local() and"):
            multiply(own, spread.mT)
    whole = torch.bmm(x, weight.mT)
    out = torch.bmm(own.to_local(), spread.to_local().mT)
    for result in (whole, out):
        result.square().sum().backward()
    for got, one in ((out, whole), (spread.grad.to_local(), weight.grad)):
        assert_bitwise_equal(got, one.chunk(mesh.size())[mesh.get_local_rank()])


def refuses_splits_inside_experts(mesh, config):
    """Gate and up are halves of gate_up, and a part of its rows has other halves."""
    for conversion, layer_name in ((config, " (gate_up)"), (None, "")):
        module = layer(conversion)
        part = tokens(mesh.get_local_rank())
        for name, dim in (("down", 2), ("gate_up", 1)):
            whole = getattr(module, name).detach()
            setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)])))
        with raises(ValueError, f"must be split by expert, got [7, 96, 144] as (Shard(dim=1),){layer_name}; use"):
            module(part.x, part.group_ends)


def refuses_other_modules(mesh, config):
    with pytest.raises(ValueError, match="of the same E experts and no others, got"):
        parallelize_module(nn.Linear(32, 32, bias=False), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="must hold parameters"):
        parallelize_module(nn.ReLU(), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="1 experts over 2 ranks, 1 per rank, leave some ranks without experts"):
        parallelize_module(layer(None, 1), mesh, ExpertParallel())
    spread = parallelize_module(layer(config), mesh, ExpertParallel())
    x, ends = torch.zeros(4, WIDTH, device=device()), torch.zeros(EXPERTS, dtype=torch.int32, device=device())
    for args, got in (((x,), "1 positional argument"), ((x, ends, ends), "3 positional arguments")):
        with raises(TypeError, f"tokens [M, H], sorted by expert, and group_ends [E], got {got} (down, gate_up)"):
            spread(*args)
    wrong = ((4, WIDTH), torch.float32), (EXPERTS, torch.int64)
    with pytest.raises(TypeError, match="group_ends must be int32"):
        spread(*(torch.zeros(shape, dtype=dtype, device=device()) for shape, dtype in wrong))
    if device().type == "cpu":
        # No host reads the values of those on a GPU.
        decreasing = torch.tensor([4, 3, 4, 4, 4, 4, 4], dtype=torch.int32)
        with pytest.raises(ValueError, match="group_ends"):
            spread(torch.zeros(4, WIDTH), decreasing)
