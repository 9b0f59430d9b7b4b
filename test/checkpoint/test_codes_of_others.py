"""Files of others that hold what ours never do: codes that are NaN, experts in one tensor, other formats' codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import FP8, mlp, replace

from torchao_blockwise import checkpoint
from torchao_blockwise.testing import assert_bitwise_equal

sys.path.append(str(Path(__file__).parent))
pytest.importorskip("safetensors.torch")

import safetensors.torch as safetensors
from exported_models import SMALL, decoded_fp8, digest, language_model, logits, tensors_in

pytestmark = pytest.mark.usefixtures("no_interpreter")

both = pytest.mark.parametrize("masters", (True, False), ids=("masters", "quantized"))


@pytest.mark.parametrize("masters", (True, False, None), ids=("masters", "quantized", "plain"))
@pytest.mark.parametrize("code", (0x7F, 0xFF))
def test_codes_that_are_nan_stay_so(code, masters, tmp_path):
    """No finite number comes of them, neither in the model nor in what it computes; an export names the weight."""
    features = (200, 300, 130)
    checkpoint.export(mlp(FP8, features, seed=1), tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    places = [(3, 5), (140, 199), (299, 0)]
    for place in places:
        found["0.weight"].view(torch.uint8)[place] = code
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors")
    model = mlp(None if masters is None else replace(FP8, master_weights=masters), features)
    checkpoint.load(model, tmp_path / "out")
    weight = model[0].weight.detach()
    values = {True: lambda: weight.hp, False: lambda: weight.dequantize(), None: lambda: weight}[masters]()
    assert values.isnan().nonzero().tolist() == [list(place) for place in places]
    assert model[0](torch.ones(1, 200))[0, [3, 140, 299]].isnan().all()
    if masters is not None:
        with pytest.raises(ValueError, match=r"export: 0\.weight has NaN or Inf among its values"):
            checkpoint.export(model, tmp_path / "again")
        assert not (tmp_path / "again").exists()


@both
@pytest.mark.parametrize("name", ("Qwen3Moe", "Mixtral"))
def test_experts_in_one_tensor_are_read(name, masters, tmp_path):
    """`gate_up_proj` and `gate_up_proj_scale_inv`, as a model has them, and not one by one as transformers writes."""
    config = replace(FP8, master_weights=masters)
    model = language_model(name, config)
    checkpoint.export(model, tmp_path / "out")
    found = {n: x for n, x in tensors_in(tmp_path / "out").items() if ".experts." not in n}
    for n, p in model.named_parameters():
        if ".experts." in n:
            weight = p.quantized() if masters else p.operand()
            found |= {n: weight.qdata.clone(), f"{n}_scale_inv": weight.scale.clone()}
    (file,) = (tmp_path / "out").glob("*.safetensors")
    safetensors.save_file(found, file)
    other = language_model(name, config)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.ones(p.shape))
    checkpoint.load(other, tmp_path / "out")
    assert_bitwise_equal(logits(other), logits(model))
    checkpoint.export(other, tmp_path / "again")
    checkpoint.export(model, tmp_path / "first")
    before, after = tensors_in(tmp_path / "first"), tensors_in(tmp_path / "again")
    assert before.keys() == after.keys() and all(digest(x) == digest(after[n]) for n, x in before.items())


def gpt_oss():
    transformers = pytest.importorskip("transformers", "5.0")
    options = SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 256}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**options))


def test_gpt_oss_in_fp8_is_read(tmp_path):
    """`gate_up_proj_scale_inv` of experts [E, H, 2I]."""
    gpt_oss().save_pretrained(tmp_path / "out")
    found, values = tensors_in(tmp_path / "out"), {}
    for name in [name for name in found if name.endswith("_proj") and ".experts." in name]:
        experts, rows, columns = found[name].shape
        found[name] = torch.randn(experts, rows, columns).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.rand(experts, -(-rows // 128), -(-columns // 128)) + 0.5
        values[name] = decoded_fp8(found[name], found[f"{name}_scale_inv"])
    assert len(values) == 4
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    model = gpt_oss()
    checkpoint.load(model, tmp_path / "out")
    for name, x in values.items():
        assert_bitwise_equal(model.get_parameter(name).detach(), x, name)


@pytest.mark.parametrize("says", (True, False), ids=("config", "none"))
def test_mxfp4_is_named_with_a_remedy(says, tmp_path):
    """`gate_up_proj_blocks`, as GPT-OSS is published."""
    model = gpt_oss()
    model.save_pretrained(tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    for name in [name for name in found if name.endswith("_proj") and ".experts." in name]:
        experts, rows, columns = found.pop(name).shape
        found[f"{name}_blocks"] = torch.zeros(experts, columns, rows // 32, 16, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.zeros(experts, columns, rows // 32, dtype=torch.uint8)
    safetensors.save_file(found, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out" / "config.json").unlink()
    if says:
        (tmp_path / "out" / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    what = (
        "quant_method is 'mxfp4'; files of 'fp8'," if says else r"down_proj_blocks in .* is of MXFP4, which is not read"
    )
    before = {n: x.clone() for n, x in model.state_dict().items()}
    with pytest.raises(ValueError if says else KeyError, match=rf"{what}.*; take plain ones, in bfloat16"):
        checkpoint.load(model, tmp_path / "out")
    for n, x in model.state_dict().items():
        assert_bitwise_equal(x, before[n], n)
