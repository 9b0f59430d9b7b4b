"""
Checkpoints: load FP8, export to inference engines
==================================================

Models like DeepSeek-V3 are published in blockwise FP8, a format that vLLM and SGLang can run. ``checkpoint.load`` reads
such files into a model for training. ``checkpoint.export`` writes a trained model in the same format, with exactly the
bytes that the GEMMs use in training.
"""

# %%
# A published model
# -----------------
#
# Instead of downloading a model, this tutorial quantizes a small Llama on disk, from the command line. ``convert``
# processes one tensor at a time, so the model does not have to fit into memory.

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors
import torch
import transformers
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, checkpoint, recommended_layers

transformers.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
folder = tempfile.TemporaryDirectory()
plain, published, exported = (Path(folder.name) / name for name in ("plain", "published", "exported"))
config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
)
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).save_pretrained(plain)


def command_line(*arguments):
    command = [sys.executable, "-m", "torchao_blockwise", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(folder.name + "/", "").strip()


print(command_line("convert", plain, published))

# %%
# For each layer, the file contains a weight in e4m3 and a scale for each block of 128 × 128. In this format, the scale
# is called ``weight_scale_inv``, although the payload is multiplied by it, not divided.


def show(path):
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        for name in file.keys():
            if "layers.0.mlp.up_proj" in name:
                tensor = file.get_tensor(name)
                print(f"{name:50}{tensor.dtype!s:22}{tuple(tensor.shape)}")


show(published)
print(json.dumps(json.loads((published / "config.json").read_text())["quantization_config"], indent=1))

# %%
# Load
# ----
#
# Convert a model, then load the files. The Parameters are fp32 master weights. Their values quantize to the same
# bytes again, so loading adds no rounding error.

model = transformers.LlamaForCausalLM(config)
quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=recommended_layers(model))
checkpoint.load(model, published)
checkpoint.export(model, exported)
print(command_line("verify", published, exported))

# %%
# Train
# -----

text = torch.tensor(list(b"Read in eight bits, trained, written in eight bits. " * 16))
batch = text[: len(text) // 32 * 32].view(-1, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(10):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 9):
        print(f"step {step}: loss {loss.item():.3f}")

# %%
# Export
# ------
#
# ``export`` writes a folder that vLLM and SGLang can read (``vllm serve folder``). The folder appears only when it is
# complete. This tutorial does not run an engine.

served = Path(folder.name) / "served"
checkpoint.export(model, served)
print(*sorted(f"{path.name}: {path.stat().st_size:,} bytes" for path in served.iterdir()), sep="\n")
show(served)

# %%
# During training, for example in reinforcement learning, an engine can receive the weights without files:

weights = checkpoint.quantized_weights(model)
for name, tensor in list(weights)[:4]:
    print(f"{name:50}{tensor.dtype!s:22}{tuple(tensor.shape)}")

# %%
# For tools that do not support FP8, ``load`` can also read the files into a plain model, which gets the decoded values.

again = transformers.LlamaForCausalLM(config)
checkpoint.load(again, served)
layer = again.model.layers[0].mlp.up_proj.weight
by_name = dict(weights)
payload = by_name["model.layers.0.mlp.up_proj.weight"].float()
scale = by_name["model.layers.0.mlp.up_proj.weight_scale_inv"]
decoded = payload * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: payload.shape[0], : payload.shape[1]]
print("the same values:", torch.equal(layer, decoded))
folder.cleanup()

# %%
# To continue training later, save a plain checkpoint (``torch.save``, ``save_pretrained``,
# ``torch.distributed.checkpoint``), because master weights are more precise than the exported ones. :doc:`/saving`
# covers plain checkpoints, sharded models and other formats.
