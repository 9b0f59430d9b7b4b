"""Masters of quantized Parameters over ranks: DDP, ZeRO-1 and ZeRO-2 train as high-precision parameters do.

The models and comparisons serve tests in one process too.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_models import FOR_LOOP, adamw, assert_same_norms, config_of, raises
from helpers import replace
from ranks import device
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import FqnToConfig, quantize_

from torchao_blockwise.distributed import MasterWeightOptimizer
from torchao_blockwise.tensors import QuantizedTensor
from torchao_blockwise.testing import assert_bitwise_equal


class Net(nn.Module):
    """Odd widths, so that shards cut rows, blocks and bytes; a tied layer, a frozen one, and one without gradient."""

    def __init__(self, width: int = 37, hidden: int = 75):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mid = nn.Linear(hidden, hidden, bias=False)
        self.again = nn.Linear(hidden, hidden)
        self.again.weight = self.mid.weight
        self.frozen = nn.Linear(hidden, hidden, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.idle = nn.Linear(width, 3)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        x = nn.functional.gelu(self.norm(self.up(x)))
        return self.down(self.frozen(self.again(self.mid(x))))


def net(config: str, master_weights: bool, seed: int = 0, make=Net, dtype=torch.float32, where=None) -> nn.Module:
    torch.manual_seed(seed)
    model = make().to(where or device(), dtype)
    if config == "mixed":
        configs = {"up": "fp8", "mid": "nvfp4", "again": "nvfp4", "frozen": "fp8", "idle": "nvfp4", "down": "fp8_pow2"}
        each = {name: replace(config_of(c), master_weights=master_weights) for name, c in configs.items()}
        quantize_(model, FqnToConfig(each), filter_fn=None)
    else:
        quantize_(model, replace(config_of(config), master_weights=master_weights))
    return model


def primary(config: str = "mixed", seed: int = 0, dtype=torch.float32):
    values = net(config, master_weights=True, seed=seed, dtype=dtype).state_dict()
    return net(config, master_weights=False, seed=seed, dtype=dtype), values


def batch(step: int, rank: int = 0, width: int = 37) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device())


def train(model, optimizer, steps: int, rank: int = 0, first: int = 0, clip: bool = True) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        weight = next(model.parameters())
        x = batch(step, rank).to(weight.device)
        loss = (model(x.to(weight.dtype)) - x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        if clip:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def parallel(model, group, **options):
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True, **options)


def with_exact_means(model, ranks: int):
    """Gradients of `model` become multiples of ranks²/2^22 below 2.

    The mean over ranks is then exact in fp32 in any order, and so is a mean of that mean with other gradients, which
    is what DDP makes of accumulated ones.
    """
    unit = ranks**2 * 2.0**-22

    def to_fixed_point(gradient):
        assert gradient.abs().max() < 2
        return (gradient / unit).round() * unit

    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(to_fixed_point)
    return model


def quantized(master: torch.Tensor, weight: QuantizedTensor) -> QuantizedTensor:
    return weight._requantize(master.to(weight.dtype))


def assert_holds_masters(optimizer, model) -> None:
    """Every weight with a master is that master, in the weight's dtype and quantized whole."""
    state = optimizer.model_state_dict()
    weights = {name: weight for name, weight in model.named_parameters() if is_trained(weight)}
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight, quantized(state[name], weight)), name


def assert_masters(optimizer, values: dict[str, torch.Tensor]) -> None:
    """`model_state_dict` returns these values, except for the frozen weight, which has no master."""
    state = optimizer.model_state_dict()
    assert list(state) == list(values) and state["mid.weight"] is state["again.weight"]
    for name, value in values.items():
        if name != "frozen.weight":
            assert_bitwise_equal(state[name], value, name)


def is_trained(p: torch.Tensor) -> bool:
    return isinstance(p, QuantizedTensor) and p.requires_grad


def trains_as_high_precision(group, config: str, steps: int, modes) -> None:
    """The loss of every step, and all values in the end, are those of high-precision parameters."""
    rank = dist.get_rank(group)
    # Ranks begin with different values: DDP and the optimizer both give them the first one's.
    plain = net(config, master_weights=True, seed=rank)
    plain_parallel = parallel(plain, group)
    expected = train(plain_parallel, torch.optim.AdamW(plain.parameters(), lr=1e-2, **FOR_LOOP), steps, rank)
    values = plain.state_dict()
    for shard in modes:
        model = net(config, master_weights=False, seed=rank)
        optimizer = adamw(model, process_group=group, shard=shard)
        actual = train(parallel(model, group, init_sync=False), optimizer, steps, rank)
        assert actual == expected, f"{shard}: {actual}\n{expected}"
        assert_masters(optimizer, values)
        assert torch.equal(model.frozen.weight, quantized(values["frozen.weight"], model.frozen.weight))
        assert_holds_masters(optimizer, model)
        ranks = dist.get_world_size(group) if shard else 1
        trained = [p for p in model.parameters() if is_trained(p)]
        # Memory that is held: a part could keep the whole master alive.
        masters = sum(optimizer.master(p).untyped_storage().nbytes() for p in trained)
        assert masters <= 4 * -(-sum(p.numel() for p in trained) // ranks)


def continues_from_a_checkpoint(group, config: str, shard: str | None) -> None:
    """Saved mid-run and loaded in a new model, the run goes on bit for bit; the parts of ranks, and the whole."""
    rank = dist.get_rank(group)

    def start(seed):
        model = net(config, master_weights=False, seed=seed)
        optimizer = adamw(model, process_group=group, shard=shard)
        return model, optimizer, parallel(model, group, init_sync=False)

    model, optimizer, wrapped = start(0)
    train(wrapped, optimizer, 5, rank)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    # State dicts lead to the tensors that the optimizer goes on with.
    states = [copy.deepcopy(s) for s in (optimizer.state_dict(), optimizer.full_state_dict())]
    expected = train(wrapped, optimizer, 5, rank, first=5)
    for state in states:
        model, optimizer, wrapped = start(7)
        optimizer.load_state_dict(state)
        states_held = [x for held in optimizer.inner.state.values() for x in held.values()]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in states_held), "more than a part is held"
        # After the masters: the payload that was made of them does not spoil them.
        model.load_state_dict(saved)
        assert_holds_masters(optimizer, model)
        assert train(wrapped, optimizer, 5, rank, first=5) == expected
        assert_holds_masters(optimizer, model)


def reshards(groups, config: str) -> None:
    """4 → 2 → 1 ranks, on the same data everywhere: the losses are those of one process that never stopped."""
    ranks = {size: group for size, group in groups.items() if dist.get_rank() < size}
    model = net(config, master_weights=False)
    expected = train(model, adamw(model), 9)
    state, losses = None, []
    for i, size in enumerate((4, 2, 1)):
        if size not in ranks:
            break
        model = net(config, master_weights=False, seed=i)
        optimizer = adamw(model, process_group=ranks[size], shard="zero1")
        if state is None:
            state = net(config, master_weights=True).state_dict()
            model.load_state_dict(state)
        else:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        # The mean of 2 or 4 equal gradients is exact.
        losses += train(parallel(model, ranks[size], init_sync=False), optimizer, 3, first=3 * i)
        assert_holds_masters(optimizer, model)
        state = optimizer.model_state_dict(), optimizer.full_state_dict()
    assert losses == expected[: len(losses)]


def steps_with_nothing(group, config: str) -> None:
    def make():
        return nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 0), nn.Linear(0, 1))

    model, alone = (net(config, master_weights=False, make=make) for _ in range(2))
    optimizer = adamw(model, process_group=group, shard="zero1")
    assert (optimizer.master(model[0].weight).numel() == 0) == (dist.get_rank(group) == 3)
    reference = adamw(alone)
    for m, o in ((model, optimizer), (alone, reference)):
        for p in m.parameters():
            p.grad = torch.ones(p.shape, device=p.device)
        o.step()
    assert torch.equal(model[0].weight, alone[0].weight)
    full = optimizer.full_state_dict()
    for index, state in reference.state_dict()["state"].items():
        for key, value in state.items():
            assert_bitwise_equal(full["state"][index][key], value, f"{index} {key}")


def adds_groups(group, config: str, shard: str | None) -> None:
    """Groups with separate options, one of them added later."""
    results, values = [], net(config, master_weights=True).mid.state_dict()
    for master_weights in (True, False):
        model = net(config, master_weights)
        groups = [
            {"params": [model.up.weight, model.norm.weight], "lr": 1e-3},
            {"params": list(model.down.parameters())},
        ]
        if master_weights:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, **FOR_LOOP)
            wrapped = parallel(model, group)
        else:
            options = {"process_group": group, "shard": shard, "lr": 1e-2, "weight_decay": 0.1, **FOR_LOOP}
            optimizer = MasterWeightOptimizer(torch.optim.AdamW, model, groups, **options)
            wrapped = parallel(model, group, init_sync=False)
        losses = train(wrapped, optimizer, 3, dist.get_rank(group), clip=False)
        # Its values were freed by the first use; a load gives them again.
        model.mid.load_state_dict(values)
        optimizer.add_param_group({"params": [model.mid.weight, model.again.bias], "lr": 3e-3})
        results.append(losses + train(wrapped, optimizer, 3, dist.get_rank(group), first=3, clip=False))
    assert results[0] == results[1]


def refuses_other_parts(group) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    optimizer = adamw(net("fp8", master_weights=False), process_group=group, shard="zero1")
    state, other = optimizer.state_dict(), "save full_state_dict() to load it elsewhere"
    mine = f"the shard of rank {rank} of {ranks}, but this is an optimizer with whole masters; {other}"
    with raises(ValueError, mine):
        adamw(net("fp8", master_weights=False)).load_state_dict(state)
    with raises(ValueError, f"the shard of rank {rank} of 7, but this is rank {rank} of {ranks}; {other}"):
        optimizer.load_state_dict({**state, "shard": {"rank": rank, "ranks": 7}})
    with raises(ValueError, "load the full_state_dict() of the same model"):
        optimizer.load_state_dict({key: value for key, value in state.items() if key != "shard"})


def splits_gradients(group, config: str, steps: int) -> None:
    """ZeRO-2 from each rank's own gradients trains as DDP, bit for bit."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for data in ("own", "same"):
        seen = rank if data == "own" else 0
        whole = with_exact_means(net(config, master_weights=False), ranks)
        model = with_exact_means(net(config, master_weights=False, seed=rank), ranks)
        reference = adamw(whole, process_group=group, shard="zero1")
        optimizer = adamw(model, process_group=group, shard="zero2")
        expected = train(parallel(whole, group, init_sync=False), reference, steps, seen, clip=False)
        actual = train(model, optimizer, steps, seen, clip=False)
        assert actual == expected, f"{data}: {actual}\n{expected}"
        assert_masters(optimizer, reference.model_state_dict())
        assert_holds_masters(optimizer, model)


def accumulates_split_gradients(group, config: str) -> None:
    """Means of microbatches add up, and norms of parts are those of the whole."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    whole, model = (with_exact_means(net(config, master_weights=False), ranks) for _ in range(2))
    optimizer = adamw(model, process_group=group, shard="zero2")
    wrapped = parallel(whole, group, init_sync=False)
    for step in range(2):
        for m in (wrapped, model):
            (m(batch(step, rank)) - 1).square().mean().backward()
        optimizer.reduce_gradients()
        weights = [p for p in model.parameters() if is_trained(p)]
        assert all(p.grad is None for p in weights)
    index = dist.get_group_rank(group, dist.get_rank())
    masters = optimizer._weights
    for (name, p), q in zip(model.named_parameters(), whole.parameters()):
        if p in masters and name != "idle.weight":
            mine = masters[p]
            assert mine.master.grad.dtype == torch.float32 and mine.rank == index
            assert_bitwise_equal(mine.master.grad, mine.part(q.grad), name)
        elif p.grad is not None:
            assert_bitwise_equal(p.grad, q.grad, name)
    before = nn.utils.get_total_norm([q.grad for q in whole.parameters() if q.grad is not None])
    before = before.item()
    norms = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in (before / 2, 1e9)]
    # PyTorch adds 1e-6 to the norm that it divides by.
    assert_same_norms(norms, [before, before * (before / 2) / (before + 1e-6)], whole)
    held = [masters[p].master.grad for p in weights if masters[p].master.grad is not None]
    assert held
    optimizer.zero_grad()
    assert all(w.master.grad is None for w in optimizer._weights.values())
    # A gradient that only some ranks have.
    model.up(batch(0)).mean().backward()
    if index:
        model.idle(batch(0)).mean().backward()
    with pytest.raises(ValueError, match=r"MasterWeightOptimizer: ranks differ; rank 0 has .*idle\.weight"):
        optimizer.step()


BOTH = ("fp8", "nvfp4")
MODES = (None, "zero1")
# (check, group size or None for the groups of all sizes, arguments)
_DEFAULT = (
    (trains_as_high_precision, 4, ("mixed", 10, MODES)),
    (trains_as_high_precision, 3, ("fp8_pow2", 10, MODES)),
    (continues_from_a_checkpoint, 4, ("mixed", "zero1")),
    (continues_from_a_checkpoint, 2, ("mixed", "zero2")),
    (reshards, None, ("mixed",)),
    *((steps_with_nothing, 4, (config,)) for config in BOTH),
    (splits_gradients, 4, ("mixed", 10)),
    (accumulates_split_gradients, 3, ("mixed",)),
    (adds_groups, 2, ("mixed", "zero1")),
    (refuses_other_parts, 2, ()),
)
_SLOW = (
    *((trains_as_high_precision, size, (config, 10, MODES)) for size in (1, 2, 4) for config in BOTH),
    *((trains_as_high_precision, size, ("mixed", 10, MODES)) for size in (1, 2, 3)),
    # All formats side by side; the long run is of two ranks, as that of four takes four times as much.
    (trains_as_high_precision, 2, ("mixed", 105, MODES)),
    *((continues_from_a_checkpoint, size, ("mixed", None)) for size in (2, 4)),
    (continues_from_a_checkpoint, 2, ("mixed", "zero1")),
    *((reshards, None, (config,)) for config in BOTH),
    *((splits_gradients, size, ("mixed", 10)) for size in (1, 2)),
    (accumulates_split_gradients, 2, ("mixed",)),
    (adds_groups, 2, ("mixed", None)),
)
_BY_NAME = {check.__name__: check for check, _, _ in _DEFAULT}
CASES = {4: tuple([(check.__name__, *rest) for check, *rest in tier] for tier in (_DEFAULT, _SLOW))}


def ranks_of(name, size, arguments) -> int:
    return size or 4


def on_gpus(*case) -> bool:
    return True


def start(rank: int, ranks: int):
    groups = {size: dist.new_group(list(range(size))) for size in range(1, ranks + 1)}
    return lambda name, size, arguments: _BY_NAME[name](groups[size] if size else groups, *arguments)
