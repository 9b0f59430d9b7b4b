"""A custom training loop with accelerate in blockwise FP8: convert, prepare, train, save.

pip install -e ".[models]"; python docs/examples/accelerate_loop.py     # offline, seconds on a CPU
accelerate launch --multi_gpu docs/examples/accelerate_loop.py                       # DDP
accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
    docs/examples/accelerate_loop.py                                                 # FSDP2
"""

import tempfile

import torch
import transformers
from accelerate import Accelerator
from torchao.quantization import quantize_

from torchao_blockwise import BlockwiseFP8TrainingConfig, recommended_layers, weights_unchanged

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def train(
    accelerator: Accelerator, folder: str, epochs: range = range(2), resume_from: str | None = None
) -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    # Before prepare, which wraps or shards. Leave mixed_precision at "no" or "bf16": "fp8" is another recipe.
    quantize_(model, BlockwiseFP8TrainingConfig(), filter_fn=recommended_layers(model))
    text = torch.tensor(list(b"Blocks of 128 share a scale. " * 36))
    loader = torch.utils.data.DataLoader(text[: len(text) // 32 * 32].view(-1, 32), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    if resume_from is not None:
        accelerator.load_state(resume_from)

    losses: list[float] = []
    for epoch in epochs:
        for batch in loader:
            # All microbatches of a step belong in here: they share each weight's copy.
            with weights_unchanged(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_state(f"{folder}/{epoch}")
    return model, losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator()
        _, losses = train(accelerator, folder)
        accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
