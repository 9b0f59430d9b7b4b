"""What test_export_over_ranks.py spawns: ranks that share a model export the bytes of one device."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from exported_models import tensors_in
from helpers import FP8, NVFP4, mlp, replace
from live_memory import peak_of
from operands_read import OperandsRead, assert_files_hold
from ranks import join, leave, run_each
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, experts, linears_and_experts
from torchao_blockwise.checkpoint import gathering
from torchao_blockwise.distributed import ExpertParallel, MasterWeightOptimizer
from torchao_blockwise.nn import SwiGLUExperts
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal

# Shards end inside of blocks, and unevenly.
FEATURES = (200, 300, 130)


def folder_of_all() -> Path:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def compare(model: nn.Module, reference: nn.Module, format: str = "fp8_block") -> None:
    """Both exports hold the same bytes."""
    folder = folder_of_all()
    checkpoint.export(model, folder / "shared", format, shard_bytes=50_000)
    if dist.get_rank() == 0:
        checkpoint.export(reference, folder / "whole", format)
        (file,) = (folder / "whole").glob("*.safetensors")
        expected, got = safetensors.torch.load_file(file), {}
        for part in (folder / "shared").glob("*.safetensors"):
            got |= safetensors.torch.load_file(part)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            assert got[name].dtype == x.dtype, name
            assert_bitwise_equal(got[name].view(torch.uint8), x.view(torch.uint8), name)
        assert sorted(p.name for p in folder.iterdir()) == ["shared", "whole"]
    dist.barrier()
    # All ranks have the same, in the order that was said.
    weights, whole = checkpoint.quantized_weights(model, format), dict(checkpoint.quantized_weights(reference, format))
    got = list(weights)
    assert weights.metadata() == {name: (x.dtype, tuple(x.shape)) for name, x in got}
    assert [name for name, _ in got] == list(weights.metadata()) == list(whole)
    assert checkpoint.checksums(weights) == checkpoint.checksums(whole.items())
    for name, x in got:
        assert_bitwise_equal(x.detach().view(torch.uint8), whole[name].detach().view(torch.uint8), name)


class Gathers(TorchDispatchMode):
    """Counts the bytes that gathers give."""

    nbytes = calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops._c10d_functional.all_gather_into_tensor:
            self.nbytes += out.nbytes
        if func.overloadpacket is torch.ops.c10d._allgather_base_:
            self.nbytes += args[0].nbytes
        if func.overloadpacket is torch.ops.c10d.allgather_into_tensor_coalesced_:
            self.nbytes += sum(x.nbytes for x in args[0])
            self.calls += 1
        return out


def gathers_bytes(rank: int, size: int, masters: bool) -> None:
    """A byte an element of the weights, in high precision the biases alone; padded where rows split unevenly."""
    model = mlp(replace(FP8, master_weights=masters), features=FEATURES)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(torch.randn(4, FEATURES[0]))
    inner, hidden, outer = FEATURES
    with Gathers() as gathers:
        list(checkpoint.quantized_weights(model))
    least = hidden * (inner + outer) + 4 * (hidden + outer)
    assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def gathers_bytes_nvfp4(rank: int, size: int, masters: bool) -> None:
    """Half a byte an element of weights whose rows split evenly, a byte of others."""
    inner, hidden, outer = 208, 304, 144
    model = mlp(replace(NVFP4, master_weights=masters), features=(inner, hidden, outer))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(torch.randn(4, inner))
    with Gathers() as gathers:
        list(checkpoint.quantized_weights(model, "nvfp4_compressed_tensors"))
    first = hidden * inner // (1 if hidden % size and masters else 2)
    least = first + hidden * outer // 2 + 4 * (hidden + outer)
    assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def gathers_together(rank: int, size: int, bucket_bytes: int, calls: int) -> None:
    """Weights that split evenly, in calls of so many bytes; one between them by itself. The bytes do not change."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        # Four weights of about 395 000 elements; the second one has an odd number of rows.
        features = ((256, 1536), (1536, 257), (257, 1536), (1536, 258))
        model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in features))
        quantize_(model, FP8)
        return model

    model, reference = made(), made()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(size))
    gathering._BUCKET_BYTES, kept = bucket_bytes or gathering._BUCKET_BYTES, gathering._BUCKET_BYTES
    try:
        with Gathers() as gathers:
            got = list(checkpoint.quantized_weights(model))
    finally:
        gathering._BUCKET_BYTES = kept
    assert gathers.calls == calls
    for (name, x), (other, whole) in zip(got, checkpoint.quantized_weights(reference), strict=True):
        assert name == other
        assert_bitwise_equal(x.detach().view(torch.uint8), whole.detach().view(torch.uint8), name)


def mesh_of(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(size)))


def shards(rank: int, size: int, masters: bool) -> None:
    config = replace(FP8, master_weights=masters)
    model = mlp(config, features=FEATURES)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    x = torch.randn(4, FEATURES[0], generator=torch.Generator().manual_seed(0))
    model(x)
    compare(model, mlp(config, features=FEATURES))


def shards_nvfp4(rank: int, size: int, masters: bool) -> None:
    config, features = replace(NVFP4, master_weights=masters), (208, 304, 144)
    model = mlp(config, features=features)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size))
    model(torch.randn(4, features[0], generator=torch.Generator().manual_seed(0)))
    compare(model, mlp(config, features=features), "nvfp4_compressed_tensors")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkvo":
            self.add_module(f"{name}_proj", nn.Linear(208, 144, bias=False))

    def forward(self, x):
        return self.o_proj(x) + self.q_proj(x) + self.k_proj(x) + self.v_proj(x)


def attention(config) -> nn.Module:
    torch.manual_seed(0)
    model = Attention()
    quantize_(model, config)
    return model


def shards_scale_groups(rank: int, size: int) -> None:
    """Weights that share a tensor scale while they train are gathered in 4 bits, all of them."""
    config = replace(NVFP4, scale_groups=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*quantized anew")
        model, policy = attention(config), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh_of(size), mp_policy=policy)
        compare(model, attention(config).bfloat16(), "nvfp4_compressed_tensors")
        with Gathers() as gathers:
            list(checkpoint.quantized_weights(model, "nvfp4_compressed_tensors"))
        least = 4 * 144 * 208 // 2
        assert least <= gathers.nbytes < 1.05 * least, (gathers.nbytes, least)


def splits_scale_groups(rank: int, size: int) -> None:
    """Under tensor parallelism they are gathered in high precision, and quantized again as they trained."""
    config = replace(NVFP4, scale_groups=(("q_proj", "k_proj", "v_proj", "o_proj"),))
    model = attention(config)
    parallelize_module(model, mesh_of(size), {f"{name}_proj": ColwiseParallel() for name in "qkvo"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compare(model, attention(config), "nvfp4_compressed_tensors")


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
        x = torch.randn(4, sizes[kind][0], generator=torch.Generator().manual_seed(0))
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
    x = torch.randn(4, features[0], generator=torch.Generator().manual_seed(rank))
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


def streams(rank: int, size: int, masters: bool) -> None:
    """What ranks hold beside their shards, while they write and read, is as much for many layers as for few."""
    width, config, peaks, folder = 384, replace(FP8, master_weights=masters), [], folder_of_all()
    gathering._BUCKET_BYTES, kept = width * width, gathering._BUCKET_BYTES
    try:
        for count in (3, 18):
            torch.manual_seed(0)
            # All alike: what reading takes depends on values, a little.
            alike = nn.Linear(width, width, bias=False)
            model = nn.Sequential(*(copy.deepcopy(alike) for _ in range(count)))
            quantize_(model, config)
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh_of(size))
            model(torch.randn(4, width))
            peaks.append(peak_of(checkpoint.export, model, folder / str(count), shard_bytes=width * width))
            if masters:
                peaks.append(peak_of(checkpoint.load, model, folder / str(count)))
    finally:
        gathering._BUCKET_BYTES = kept
    few, many = peaks[: len(peaks) // 2], peaks[len(peaks) // 2 :]
    # Beside a layer's elements, numbers of each layer: scales and amaxes of its blocks.
    assert all(0 < b <= a + width * width // 10 for a, b in zip(few, many)), peaks


def plain(x: torch.Tensor) -> torch.Tensor:
    return getattr(x, "hp", x).detach()


def rounds_as_it_gathers(rank: int, size: int) -> None:
    model, policy = mlp(FP8, features=FEATURES), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(size), mp_policy=policy)
    model(torch.randn(4, FEATURES[0]))
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
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "tensor"))
    model = mlp(config, features=(256, 512, 256))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data"])
    model(torch.randn(4, 256, generator=torch.Generator().manual_seed(0)))
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
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "experts"))
    everywhere, policy = mesh_of(size), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # torchtitan 0.3 gives both meshes to one call, where FSDP2 takes two (PyTorch 2.12); 0.2 calls it for each.
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
        model(torch.randn(20, 192, generator=torch.Generator().manual_seed(rank)))
        compare(model, rounded(reference), format)
        folder, model = folder_of_all(), spread(made(1))
        if rank == 0:
            checkpoint.export(reference, folder / "files", format)
        dist.barrier()
        checkpoint.load(model, folder / "files")
        compare(model, reference, format)


def rounded(model: nn.Module) -> nn.Module:
    """As FSDP2 rounds what it gathers in bf16; what is not converted stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, MasterWeightTensor):
                parameter.hp.copy_(parameter.hp.bfloat16())
    return model


def raises_on_all_ranks(rank: int, size: int) -> None:
    """A directory that is there on the first rank; and a disk that is full there."""
    folder = folder_of_all()
    model = mlp(FP8, features=FEATURES)
    fully_shard(model, mesh=mesh_of(size))
    model(torch.randn(4, FEATURES[0]))
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


RUNS = {
    f.__name__: f
    for f in (
        shards,
        shards_nvfp4,
        reads_what_it_exports,
        streams,
        loads,
        joins_sharded_nvfp4,
        gathers_bytes,
        gathers_bytes_nvfp4,
        gathers_together,
        rounds_as_it_gathers,
        shards_scale_groups,
        splits,
        splits_shards,
        splits_scale_groups,
        spreads_experts,
        spreads_and_shards_experts,
        raises_on_all_ranks,
    )
}


def run_cases(rank: int, ranks: int, port: int, file: str, cases) -> None:
    """Leaves what was raised in each case, or None."""
    join(rank, ranks, port, seconds=180)
    run_each(RUNS, rank, cases, file)
    leave()
