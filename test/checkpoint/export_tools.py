"""Of models that ranks share: folders, meshes, inputs, and whether they export the bytes of one device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from ranks import device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint
from torchao_blockwise.tensors import MasterWeightTensor
from torchao_blockwise.testing import assert_bitwise_equal

# Shards end inside of blocks, and unevenly.
FEATURES = (200, 300, 130)


def folder_of_all() -> Path:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    return Path(folders[0])


def mesh_of(size: int) -> DeviceMesh:
    return DeviceMesh(device().type, list(range(size)))


def tokens(count: int, features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, features, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(device())


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


def plain(x: torch.Tensor) -> torch.Tensor:
    return getattr(x, "hp", x).detach()


def rounded(model: nn.Module) -> nn.Module:
    """As FSDP2 rounds what it gathers in bf16; what is not converted stays."""
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, MasterWeightTensor):
                parameter.hp.copy_(parameter.hp.bfloat16())
    return model


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
