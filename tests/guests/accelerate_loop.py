"""A loop of Accelerate over random data; rank 0 prints the mean loss of each step."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    set_seed(7)
    accelerator = Accelerator(cpu=True)
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(3):
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean().item()
            accelerator.print(f"epoch {epoch} loss {mean:.9f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
