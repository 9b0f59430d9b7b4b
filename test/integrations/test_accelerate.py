"""accelerate: models that it loads and dispatches are converted after that, or offloaded converted to the CPU; its
float8 recipe over one is refused."""

import pytest
import torch
from helpers import FP8, both_formats, both_masters, converted, mlp, replace, saved_and_loaded
from torch import nn
from torchao.quantization import quantize_

from torchao_blockwise import MasterWeightTensor, conversion_report
from torchao_blockwise.testing import assert_bitwise_equal

accelerate = pytest.importorskip("accelerate", "1.6")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AORecipeKwargs  # noqa: E402


def dispatched(folder, device_map, config=None):
    plain = mlp()
    torch.save(plain.state_dict(), folder / "model.bin")
    with accelerate.init_empty_weights():
        model = mlp(config)
    model = accelerate.load_checkpoint_and_dispatch(
        model, str(folder / "model.bin"), device_map=device_map, offload_folder=str(folder)
    )
    return plain, model


def test_models_are_converted_after_they_are_dispatched(tmp_path):
    plain, model = dispatched(tmp_path, {"": "cpu"})
    quantize_(plain, FP8)
    quantize_(model, FP8)
    assert isinstance(model[0].weight, MasterWeightTensor)
    x = torch.randn(4, 64)
    assert_bitwise_equal(model(x).detach(), plain(x).detach())
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert saved_and_loaded(model.state_dict()).keys() == plain.state_dict().keys()


def test_weights_that_a_dispatch_replaces_are_said(tmp_path):
    """Converted before it: accelerate puts plain weights in the converted ones' place."""
    _, model = dispatched(tmp_path, {"": "cpu"}, FP8)
    with pytest.warns(UserWarning, match="in high precision, because its weight was replaced") as caught:
        model(torch.randn(4, 64))
    assert sorted(str(w.message).split()[0] for w in caught) == ["0", "2"]
    assert [layer.status for layer in conversion_report(model).layers] == ["replaced", "replaced"]


def test_what_is_offloaded_is_refused(tmp_path):
    _, model = dispatched(tmp_path, {"0": "cpu", "1": "cpu", "2": "disk"})
    with pytest.raises(ValueError, match=r"2: accelerate offloads its weight and replaces it .*; put it on a device"):
        quantize_(model, FP8)
    assert not isinstance(model[0].weight, MasterWeightTensor)


def offload_to_cpu(model, folder, **options):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), **options)


def offload_to_disk(model, folder):
    accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def dispatch(model, folder):
    accelerate.dispatch_model(model, {"0": "cpu", "1": "cpu", "2": "disk"}, main_device="cpu", offload_dir=str(folder))


@both_masters
@pytest.mark.parametrize("offload", (offload_to_cpu, offload_to_disk, dispatch))
def test_offloading_converted_weights_as_plain_ones_is_refused(offload, masters, tmp_path):
    model = mlp(replace(FP8, master_weights=masters))
    offload(model, tmp_path)
    fix = r"state_dict=dict\(model.named_parameters\(\)\) .* to the disk, call unconvert\(model\) first"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"[02]: accelerate replaced .*; .*{fix}"):
        model(torch.randn(4, 64))


@both_formats
@both_masters
def test_converted_weights_are_offloaded_to_the_cpu(config, masters, tmp_path):
    model, x = mlp(replace(config, master_weights=masters)), torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        offload_to_cpu(model, tmp_path, state_dict=dict(model.named_parameters()))
        assert model[0].weight.is_meta
        for _ in range(2):
            assert_bitwise_equal(model(x), expected)
    assert model[0].weight.is_meta


REASONS = {
    ("BlockwiseFP8TrainingConfig", True): r"1.weight .*, got torch.float8_e4m3fn; .* another recipe .* unconvert",
    ("NVFP4TrainingConfig", True): r"1.weight .*, got torch.float8_e4m3fn; .* another recipe .* unconvert",
    ("BlockwiseFP8TrainingConfig", False): r"not exact on quantized data \(1.weight\)",
    ("NVFP4TrainingConfig", False): "NVFP4Tensor packs two elements in a byte, so its transpose cannot be a view",
}


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    AcceleratorState._reset_state(reset_partial_state=True)


@both_formats
@both_masters
def test_it_is_refused(config, masters, accelerator):
    """prepare() takes the converted weight along in a layer of another class, and nothing of ours runs there."""
    model = converted(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), replace(config, master_weights=masters))
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(NotImplementedError, match=REASONS[type(config).__name__, masters]):
        model(torch.randn(16, 64))
