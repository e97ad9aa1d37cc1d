"""A training by `meshbook.elastic` in which ranks are killed, and its undisturbed losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshbook
from meshbook.distributed import Mesh

Trouble = Callable[[Any], object]
"""A function that is called in the body with the loop."""


def kill_once(procs: meshbook.ProcMesh, plan: dict[int, int]) -> Trouble:
    """End ranks, each before the step of its batch, once. plan: batch to rank."""
    left = dict(plan)

    def kill(loop: Any) -> None:
        if (rank := left.pop(loop.done, None)) is not None:
            os.kill({each.rank: each.pid for each in procs.base().status()}[rank], signal.SIGKILL)

    return kill


def train(
    mesh: Mesh,
    folder: Path,
    trouble: Trouble = lambda loop: None,
    *,
    batches: int = 20,
    is_compiled: bool = False,
    seen: list[int] | None = None,
    **options: Any,
) -> list[float]:
    """Train a small model with a cut weight and dropout; return the loss of each batch.

    seen: is given the number of each batch that the body begins with.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
    meshbook.module_to_mesh(model, mesh, {"0": "column"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data = [torch.randn(8, 8) for _ in range(batches)]
    losses: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = meshbook.compile(step) if is_compiled else step
    state = {"model": model, "optimizer": optimizer, "losses": losses}
    with meshbook.stream(data, mesh) as stream:
        loop = meshbook.elastic(stream, state, save=folder, **{"every": 4, **options})
        for x in loop:
            with loop.attempt():
                if seen is not None:
                    seen.append(loop.done)
                trouble(loop)
                losses.append(run(x).item())
    return losses


def relative(got: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference of losses."""
    assert len(got) == len(wanted)
    return max(abs(one - other) / abs(other) for one, other in zip(got, wanted, strict=True))
