"""A loop of Lightning Fabric over random data; rank 0 prints the mean loss of each step."""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    seed_everything(7, verbose=False)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
            fabric.print(f"epoch {epoch} loss {mean:.9f}")


if __name__ == "__main__":
    main()
