"""Checks on every rank of models that `from_pretrained` shards with FSDP2 before they have values."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from exported_models import FORMATS, export, losses, tensors_in
from helpers import assert_same_tensors
from pretrained_models import model_of, write
from ranks import device, folder_of_all
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.quantization import quantize_

from torchao_blockwise import recommended_layers
from torchao_blockwise.integrations.transformers import from_pretrained
from torchao_blockwise.testing import assert_bitwise_equal, relative_error

RECIPE_OF = {format: "fp8" if format.startswith("fp8") else "nvfp4" for format in FORMATS}


def written(family: str, format: str) -> Path:
    """The folder of a checkpoint that the first rank has written."""
    folder = folder_of_all()
    if dist.get_rank() == 0:
        write(family, format, folder / "x")
    dist.barrier()
    return folder


def shard(model) -> None:
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def every_rank_reads(rank: int, family: str, format: str, trainable: str) -> None:
    """The losses of the model on one device, bit for bit, and every byte of the files, which the first rank writes."""
    folder, options = written(family, format), {"dtype": torch.float32, "device": device()}
    model = from_pretrained(folder / "x", RECIPE_OF[format], trainable, parallelize=shard, **options)
    assert all(hasattr(p, "placements") for p in model.parameters())
    export(model, folder / "out", format)
    whole = from_pretrained(folder / "x", RECIPE_OF[format], trainable, **options)
    assert losses(model) == losses(whole)
    if rank == 0:
        assert_same_tensors(tensors_in(folder / "out"), tensors_in(folder / "x"))
    # Also into shards that have trained, or hold other values.
    from torchao_blockwise import checkpoint

    checkpoint.load(model, folder / "x")
    export(model, folder / "again", format)
    if rank == 0:
        assert_same_tensors(tensors_in(folder / "again"), tensors_in(folder / "x"))


def distribute_by_transformers(model, **sizes: int) -> None:
    config = transformers.distributed.DistributedConfig(**sizes)
    config, _, mesh = model.prepare_distribute_model(config)
    model.maybe_distribute_model(model, config, mesh)


def a_plan_of_transformers(rank: int, family: str, format: str) -> None:
    """FSDP2 by transformers' config: the losses of the model on one device, bit for bit."""
    if not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):
        return
    folder, options = written(family, format) / "x", {"dtype": torch.float32, "device": device()}
    distribute = functools.partial(distribute_by_transformers, fsdp_size=2)
    model = from_pretrained(folder, RECIPE_OF[format], parallelize=distribute, **options)
    assert all(hasattr(p, "placements") for p in model.parameters())
    assert losses(model) == losses(from_pretrained(folder, RECIPE_OF[format], **options))


def experts_of_a_plan(rank: int, ep_size: int) -> None:
    """Experts that transformers splits at blocks, or sends tokens to: those of one device, in another order of sums."""
    if not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):
        return
    results = []
    for is_distributed in (False, True):
        model = model_of("Qwen3Moe", num_experts=4, moe_intermediate_size=256, num_key_value_heads=4).to(device())
        quantize_(model, FORMATS["fp8_block"], filter_fn=recommended_layers(model))
        if is_distributed:
            distribute_by_transformers(model, tp_size=2, ep_size=ep_size)
        module, generator = model.model.layers[0].mlp.experts, torch.Generator().manual_seed(0)
        x, dy = torch.randn(2, 64, 256, generator=generator).to(device())
        scores, ids = torch.rand(64, 4, generator=generator).to(device()).topk(2)
        x.requires_grad_()
        out = module(x, ids, scores)
        out.backward(dy)
        results.append([out.detach(), x.grad, *values_of_gradients(module)])
    for got, expected in zip(*results, strict=True):
        assert relative_error(got, expected) < 1e-6


def values_of_gradients(module) -> list[torch.Tensor]:
    grads = [p.grad for p in module.parameters()]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def the_first_rank_sends(rank: int, family: str, format: str) -> None:
    """PyTorch broadcasts the state dict of the first rank to models without values."""
    folder, recipe = written(family, format), RECIPE_OF[format]
    state = from_pretrained(folder / "x", recipe, dtype=torch.float32).state_dict() if rank == 0 else {}
    model = from_pretrained(folder / "x", recipe, dtype=torch.float32, device="meta", parallelize=shard)
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dsd.set_model_state_dict(model, state, options=options)
    expected = from_pretrained(folder / "x", recipe, dtype=torch.float32)
    for name, x in expected.state_dict().items():
        assert_bitwise_equal(model.state_dict()[name].full_tensor(), x, name)
    assert losses(model) == losses(expected)


def adapters_are_sharded(rank: int, family: str, format: str) -> None:
    """LoRA on a frozen base: added to the whole model, which is sharded after; as on one device."""
    import peft

    folder, made = written(family, format), []
    for is_sharded in (True, False):
        base = from_pretrained(folder / "x", RECIPE_OF[format], "adapters", dtype=torch.float32)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        if is_sharded:
            shard(base)
        made.append(losses(adapted))
        assert made[0][-1] < made[0][0]
        if is_sharded:
            continue
        export(adapted.unload(), folder / f"out-{rank}", format)
        assert_same_tensors(tensors_in(folder / f"out-{rank}"), tensors_in(folder / "x"))
    torch.testing.assert_close(*made, rtol=1e-5, atol=0)


def all_ranks_raise(rank: int, family: str, format: str) -> None:
    """The error of the rank whose files are damaged, or missing."""
    folder = written(family, format)
    mine = [folder / "x"] * 2
    if rank == 1:
        mine = [folder / "damaged", folder / "empty"]
        write(family, format, mine[0], num_hidden_layers=1, layer_types=["full_attention"])
        (mine[0] / "config.json").write_text((folder / "x" / "config.json").read_text())
        mine[1].mkdir()
    for path, error in zip(
        mine, ((KeyError, r"damaged has no model\.layers\.1\."), (FileNotFoundError, "empty has no"))
    ):
        with pytest.raises(error[0], match=error[1]):
            from_pretrained(path, "fp8", parallelize=shard)


_CT = "nvfp4_compressed_tensors"
CASES = {
    2: (
        [
            ("every_rank_reads", "Qwen3", "fp8_block", "full"),
            ("every_rank_reads", "Qwen3Moe", _CT, "adapters"),
            ("the_first_rank_sends", "Qwen3", "fp8_block"),
            ("all_ranks_raise", "Qwen3", "fp8_block"),
            ("a_plan_of_transformers", "Llama", "fp8_block"),
            ("experts_of_a_plan", 1),
            ("experts_of_a_plan", 2),
        ],
        [
            ("every_rank_reads", "Qwen3", _CT, "full"),
            ("every_rank_reads", "Qwen3Moe", "fp8_block", "adapters"),
            ("adapters_are_sharded", "Qwen3", "fp8_block"),
            ("adapters_are_sharded", "Llama", "nvfp4_modelopt"),
        ],
    )
}
