"""LoRA on a frozen base whose weights are FP8 themselves: one byte a parameter, no masters.

pip install "torchao_blockwise[models]"; python docs/examples/lora.py         # offline, seconds on a CPU
"""

import tempfile

import peft
import torch
import transformers

from torchao_blockwise.integrations.transformers import BlockwiseFP8Config

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    torch.manual_seed(0)
    config = BlockwiseFP8Config(master_weights=False)
    with tempfile.TemporaryDirectory() as folder:
        # In the place of a model that was downloaded.
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    model.print_trainable_parameters()

    text = torch.tensor(list(b"Adapters are plain, the base is FP8. " * 16))
    batch = text[: len(text) // 32 * 32].view(-1, 32)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

    merged = model.merge_and_unload()
    print(type(merged.model.layers[0].self_attn.q_proj.weight).__name__, "after merging")


if __name__ == "__main__":
    main()
