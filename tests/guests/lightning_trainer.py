"""Lightning's Trainer with strategy="ddp" over random data; rank 0 prints the mean loss of each step."""

import os
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        inputs, target = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), target)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} loss {mean:.9f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    warnings.simplefilter("ignore")
    lightning.seed_everything(7, verbose=False)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
