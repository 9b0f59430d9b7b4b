"""Models of diffusers: training with its tools, and saved models."""

import pytest
import torch
from helpers import assert_bitwise_equal, both_formats
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import recommended_layers

diffusers = pytest.importorskip("diffusers")


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 3, "sample_size": 8}
    options = {"caption_channels": 48, "cross_attention_dim": 64, "use_additional_conditions": False}
    return diffusers.PixArtTransformer2DModel(**sizes, **options)


def loss(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    images, captions = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 48)
    conditions = {"resolution": None, "aspect_ratio": None}
    timestep = torch.tensor([3, 500])
    out = model(images, captions, timestep=timestep, added_cond_kwargs=conditions).sample
    return out.square().mean()


def converted(config) -> nn.Module:
    model = transformer()
    quantize_(model, config, filter_fn=recommended_layers(model, config))
    return model


@both_formats
def test_checkpointing_ema_and_saving(config, tmp_path):
    model, plain = converted(config), transformer(1)
    loss(model).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    again = converted(config)
    again.enable_gradient_checkpointing()
    loss(again.train()).backward()
    for name, p in again.named_parameters():
        assert_bitwise_equal(p.grad, grads[name])

    average = diffusers.training_utils.EMAModel(model.parameters(), decay=0.5)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    average.step(model.parameters())
    average.copy_to(plain.parameters())
    average.copy_to(again.parameters())
    for name, x in again.state_dict().items():
        assert_bitwise_equal(x, plain.state_dict()[name])

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert {type(p) for p in loaded.parameters()} == {nn.Parameter}
    quantize_(loaded, config, filter_fn=recommended_layers(loaded, config))
    assert_bitwise_equal(loss(loaded.eval()).detach(), loss(model.eval()).detach())
