"""Checkpoints with as many layers, files and tensors as DeepSeek-V3's: work a tensor, and memory, do not grow."""

import json

import pytest
from helpers import FP8
from live_memory import peak_of
from torchao.quantization import quantize_

from torchao_blockwise import checkpoint, linears_and_experts, skip_lm_head
from torchao_blockwise._compat import hugging_face
from torchao_blockwise.checkpoint import files
from torchao_blockwise.checkpoint.files import Files
from torchao_blockwise.cli import convert, main

transformers = pytest.importorskip("transformers", "5.0")
pytest.importorskip("safetensors.torch")
LAYERS, DENSE, FILES, SHARD = 61, 3, 163, 2**16
# One block a weight: the numbers of tensors and files are those of the model, not their sizes.
SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 1, "vocab_size": 64,
    "num_key_value_heads": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": LAYERS,
    "first_k_dense_replace": DENSE, "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip


def config_of(experts: int, **options):
    return transformers.DeepseekV3Config(**SMALL | options, n_routed_experts=experts)


def write(folder, experts: int) -> dict[str, str]:
    """Save a model in about `FILES` files; returns the file of each tensor."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(experts)).bfloat16()
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) // FILES)
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.fixture
def counts(monkeypatch) -> dict[str, int]:
    """Counts of calls, and the largest number of open files."""
    found = dict.fromkeys(("open", "read", "asked", "quantized", "files"), 0)

    def count(what: str, holder, name: str) -> None:
        call = getattr(holder, name)

        def counted(*args, **options):
            found[what] += 1
            result = call(*args, **options)
            if holder is Files:
                found["files"] = max(found["files"], args[0]._opened.cache_info().currsize)
            return result

        monkeypatch.setattr(holder, name, counted)

    count("open", files, "_opened")
    count("read", Files, "read")
    count("asked", hugging_face, "reverted")
    count("quantized", convert.ops, "quantize")
    return found


@pytest.mark.parametrize("experts", (4, pytest.param(256, marks=pytest.mark.slow)))
def test_work_and_memory_stay_in_bounds(experts, tmp_path, counts):
    written = write(tmp_path / "plain", experts)
    names, shards, weights = len(written), len(set(written.values())), 3 * (LAYERS - DENSE) * experts
    assert names > weights and shards > FILES / 2
    counts["asked"] = 0
    command = ["convert", str(tmp_path / "plain"), str(tmp_path / "out"), "--shard-gb", str(SHARD / 2**30)]
    # What waits for a file, and next to it some tensors.
    assert peak_of(main, command) <= SHARD + 2**12 * experts
    assert counts["read"] == names and counts["quantized"] > weights
    # Once to know all names, and once to read; layers at the ends of files are read in another order.
    assert counts["open"] <= 3 * shards
    # Experts are two Parameters of a layer, about which transformers is asked once each; about all others twice.
    assert counts["asked"] == 2 * (LAYERS - DENSE) + 2
    assert 1 < counts["files"] <= 4
    assert len(Files(tmp_path / "out").tensors) == names + counts["quantized"]
    assert all(file.stat().st_size < 3 * SHARD for file in (tmp_path / "out").glob("*.safetensors"))


def test_export_asks_and_holds_as_little(tmp_path, counts):
    model = transformers.AutoModelForCausalLM.from_config(config_of(4, moe_intermediate_size=128)).bfloat16()
    quantize_(model, FP8, filter_fn=linears_and_experts() & skip_lm_head())
    assert peak_of(checkpoint.export, model, tmp_path / "out", shard_bytes=SHARD) <= 2 * SHARD
    assert counts["asked"] == 2 * (LAYERS - DENSE) + 2
    assert Files(tmp_path / "out").tensors.keys() == checkpoint.quantized_weights(model).metadata().keys()
