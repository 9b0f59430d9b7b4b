"""Memory of LoRA on quantized bases, and with and without `fuse`: what formats and saved copies take."""

import json

import pytest

pytest.importorskip("transformers", "5.0")
pytestmark = pytest.mark.usefixtures("without_gpu")
# {model: (fused modules of two blocks, copies that are not saved, width of the input)}
MODELS = {
    "transformers Qwen3": (4, 2 * (2 + 1), 4096),
    "torchtitan qwen3 debugmodel_non_fused_qkv": (4, 2 * (2 + 1), 256),
    "torchtitan llama3 8B": (2, 2, 4096),
}


@pytest.mark.parametrize("model", MODELS)
def test_fused_layers_save_the_copy_of_their_input_once(model, tmp_path):
    """An FP8 copy takes a byte an element and a scale of 4 bytes for 128×128."""
    import fuse_memory

    if "torchtitan" in model:
        pytest.importorskip("torchtitan.models.common.linear")
    fuse_memory.main(["--tokens", "128", "--only", model, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "fuse_memory.json").read_text())["rows"]
    fused, copies, width = MODELS[model]
    assert [(row["recipe"], row["fused modules"]) for row in rows] == [("FP8", fused), ("NVFP4", fused)]
    assert all(row["with `fuse`"] < row["saved MiB"] and row["peak, ×"] <= 1 for row in rows)
    assert (rows[0]["saved MiB"] - rows[0]["with `fuse`"]) * 2**20 == copies * 128 * width * (1 + 4 / 128**2)


def test_bases_of_adapters_take_what_their_formats_say(tmp_path):
    """Only the base differs between rows."""
    pytest.importorskip("peft")
    import adapter_memory

    argv = ["--hidden", "256", "--layers", "1", "--tokens", "32", "--out", str(tmp_path)]
    adapter_memory.main(argv)
    rows = json.loads((tmp_path / "adapter_memory.json").read_text())["rows"]
    bits = {name: row["bits a base weight"] for name, row in rows.items()}
    expected = {
        "bf16": 16,
        "FP8, quantized Parameters": 8 + 32 / 128**2,
        "NVFP4, quantized Parameters": 4 + 8 / 16**2,
        # A byte for 64 weights, and a float for 256 of those.
        "NF4 of bitsandbytes": 4 + 8 / 64 + 32 / 64 / 256,
    }
    assert len(bits) >= 3 and bits == pytest.approx({name: expected[name] for name in bits}, rel=1e-3)
    assert len({row["saved for backward MiB"] for row in rows.values()}) == 1
    others = [row["peak of a step MiB"] - row["base MiB"] for row in rows.values()]
    assert others == pytest.approx([others[0]] * len(others), rel=0.01)
