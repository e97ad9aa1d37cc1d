"""What a repeated step costs its controller in calls of Python functions, which only go down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from python_calls import only_on_3_11, usual
from torch import nn

import meshbook
from meshbook import this_host
from meshbook.distributed import Mesh

ONE_MAX, SGD_MAX, ADAMW_MAX = 46, 51, 53
"""To ask for a step of one operation, and for one that trains 8 layers; measured: 40, 45 and 47, where all that makes a
call anew each time took 75, 83 and 87."""


@pytest.fixture(scope="module")
def mesh(clean_end: None) -> Iterator[Mesh]:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        yield Mesh(procs)


def training(mesh: Mesh, optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], Any]:
    """A step that is repeated by now, on a model of eight layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(8, 8), nn.GELU())])
    model = meshbook.module_to_mesh(layers, mesh)
    chosen = optimizer(model.parameters())
    x = meshbook.randn(4, 8, mesh=mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        chosen.step()
        return loss

    return repeated(mesh, step, x)


@pytest.mark.slow
@only_on_3_11
def test_a_repeated_step_is_asked_for_by_few_calls_of_python(mesh: Mesh) -> None:
    x = meshbook.randn(4, 8, mesh=mesh)
    double = repeated(mesh, lambda value: value * 2, x)
    sgd, adamw = (partial(torch.optim.SGD, lr=0.01), partial(torch.optim.AdamW, fused=True))
    for step, most in ((double, ONE_MAX), (training(mesh, sgd), SGD_MAX), (training(mesh, adamw), ADAMW_MAX)):
        assert usual(step, mesh.stream.settle, batches=1) < most


def repeated(mesh: Mesh, step: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    compiled = meshbook.compile(step)
    for _ in range(6):
        compiled(*args)
    assert not compiled.why_not
    return lambda: compiled(*args)
