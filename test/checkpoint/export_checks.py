"""Exports and loads of models that ranks share, compared with the model on one device; bytes that are gathered."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exported_models import FORMATS, OperandsRead, alike_layers, assert_files_hold, export, tensors_in
from helpers import FP8, NVFP4, assert_same_tensors, converted, mlp, replace
from live_memory import peak_of
from ranks import device, folder_of_all
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchao_blockwise import checkpoint, linears_and_experts
from torchao_blockwise.distributed import ExpertParallel, MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal

# Shards end inside blocks, and unevenly, of a format's first layer at least.
FEATURES = {"fp8_block": (200, 300, 130), "nvfp4_compressed_tensors": (208, 304, 144)}
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def mesh_of(size: int) -> DeviceMesh:
    return DeviceMesh(device().type, list(range(size)))


def mesh_of_pairs(size: int, *names: str) -> DeviceMesh:
    return DeviceMesh(device().type, torch.arange(size, device="cpu").view(2, -1), mesh_dim_names=names)


def tokens(count: int, features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, features, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(device())


def sharded(model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Any:
    """By FSDP2, each layer with weights and the whole."""
    for layer in [layer for layer in model if isinstance(layer, nn.Linear)] + [model]:
        fully_shard(layer, mesh=mesh, **({} if policy is None else {"mp_policy": policy}))
    return model


def model_of(format: str, masters: bool = True, **options: Any) -> nn.Sequential:
    return mlp(replace(FORMATS[format], master_weights=masters), **{"features": FEATURES[format]} | options)


def built(make: Callable[[], nn.Module], config: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return converted(make(), config, linears_and_experts())


def compare(model: nn.Module, reference: nn.Module, format: str = "fp8_block") -> None:
    """Both exports hold the same bytes, and all ranks have them, in the order that was said."""
    folder = folder_of_all()
    checkpoint.export(model, folder / "shared", format, shard_bytes=50_000)
    if dist.get_rank() == 0:
        assert_same_tensors(tensors_in(folder / "shared"), export(reference, folder / "whole", format))
        assert sorted(p.name for p in folder.iterdir()) == ["shared", "whole"]
    dist.barrier()
    weights, whole = checkpoint.quantized_weights(model, format), dict(checkpoint.quantized_weights(reference, format))
    got = list(weights)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in got}
    assert [name for name, _ in got] == list(weights.metadata()) == list(whole)
    assert_same_tensors(dict(got), whole)
    assert checkpoint.checksums(weights) == checkpoint.checksums(whole.items())


def rounded(model: nn.Module) -> nn.Module:
    """As FSDP2 rounds what it gathers in bf16; what is not converted stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, MasterWeightTensor):
                parameter.hp.copy_(parameter.hp.bfloat16())
    return model


def shards(rank: int, size: int, format: str, masters: bool, in_bf16: bool = False) -> None:
    model = sharded(model_of(format, masters), mesh_of(size), IN_BF16 if in_bf16 else None)
    model(tokens(4, FEATURES[format][0]))
    reference = model_of(format, masters)
    compare(model, rounded(reference) if in_bf16 else reference, format)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkvo":
            self.add_module(f"{name}_proj", nn.Linear(208, 144, bias=False))


def joins_sharded_nvfp4(rank: int, size: int) -> None:
    """q, k and v whose largest amaxes lie on different ranks."""
    model, reference = built(Attention, NVFP4), built(Attention, NVFP4).bfloat16()
    fully_shard(model, mesh=mesh_of(size), mp_policy=IN_BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compare(model, reference, "nvfp4_compressed_tensors")


def loads(rank: int, size: int, kind: str, format: str) -> None:
    """Load files of one device into shards; exported again they are the same, and so are outputs."""
    sizes = {"fsdp": FEATURES[format], "tensor": (256, 512, 256)}

    def made(seed: int) -> Any:
        if kind == "experts":
            return built(lambda: nn.Sequential(SwiGLUExperts(3, 192, 96)), FORMATS[format], seed)
        return mlp(FORMATS[format], features=sizes[kind], seed=seed)

    folder, reference, model = folder_of_all(), made(0), made(1)
    if rank == 0:
        checkpoint.export(reference, folder / "files", format)
    dist.barrier()
    if kind == "fsdp":
        sharded(model, mesh_of(size))
    elif kind == "tensor":
        parallelize_module(model, mesh_of(size), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        parallelize_module(model, mesh_of(size), {"0": ExpertParallel()})
    # A rank that cannot read its files: nobody loads anything.
    locals_ = [getattr(p.to_local(), "hp", p.to_local()).detach() for p in model.parameters()]
    before = [x.clone() for x in locals_]
    with pytest.raises(FileNotFoundError):
        checkpoint.load(model, folder / ("files" if rank else "no_such"))
    assert all(torch.equal(x, old) for x, old in zip(locals_, before, strict=True))
    checkpoint.load(model, folder / "files")
    if kind == "fsdp":
        x = tokens(4, sizes[kind][0])
        assert_bitwise_equal(model(x).detach(), reference(x).detach())
    compare(model, reference, format)


def reads_what_it_exports(rank: int, size: int, kind: str, format: str) -> None:
    """By SHA-256, what products of every rank read and what files hold, after steps.

    FSDP2 gathers masters (in bf16), or quantized Parameters that an optimizer has masters of; or ranks have whole
    Parameters, and masters whole or split by ZeRO.
    """
    model: Any = model_of(format, kind == "masters", features=(208, 304, 144))
    run, is_sharded = model, kind in ("masters", "quantized")
    if is_sharded:
        sharded(model, mesh_of(size), IN_BF16 if kind == "masters" else None)
    if kind == "masters":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        options = {} if is_sharded else {"process_group": dist.group.WORLD, "shard": None if kind == "ddp" else kind}
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, model, lr=1e-2, **options)
        run = model if is_sharded else DistributedDataParallel(model, init_sync=False)
    x = tokens(4, 208, seed=rank)
    for _ in range(2):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with OperandsRead() as products, torch.no_grad():
        model(x)
    folder = folder_of_all() / ("out" if is_sharded else str(rank))
    checkpoint.export(model, folder, format)
    dist.barrier()
    assert_files_hold(products.operands, tensors_in(folder))


def splits_shards(rank: int, size: int, format: str) -> None:
    """Tensor parallelism within FSDP2: ranks know only the scales of their part."""
    mesh = mesh_of_pairs(size, "data", "tensor")
    model, reference = (model_of(format, features=(256, 512, 256)) for _ in range(2))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded(model, mesh["data"])(tokens(4, 256))
    compare(model, reference, format)


class Routed(nn.Module):
    """A linear layer and experts, each expert of as many tokens."""

    def __init__(self, count: int):
        super().__init__()
        self.dense, self.experts = nn.Linear(192, 192), SwiGLUExperts(count, 192, 96)
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, self.count + 1, dtype=torch.int32) * (len(x) // self.count)
        return self.experts(self.dense(x), ends)


def spreads_and_shards_experts(rank: int, size: int, dim: int, format: str) -> None:
    """As torchtitan does it: experts over one dim of the mesh, FSDP2 over the other, and over both for dense layers.

    FSDP2 shards whole experts or rows of each. The bytes of one device go out; loaded into a model that is sharded so
    they go out again.
    """
    mesh, everywhere, policy = mesh_of_pairs(size, "data", "experts"), mesh_of(size), IN_BF16
    # torchtitan gives both meshes to one call, where FSDP2 takes two (PyTorch 2.12).
    by_one_call = dim == 1 and hasattr(fsdp_common, "ShardPlacementResult")

    def made(seed: int) -> nn.Module:
        # The first rank of each pair holds three experts, the other two.
        return built(lambda: nn.Sequential(Routed(5)), FORMATS[format], seed)

    def spread(model: Any) -> nn.Module:
        parallelize_module(model, mesh["experts"], {"0.experts": ExpertParallel()})
        if not by_one_call:
            options = {"mesh": mesh["data"], "shard_placement_fn": lambda p: Shard(dim)}
            fully_shard(model[0].experts, mp_policy=policy, **options)
            fully_shard(model[0], mesh=everywhere, mp_policy=policy)
            return fully_shard(model, mesh=everywhere, mp_policy=policy)
        of_experts = set(model[0].experts.parameters())
        places = [
            fsdp_common.ShardPlacementResult(Shard(dim), fsdp_common.FSDPMeshInfo(mesh["data"], 0)),
            fsdp_common.ShardPlacementResult(Shard(0), fsdp_common.FSDPMeshInfo(everywhere, 0)),
        ]

        def place(parameter: nn.Parameter) -> Any:
            return places[parameter not in of_experts]

        fully_shard(model[0], mesh=everywhere, mp_policy=policy, shard_placement_fn=place)
        return fully_shard(model, mesh=everywhere, mp_policy=policy)

    with warnings.catch_warnings():
        # In NVFP4 experts are joined, those of w1 and w3 as well.
        warnings.simplefilter("ignore", UserWarning)
        reference, model = made(0), spread(made(0))
        model(tokens(20, 192, seed=rank))
        compare(model, rounded(reference), format)
        folder, model = folder_of_all(), spread(made(1))
        if rank == 0:
            checkpoint.export(reference, folder / "files", format)
        dist.barrier()
        checkpoint.load(model, folder / "files")
        compare(model, reference, format)


def raises_on_all_ranks(rank: int, size: int) -> None:
    """A directory that is there on the first rank; and a disk that is full there."""
    folder = folder_of_all()
    model = model_of("fp8_block")
    fully_shard(model, mesh=mesh_of(size))
    model(tokens(4, FEATURES["fp8_block"][0]))
    if rank == 0:
        (folder / "there").mkdir()
        (folder / "there" / "file").write_text("")
    full = mock.Mock(side_effect=OSError(28, "No space left on device") if rank == 0 else None)
    for name, error in (("there", FileExistsError), ("full", OSError)):
        with mock.patch("safetensors.torch.save_file", full), pytest.raises(error):
            checkpoint.export(model, folder / name, shard_bytes=50_000)
    dist.barrier()
    assert [p.name for p in folder.iterdir()] == ["there"], list(folder.iterdir())


class Gathers(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops._c10d_functional.all_gather_into_tensor:
            self.nbytes += out.nbytes
        if func.overloadpacket is torch.ops.c10d._allgather_base_:
            self.nbytes += args[0].nbytes
        return out


def gathers_bytes(rank: int, size: int, format: str, masters: bool) -> None:
    """A byte an element of the weights in FP8, in NVFP4 half of one; biases as they are."""
    model = sharded(model_of(format, masters), mesh_of(size))
    inner, hidden, outer = FEATURES[format]
    model(tokens(4, inner))
    with Gathers() as gathers:
        list(checkpoint.quantized_weights(model, format))
    least = hidden * (inner + outer) // (1 if format == "fp8_block" else 2) + 4 * (hidden + outer)
    assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def streams(rank: int, size: int, masters: bool) -> None:
    """Export and load take as much memory in addition to the shards for many layers as for few."""
    width, config, peaks, folder = 384, replace(FP8, master_weights=masters), [], folder_of_all()
    for count in (3, 18):
        model = alike_layers(config, width, count)
        sharded(model, mesh_of(size))(tokens(4, width))
        peaks.append(peak_of(checkpoint.export, model, folder / str(count), shard_bytes=width * width))
        if masters:
            peaks.append(peak_of(checkpoint.load, model, folder / str(count)))
    few, many = peaks[: len(peaks) // 2], peaks[len(peaks) // 2 :]
    # Numbers of each layer, scales and amaxes of its blocks, and one weight, which a thread of gloo may hold a while.
    assert all(0 < b <= a + width * width + width * width // 10 for a, b in zip(few, many)), peaks


_BY_TWO = ("masters", "quantized", "ddp", "zero1", "zero2")
_EITHER = [(format, masters) for format in FEATURES for masters in (True, False)]


def _by(kinds) -> list[tuple]:
    cases = [(check, *case) for check in ("gathers_bytes", "shards") for case in _EITHER]
    cases += [("shards", "fp8_block", True, True), ("loads", "fsdp", "fp8_block"), ("joins_sharded_nvfp4",)]
    return cases + [("reads_what_it_exports", kind, format) for kind in kinds for format in FEATURES]


CASES = {
    2: (
        [
            *_by(_BY_TWO),
            ("loads", "fsdp", "nvfp4_compressed_tensors"),
            *(("loads", kind, format) for kind in ("tensor", "experts") for format in FEATURES),
            ("streams", True),
            ("streams", False),
            ("raises_on_all_ranks",),
        ],
        [],
    ),
    3: (_by(_BY_TWO[:2]), []),
    4: (
        [
            *(("splits_shards", format) for format in FEATURES),
            *(("spreads_and_shards_experts", dim, format) for dim in (0, 1) for format in FEATURES),
        ],
        [],
    ),
}


def on_gpus(name, *arguments) -> bool:
    """`streams` counts memory of the CPU."""
    return name != "streams"


def start(rank: int, ranks: int):
    if device().type != "cpu":
        torch.set_default_device(device())
    return lambda name, *arguments: globals()[name](rank, ranks, *arguments)
