"""torch's ParallelStyles in a plan: the losses and weights of one process, and tensors that lie as the styles say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers_on_meshes import train

import meshbook
from meshbook.distributed import Mesh, show_plan
from meshbook.errors import UsageError

TENSOR_PARALLEL: dict[str, Any] = {"*.qkv": ColwiseParallel(), "*.o": RowwiseParallel(), "3": ColwiseParallel()}
SEQUENCE_PARALLEL: dict[str, Any] = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "*.norm": SequenceParallel(),
    "1.qkv": ColwiseParallel(input_layouts=Shard(1)),
    "1.o": RowwiseParallel(output_layouts=Shard(1)),
    "1.gates": PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}),
    "1.gates.up": "column",
    "1.gates.quiet": PrepareModuleInputOutput(
        input_layouts=Shard(2), desired_input_layouts=Shard(1), output_layouts=Shard(1), desired_output_layouts=Shard(1)
    ),
    "1": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    "2": SequenceParallel(),
    "3": ColwiseParallel(output_layouts=Replicate()),
}
BY_COLUMN: dict[str, Any] = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel()}
PLANS = {"tensor": TENSOR_PARALLEL, "sequence": SEQUENCE_PARALLEL, "embedding by column": BY_COLUMN}


@pytest.mark.some("embedding by column-1")
@pytest.mark.slow
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_a_transformer_with_styles_trains_as_in_one_process(grid: Mesh, plan: str, axes: int) -> None:
    losses, weights = train(grid if axes == 2 else grid.slice(dp=0), PLANS[plan])
    wanted, plain = train(None)
    assert losses == pytest.approx(wanted, abs=1e-5)
    for name, value in plain.items():
        assert torch.allclose(weights[name], value, atol=1e-5), name


def test_tensors_lie_as_styles_say_along_their_axis_alone(grid: Mesh) -> None:
    model = nn.ModuleDict({"words": nn.Embedding(11, 16), "norm": nn.LayerNorm(16), "up": nn.Linear(16, 32)})
    plan = {"words": RowwiseParallel(output_layouts=Shard(1)), "norm": SequenceParallel(), "up": ColwiseParallel()}
    meshbook.module_to_mesh(model, grid, plan)
    words = meshbook.distribute(torch.randint(0, 11, (4, 6)), grid, ["dp"])
    known, normal = model["words"](words), model["norm"](model["words"](words))
    assert known.placements == normal.placements == (Shard(0), Shard(1))
    assert model["up"](normal).placements == (Shard(0), Shard(2))
    assert model["words"].weight.placements == model["up"].bias.placements == (Replicate(), Shard(0))
    assert str(show_plan(model)).splitlines()[-3:] == [
        "words (RowwiseParallel): inputs Replicate(); outputs Shard(dim=1)",
        "norm (SequenceParallel): inputs Shard(dim=1); outputs Shard(dim=1)",
        "up (ColwiseParallel): inputs Replicate(); outputs Shard(dim=-1)",
    ]


def test_a_module_that_writes_to_its_input_does_so_whatever_the_layout(grid: Mesh) -> None:
    layouts = {"input_layouts": Shard(0), "desired_input_layouts": Shard(1)}
    quiet = meshbook.module_to_mesh(nn.Sequential(nn.ReLU(inplace=True)), grid, {"0": PrepareModuleInput(**layouts)})
    plain = torch.randn(4, 6, requires_grad=True)
    given = meshbook.distribute(plain, grid, ["dp"])
    found = []
    for tensor, module in ((plain, nn.ReLU(inplace=True)), (given, quiet)):
        x = tensor * 2
        made = module(x)
        (made * x).sum().backward()
        found += [x, tensor.grad]
    for got, wanted in zip(found[2:], found[:2], strict=True):
        assert torch.allclose(got.full_tensor(), wanted)


@pytest.mark.slow
def test_a_step_with_styles_can_be_recorded(grid: Mesh) -> None:
    assert train(grid, SEQUENCE_PARALLEL, meshbook.compile)[0] == pytest.approx(train(None)[0], abs=1e-5)


class Own(ColwiseParallel):
    """A style of somebody's own."""


@pytest.mark.parametrize(
    ("style", "told"),
    [
        (Own(), "Own, the plan of 0, is no style that is known here: ColwiseParallel"),
        (SequenceParallel(use_local_output=True), "SequenceParallel of 0 with use_local_output is to give it each"),
        (ColwiseParallel(output_layouts=Partial()), "ColwiseParallel of 0 wants Partial"),
    ],
    ids=["unknown", "own tensors", "sums"],
)
def test_styles_without_a_meaning_are_refused(grid: Mesh, style: ParallelStyle, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        meshbook.module_to_mesh(nn.Sequential(nn.Linear(4, 4)), grid, {"0": style})


def test_styles_that_do_not_fit_are_told(grid: Mesh) -> None:
    with pytest.raises(UsageError, match=r"ColwiseParallel cuts nn.Linear and nn.Embedding, and 0 is LayerNorm"):
        meshbook.module_to_mesh(nn.Sequential(nn.LayerNorm(4)), grid, {"*": ColwiseParallel()})
    with pytest.raises(UsageError, match="ColwiseParallel is for modules: its pattern fits weight of 0, not 0"):
        meshbook.module_to_mesh(nn.Sequential(nn.Linear(4, 4)), grid, {"*.weight": ColwiseParallel()})
    twice = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
    model = meshbook.module_to_mesh(nn.Sequential(nn.Linear(4, 4)), grid, {"0": twice})
    with pytest.raises(UsageError, match="PrepareModuleInput of 0 is about 2 inputs, and there are 1"):
        model(meshbook.distribute(torch.randn(2, 4), grid))
    model = meshbook.module_to_mesh(nn.Sequential(nn.LayerNorm(4)), grid, {"0": SequenceParallel()})
    with pytest.raises(UsageError, match=r"SequenceParallel of 0 wants Shard\(dim=1\) of a tensor of shape \(4,\)"):
        model(meshbook.distribute(torch.randn(4), grid))
