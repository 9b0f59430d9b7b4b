"""Train a LightningModule in blockwise FP8 with one plugin.

pip install -e ".[models]"; python docs/examples/lightning_module.py     # offline, seconds on a CPU
"""

import lightning
import torch
from torch import nn

from torchao_blockwise.integrations.lightning import BlockwisePrecision


class Regression(lightning.LightningModule):
    """Learns a fixed random map."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(512, 128)
    data = torch.utils.data.TensorDataset(x, x @ torch.randn(128, 128) / 11)
    module = Regression()
    trainer = lightning.Trainer(
        plugins=[BlockwisePrecision("fp8")],
        max_epochs=2,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=64))
    print(f"loss {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")


if __name__ == "__main__":
    main()
