"""A default device or dtype changes nothing: every tensor is made on a device that is named."""

import ast
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from every_layer import CONFIGS, MODELS, every_model, tokens
from helpers import FP8, NVFP4, converted, mlp, replace
from torchao.quantization import quantize_

import torchao_blockwise
from torchao_blockwise import checkpoint, diagnostics, linears_and_experts, ops, unconvert, weights_unchanged
from torchao_blockwise.diagnostics import self_test
from torchao_blockwise.formats import NVFP4_1X16
from torchao_blockwise.testing import assert_bitwise_equal, random_tensor

pytestmark = pytest.mark.usefixtures("no_interpreter")

PACKAGE = Path(torchao_blockwise.__file__).parent
# Those that PyTorch makes on the default device, among the ones in use here.
FACTORIES = "arange as_tensor empty empty_strided eye full linspace ones rand randint randn randperm tensor zeros"


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {"context": lambda: torch.device("meta"), "dtype": default_dtype}


def assert_same_results(run, mode: str) -> None:
    """`run(scope)` gives the same tensors and values in both scopes."""
    for expected, got in zip(run(contextlib.nullcontext), run(MODES[mode]), strict=True):
        if isinstance(got, torch.Tensor):
            assert_bitwise_equal(got.detach(), expected.detach())
        else:
            assert got == expected


@every_model
@pytest.mark.parametrize("config", ("fp8", "nvfp4"))
@pytest.mark.parametrize("mode", MODES)
def test_layers_train_bit_for_bit(model, config, mode):
    def run(scope) -> list:
        torch.manual_seed(0)
        make, then = MODELS[model]
        layer, x, ends = make(), tokens(model), torch.tensor([3, 3, 30], dtype=torch.int32)
        # Their own forward passes make the ends, on the default device.
        if model == "experts":
            layer.forward = lambda x: layer.experts(x, ends)
        elif model == "grouped":
            layer.forward = lambda x: F.grouped_mm(x, layer.weight.transpose(-2, -1), offs=ends)
        results = []
        with scope():
            quantize_(layer, CONFIGS[config], filter_fn=linears_and_experts())
            if then is not None:
                then(layer)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            for _ in range(2):
                out = layer(x)
                out.square().mean().backward()
                results += [out.detach(), *(p.grad.clone() for p in layer.parameters())]
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad(), weights_unchanged(layer):
                return [*results, layer(x)]

    assert_same_results(run, mode)


def model_of(config):
    """Made on the CPU, and converted in the mode."""
    with torch.device("cpu"):
        model = mlp()
    return converted(model, config)


def saved(config, kind: str, folder: Path) -> list:
    """The file that is exported, and what it and a plain file give in models that load them."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, masters, quantized = (model_of(replace(config, master_weights=masters)) for masters in (True, True, False))
    checkpoint.export(model, folder / "exported", format=kind)
    checkpoint.load(masters, folder / "exported")
    (folder / "plain").mkdir()
    safetensors.save_file(unconvert(model).state_dict(), folder / "plain" / "model.safetensors")
    checkpoint.load(quantized, folder / "plain")
    exported = (folder / "exported" / "model.safetensors").read_bytes()
    return [exported, *masters.state_dict().values(), *quantized.state_dict().values()]


def names_of_experts(folder: Path) -> list:
    """Experts whose parts transformers has in a file each."""
    transformers = pytest.importorskip("transformers", "5.0")
    sizes = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    quantize_(model, FP8, filter_fn=linears_and_experts())
    checkpoint.export(model, folder / "exported")
    return [(folder / "exported" / "model.safetensors").read_bytes()]


def observed(config) -> list:
    model = model_of(config)
    with diagnostics.NumericsMonitor(model, every=1) as monitor:
        model(random_tensor(24, 64)).square().mean().backward()
        return [repr(monitor.step()), repr(diagnostics.memory_report(model))]


def rounded() -> list:
    """Random bits by numbers of the host, one of them a tensor, and the transform."""
    rounding = ops.StochasticRounding(1, 2, torch.tensor(3, device="cpu"))
    copies = ops.quantize(random_tensor(33, 64), NVFP4_1X16, columnwise=True, hadamard=True, stochastic=rounding)
    return [*copies.rowwise.tensors, *copies.columnwise.tensors]


FEATURES = {
    "fp8": lambda folder: [*saved(FP8, "fp8_block", folder), *observed(FP8)],
    "nvfp4": lambda folder: [*saved(NVFP4, "nvfp4_compressed_tensors", folder), *observed(NVFP4)],
    "experts": names_of_experts,
    "layer_checks": lambda folder: [repr([*self_test.check_layers(torch.device("cpu"))])],
    "rounding": lambda folder: rounded(),
    "doctor": lambda folder: [repr(diagnostics.examine())],
}


# A default dtype changes the initial values of models.
WITHOUT_MODEL = "layer_checks", "rounding", "doctor"


@pytest.mark.parametrize(
    ("feature", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (name == "doctor"))
        for mode, names in (("context", FEATURES), ("dtype", WITHOUT_MODEL))
        for name in names
    ],
)
def test_features(feature, mode, tmp_path):
    """Models and inputs are on the CPU, where helpers make them."""

    def run(scope) -> list:
        folder = tmp_path / scope.__name__
        folder.mkdir()
        with scope():
            return FEATURES[feature](folder)

    assert_same_results(run, mode)


def test_import():
    """Under a default device on which nothing can be computed."""
    program = "import torch; torch.set_default_device('meta'); import torchao_blockwise.diagnostics"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_tensor_is_made_on_a_device_that_is_named():
    """Also in what runs on GPUs only."""
    factories = [f"torch.{name}" for name in FACTORIES.split()]
    unnamed = [
        f"{file.relative_to(PACKAGE)}:{call.lineno}"
        for file in PACKAGE.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        # None is the name of a `**` that may bring it.
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in factories
        and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert unnamed == []
