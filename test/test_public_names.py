"""The public names: what `import torchao_blockwise` offers is listed here; listed names exist and are documented."""

import functools
import importlib
import inspect
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import torchao_blockwise
from torchao_blockwise import diagnostics, ops

SIGNATURES = """
    BlockwiseFP8Tensor.from_hp NVFP4Tensor.from_hp linear conversion_report dry_run fuse fusion_report keep_last_blocks
    min_features recommended_layers skip_fqns unconvert ops.quantize ops.matmul ops.transpose ops.grouped_matmul
    ops.make_groups ops.norm_quantize ops.swiglu_quantize ops.swiglu_backward_quantize
    ops.quantize_by
""".split()  # noqa: SIM905
MODULES = ("", ".formats", ".ops", ".tensors", ".nn", ".distributed", ".conversion", ".checkpoint", ".diagnostics")


def public(module: str) -> list[str]:
    return importlib.import_module(f"torchao_blockwise{module}").__all__


@pytest.mark.parametrize("module", MODULES)
def test_listed_names_exist_and_are_documented(module):
    names = public(module)
    package = importlib.import_module(f"torchao_blockwise{module}")
    assert len(set(names)) == len(names)
    for name in names:
        x = getattr(package, name)
        if inspect.isclass(x) or inspect.isfunction(x):
            assert inspect.getdoc(x), f"{module}.{name} has no docstring"


def signature(name: str) -> str:
    x = functools.reduce(getattr, name.split("."), torchao_blockwise)
    return f"{name}({', '.join(inspect.signature(x).parameters)})"


def test_signatures():
    assert_expected_inline(
        "\n".join(map(signature, SIGNATURES)),
        """\
BlockwiseFP8Tensor.from_hp(w, power_of_2_scales, config)
NVFP4Tensor.from_hp(w, block_size, scale_per_expert, config)
linear(x, weight, bias)
conversion_report(model)
dry_run(model, config, filter_fn)
fuse(model, round_once)
fusion_report(model)
keep_last_blocks(model, count)
min_features(features)
recommended_layers(model, config)
skip_fqns(patterns)
unconvert(model)
ops.quantize(x, fmt, rowwise, columnwise, power_of_2_scales, hadamard, stochastic, scale_per_group, tensor_amax, padded, groups, backend)
ops.matmul(a, b, out_dtype, bias, backend)
ops.transpose(x, columns, backend)
ops.grouped_matmul(a, b, groups, along, out_dtype, backend)
ops.make_groups(ends, tokens, fmt, backend)
ops.norm_quantize(norm, options, backend)
ops.swiglu_quantize(gate, up, options, groups, backend)
ops.swiglu_backward_quantize(dh, gate, up, options, groups, rounding_bits, backend)
ops.quantize_by(x, options, groups, tensor_amax, rounding_bits, backend)""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in (ops, diagnostics) for name in sorted(module._REMOVED)]
)
def test_a_removed_name_says_what_to_use_instead(module, name):
    package = module.__name__.removeprefix("torchao_blockwise.")
    uses = "ops|distributed|NumericsMonitor"
    with pytest.raises(AttributeError, match=rf"{package}\.{name} was removed in version 0.2; use ({uses})"):
        getattr(module, name)
    changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"`{package}.{name}" in changes or f"`{name}`" in changes
    assert not hasattr(module, "no_such_name")
