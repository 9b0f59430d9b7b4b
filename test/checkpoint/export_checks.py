"""What ranks that share a model write and read, against the model on one device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from export_tools import FEATURES, attention, compare, folder_of_all, mesh_of, plain, rounded, tokens
from exported_models import tensors_in
from helpers import FP8, NVFP4, mlp, replace
from operands_read import OperandsRead, assert_files_hold
from ranks import device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, experts, linears_and_experts
from torchao_blockwise.distributed import ExpertParallel, MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.testing import assert_bitwise_equal


def shards(rank: int, size: int, masters: bool) -> None:
    config = replace(FP8, master_weights=masters)
    model = mlp(config, features=FEATURES)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    x = tokens(4, FEATURES[0])
    model(x)
    compare(model, mlp(config, features=FEATURES))


def shards_nvfp4(rank: int, size: int, masters: bool) -> None:
    config, features = replace(NVFP4, master_weights=masters), (208, 304, 144)
    model = mlp(config, features=features)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(tokens(4, features[0]))
    compare(model, mlp(config, features=features), "nvfp4_compressed_tensors")


def joins_sharded_nvfp4(rank: int, size: int) -> None:
    """q, k and v whose largest amaxes lie on different ranks."""

    def made() -> nn.Module:
        return attention(NVFP4)

    model, policy = made(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh_of(size), mp_policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compare(model, made().bfloat16(), "nvfp4_compressed_tensors")


def loads(rank: int, size: int, kind: str, format: str = "fp8_block") -> None:
    """What one device has written, into shards; written again it is the same, and so are outputs."""
    config = FP8 if format == "fp8_block" else NVFP4
    sizes = {"fsdp": FEATURES if config is FP8 else (208, 304, 130), "tensor": (256, 512, 256)}

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        if kind != "experts":
            return mlp(config, features=sizes[kind], seed=seed)
        model = nn.Sequential(SwiGLUExperts(3, 192, 96))
        quantize_(model, config, filter_fn=experts())
        return model

    folder, reference, model = folder_of_all(), made(0), made(1)
    if rank == 0:
        checkpoint.export(reference, folder / "files", format)
    dist.barrier()
    if kind == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh_of(size))
    elif kind == "tensor":
        parallelize_module(model, mesh_of(size), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        parallelize_module(model, mesh_of(size), {"0": ExpertParallel()})
    # A rank that cannot read its files: nobody loads anything.
    before = [p.to_local().detach().clone() for p in model.parameters()]
    with pytest.raises(FileNotFoundError):
        checkpoint.load(model, folder / ("files" if rank else "no_such"))
    for old, p in zip(before, model.parameters()):
        assert torch.equal(torch.as_tensor(plain(old)), plain(p.to_local()))
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
    config, features = FP8 if format == "fp8_block" else NVFP4, (208, 304, 144)
    model: Any = mlp(replace(config, master_weights=kind == "masters"), features=features)
    run, sharded = model, kind in ("masters", "quantized")
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if kind == "masters" else None)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh_of(size), mp_policy=policy)
    if kind == "masters":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        options = {} if sharded else {"process_group": dist.group.WORLD, "shard": None if kind == "ddp" else kind}
        optimizer = MasterWeightOptimizer(torch.optim.AdamW, model, lr=1e-2, **options)
        run = model if sharded else DistributedDataParallel(model, init_sync=False)
    x = tokens(4, features[0], seed=rank)
    for _ in range(2):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with OperandsRead() as products, torch.no_grad():
        model(x)
    folder = folder_of_all() / ("out" if sharded else str(rank))
    checkpoint.export(model, folder, format)
    dist.barrier()
    assert_files_hold(products.operands, tensors_in(folder))


def rounds_as_it_gathers(rank: int, size: int) -> None:
    model, policy = mlp(FP8, features=FEATURES), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size), mp_policy=policy)
    model(tokens(4, FEATURES[0]))
    reference = mlp(features=FEATURES)
    for layer in (reference[0], reference[2]):
        layer.weight.data = layer.weight.data.bfloat16()
    quantize_(reference, FP8)
    compare(model, reference)


def splits(rank: int, size: int) -> None:
    model = mlp(FP8, features=(256, 512, 256))
    parallelize_module(model, mesh_of(size), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compare(model, mlp(FP8, features=(256, 512, 256)))


def splits_shards(rank: int, size: int, format: str) -> None:
    """Tensor parallelism within FSDP2: ranks know the scales of their part alone."""
    config = NVFP4 if format.startswith("nvfp4") else FP8
    mesh = DeviceMesh(device().type, torch.arange(size, device="cpu").view(2, -1), mesh_dim_names=("data", "tensor"))
    model = mlp(config, features=(256, 512, 256))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    model(tokens(4, 256))
    compare(model, mlp(config, features=(256, 512, 256)), format)


def spreads_experts(rank: int, size: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(SwiGLUExperts(3, 192, 96))
        quantize_(model, FP8, filter_fn=experts())
        models.append(model)
    parallelize_module(models[0], mesh_of(size), {"0": ExpertParallel()})
    compare(*models)


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
    """As torchtitan does it: experts over one dim of the mesh, FSDP2 over the other, and over both for what is dense.

    FSDP2 shards whole experts or rows of each. The bytes of one device go out; loaded into a model that is sharded so
    they go out again.
    """
    config = NVFP4 if format.startswith("nvfp4") else FP8
    mesh = DeviceMesh(device().type, torch.arange(size, device="cpu").view(2, -1), mesh_dim_names=("data", "experts"))
    everywhere, policy = mesh_of(size), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # torchtitan gives both meshes to one call, where FSDP2 takes two (PyTorch 2.12).
    by_one_call = dim == 1 and hasattr(fsdp_common, "ShardPlacementResult")

    def made(seed: int) -> nn.Module:
        # The first rank of each pair holds three experts, the other two.
        torch.manual_seed(seed)
        model = nn.Sequential(Routed(5))
        quantize_(model, config, filter_fn=linears_and_experts())
        return model

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
    model = mlp(FP8, features=FEATURES)
    fully_shard(model, mesh=mesh_of(size))
    model(tokens(4, FEATURES[0]))
    if rank == 0:
        (folder / "there").mkdir()
        (folder / "there" / "file").write_text("")
    for name, error in (("there", FileExistsError), ("full", OSError)):
        if rank == 0:
            safetensors.torch.save_file, kept = _no_space, safetensors.torch.save_file
        try:
            checkpoint.export(model, folder / name, shard_bytes=50_000)
        except error:
            pass
        else:
            raise AssertionError(f"{name}: nothing was raised")
        finally:
            if rank == 0:
                safetensors.torch.save_file = kept
    dist.barrier()
    assert [p.name for p in folder.iterdir()] == ["there"], list(folder.iterdir())


def _no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")
