"""A small transformer, trained on a mesh or in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import meshbook
from meshbook.distributed import Mesh

Step = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A layer with attention of two heads, and a part that takes its input by name and has two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.gates = Gates()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        gate, value = self.gates(x=x)
        return x + gate.sigmoid() * value


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.quiet = nn.Linear(16, 32), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value = self.up(x).unflatten(-1, (2, 16)).movedim(-2, 0)
        return gate, self.quiet(value * 2)


def transformer() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(11, 16), Block(), nn.LayerNorm(16), nn.Linear(16, 11))


def as_it_is(step: Step) -> Step:
    return step


def train(
    mesh: Mesh | None,
    plan: Mapping[str, Any] | None = None,
    compile: Callable[[Step], Step] = as_it_is,
    optimizer: str = "SGD",
    lr: float = 0.3,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of four steps, the last by another rate, and the state.

    Sequences of 9, and batches of 5, are cut unequally.
    """
    torch.manual_seed(1)
    model, text = transformer(), torch.randint(0, 11, (5, 10))
    if mesh is not None:
        meshbook.module_to_mesh(model, mesh, plan)
        text = meshbook.distribute(text, mesh, ["dp"] if "dp" in mesh.axes else None)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=lr, **options)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, 3)

    def step(text: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        return loss

    run, losses = compile(step), []
    for _ in range(4):
        losses.append(run(text).item())
        schedule.step()
    state = model.state_dict()
    return losses, {name: t.full_tensor() if mesh is not None else t for name, t in state.items()}
