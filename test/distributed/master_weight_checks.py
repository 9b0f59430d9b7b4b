"""Partial cast of sharded masters over ranks: bitwise identical to the whole, one all-reduce, clear errors."""

from unittest import mock

import torch
import torch.distributed as dist
from fsdp_models import raises
from helpers import QUANTIZERS
from ranks import device

from torchao_blockwise.distributed import (
    cast_master_weights,
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    rank_consistency,
)
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

CANARY = 0x5A


fp8, fp8_pow2, nvfp4 = (QUANTIZERS[name] for name in ("fp8", "fp8_pow2", "nvfp4"))
MAKERS = {"fp8": (fp8,), "nvfp4": (nvfp4,), "mixed": (fp8, nvfp4, fp8_pow2)}
CASTS = {"fp8": cast_master_weights_to_fp8, "nvfp4": cast_master_weights_to_nvfp4, "mixed": cast_master_weights}
SHAPES = ((40, 70), (33, 51), (1, 1), (130, 150), (0, 16), (2, 20, 33), (64, 64))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def zeros(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device())


class Weights:
    """Masters of whole weights, what they are quantized to, and model weights that hold nothing of it yet."""

    def __init__(self, kind: str):
        makers = MAKERS[kind]
        self.hp = [random_tensor(*s, dtype=DTYPES[(i + 2) % 3], seed=i, device=device()) for i, s in enumerate(SHAPES)]
        self.quantizers = [makers[i % len(makers)] for i in range(len(SHAPES))]
        self.dtypes = [DTYPES[i // 2 % 3] for i in range(len(SHAPES))]
        self.model = [make(torch.zeros_like(w, dtype=d)) for make, w, d in zip(self.quantizers, self.hp, self.dtypes)]
        self.forget()

    def forget(self) -> None:
        for w in self.model:
            w.qdata.view(torch.uint8).fill_(CANARY)
            w.scale.view(torch.uint8).fill_(CANARY)

    def expected(self) -> list:
        # On the CPU, whose reference says what the bits are.
        return [make(w.cpu().to(d)) for make, w, d in zip(self.quantizers, self.hp, self.dtypes)]

    def shards(self, bounds, rank: int):
        """(masters, start offsets) of a rank; `bounds`: of each weight, where ranks begin, and its end."""
        masters, starts = [], []
        for i, (w, ends) in enumerate(zip(self.hp, bounds)):
            start, end = ends[rank], ends[rank + 1]
            # A rank with nothing says so in either way.
            nothing = start == end and i % 2 == 0
            masters.append(None if nothing else w.flatten()[start:end].clone())
            starts.append(None if nothing else start)
        return masters, starts


def drawn_bounds(weights: Weights, ranks: int, seed: int) -> list[list[int]]:
    """Splits anywhere, alike on all ranks; some ranks get nothing."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [torch.randint(0, w.numel() + 1, (ranks - 1,), generator=generator).sort()[0].tolist() for w in weights.hp]
    return [[0, *c, w.numel()] for c, w in zip(cuts, weights.hp)]


def codes(w) -> torch.Tensor:
    return w.fmt.element.unpack(w.qdata.view(torch.uint8), w.shape[-1]).flatten()


def check_scales(weights: Weights) -> None:
    for i, (got, want) in enumerate(zip(weights.model, weights.expected())):
        assert_bitwise_equal(got.scale, want.scale, f"scale {i}")
        if got.global_scale is not None:
            assert_bitwise_equal(got.global_scale, want.global_scale, f"global scale {i}")


def check_whole(group, rank, ranks, kind) -> None:
    """The rank's elements are the whole's, all others untouched, scales the whole's; again after a step."""
    weights = Weights(kind)
    bounds = drawn_bounds(weights, ranks, seed=ranks)
    for step in range(2):
        if step:
            weights.hp = [w * -3 for w in weights.hp]
        weights.forget()
        before = [codes(w) for w in weights.model]
        # All ranks are the default group.
        CASTS[kind](weights.model, *weights.shards(bounds, rank), None if ranks == dist.get_world_size() else group)
        check_scales(weights)
        for i, (got, want) in enumerate(zip(weights.model, weights.expected())):
            start, end = bounds[i][rank : rank + 2]
            got, want = codes(got), codes(want)
            assert_bitwise_equal(got[start:end], want[start:end], f"own elements of weight {i}")
            assert_bitwise_equal(got[:start], before[i][:start], f"elements of weight {i} before its own")
            assert_bitwise_equal(got[end:], before[i][end:], f"elements of weight {i} after its own")


def check_nan(group, rank, ranks) -> None:
    """A value of one rank reaches the scales of all: NaN above Inf, Inf above all numbers."""
    weights = Weights("mixed")
    for w in weights.hp:
        if w.numel() > 3:
            w.view(-1)[-1], w.view(-1)[0] = float("nan"), float("inf")
    cast_master_weights(weights.model, *weights.shards(drawn_bounds(weights, ranks, 3), rank), group)
    check_scales(weights)


def check_collectives(group, rank, ranks) -> None:
    """Each call runs one MAX all-reduce, and only in the first call ranks compare their layouts."""
    weights = Weights("mixed")
    weights.model.append(fp8(zeros(16, 16 * ranks, dtype=torch.bfloat16)))
    weights.hp.append(torch.ones(16, 16 * ranks, device=device()))
    bounds = drawn_bounds(weights, ranks, seed=1)
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        mock.patch.object(rank_consistency, "check_same", wraps=rank_consistency.check_same) as compare,
    ):
        # An optimizer may pass aliases, such as `parameter.data`, which are new tensors in each call.
        for model in (weights.model, weights.model, [w.data for w in weights.model]):
            cast_master_weights(model, *weights.shards(bounds, rank), group)
    assert (reduce.call_count, compare.call_count) == ((3, 1) if ranks > 1 else (0, 0))
    assert all(call.args[0].dtype == torch.int32 for call in reduce.call_args_list)
    assert all(call.kwargs["op"] == dist.ReduceOp.MAX for call in reduce.call_args_list)


# What differs → (the format of rank 1, its shape and dtype, how it is named); rank 0 has [8, 16] of FP8 in float32.
MISMATCHES = {
    "shape": (fp8, (8, 17), torch.float32, "fp8_128x128 of torch.float32"),
    "dtype": (fp8, (8, 16), torch.bfloat16, "fp8_128x128 of torch.bfloat16"),
    "format": (nvfp4, (8, 16), torch.float32, "nvfp4_16x16 of torch.float32"),
    "scales": (fp8_pow2, (8, 16), torch.float32, "fp8_128x128 of torch.float32, power-of-2 scales"),
    "length": (None, (), None, ""),
}


def check_mismatch(group, rank, ranks, what: str) -> None:
    """Ranks whose lists differ all raise, naming the rank and the weight; the group works afterwards."""
    model = [fp8(zeros(8, 15 + list(MISMATCHES).index(what)))]
    make, shape, dtype, name = MISMATCHES[what]
    if rank != 1:
        model.append(fp8(zeros(8, 16)))
    elif make is not None:
        model.append(make(zeros(*shape, dtype=dtype)))
    nothing = [None] * len(model)
    theirs = f"weight 1 ({name}, shape {list(shape)})" if make else "nothing more"
    message = (
        "cast_master_weights: ranks differ; rank 0 has weight 1 (fp8_128x128 of torch.float32, shape [8, 16]), rank 1 "
        f"has {theirs}; create the same model on all ranks"
    )
    with raises(ValueError, message):
        cast_master_weights(model, nothing, nothing, group)
    check_whole(group, rank, ranks, "fp8")


def check_outsider(group, rank, ranks) -> None:
    """Called by all ranks; the last one is not in the group."""
    if rank >= ranks:
        message = f"cast_master_weights_to_fp8: rank {rank} is not in the group; call it only on the group's ranks"
        with raises(ValueError, message):
            cast_master_weights_to_fp8([fp8(zeros(8, 8))], [None], [None], group)


CHECKS = (check_whole, check_nan, check_collectives, check_mismatch, check_outsider)
BY_NAME = {check.__name__.removeprefix("check_"): check for check in CHECKS}
# (check, ranks of its group, its arguments)
_DEFAULT = [
    ("whole", 3, "mixed"),
    ("whole", 4, "nvfp4"),
    ("nan", 3),
    ("collectives", 2),
    ("mismatch", 3, "shape"),
    ("mismatch", 3, "length"),
    ("outsider", 2),
]
_ALL = [("whole", ranks, kind) for ranks in (1, 2, 3, 4) for kind in CASTS]
_ALL += [(check, ranks) for ranks in (1, 2, 3, 4) for check in ("nan", "collectives")]
_ALL += [("mismatch", 3, what) for what in MISMATCHES]
CASES = {4: (_DEFAULT, [case for case in _ALL if case not in _DEFAULT])}


def ranks_of(name: str, size: int, *arguments) -> int:
    return size + (name == "outsider")


def on_gpus(*case) -> bool:
    return True


def start(rank: int, ranks: int):
    groups = {size: dist.new_group(list(range(size))) for size in range(1, ranks + 1)}
    return lambda name, size, *arguments: BY_NAME[name](groups[size], rank, size, *arguments)
