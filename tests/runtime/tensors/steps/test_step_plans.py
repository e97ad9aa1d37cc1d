"""A step that ranks carry out as planned is the step done as always, bit for bit, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import meshbook
from meshbook import ProcMesh, this_host
from meshbook.distributed import Mesh, TensorError
from meshbook.tensors.ranks import known_meshes, step_plans

SETTLED = step_plans.TRACED_FROM + 3
"""After so many calls, two of which are noted, there is a plan."""


@pytest.fixture(scope="module")
def pair(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"dp": 2}, name="planning") as procs:
        yield procs


@pytest.fixture
def mesh(pair: ProcMesh) -> Mesh:
    return Mesh(pair)


def plans_on_a_rank(mesh: str) -> list[tuple[int, int] | None]:
    """Of each recorded step how many operations it has, and how many of them are done with names."""
    steps = known_meshes.meshes[mesh]._steps.values()
    plans = [step._plan for step in steps]
    return [plan and (len(plan.uses), sum(use.named is not None for use in plan.uses)) for plan in plans]


def plans(mesh: Mesh) -> list[tuple[int, int] | None]:
    """The same on all ranks."""
    found = list(mesh.procs.execute(plans_on_a_rank, mesh.stream.name).get(60).values())
    assert all(each == found[0] for each in found)
    return found[0]


class Talker(nn.Module):
    """An embedding, attention and a head, with what a plan meets: views, sums of parts, attention."""

    def __init__(self, *, noise: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 11)
        self.noise = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3)) if noise else None

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text)
        if self.noise is not None:
            x = self.noise(x.transpose(1, 2)).transpose(1, 2) @ (torch.ones(8, 8).tril() / 8)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        talked: torch.Tensor = self.head(x + mixed.transpose(1, 2).flatten(-2))
        return talked


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, noisy and clipped": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
}


def talking(mesh: Mesh, way: str) -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(5)
    model = meshbook.module_to_mesh(Talker(noise="noisy" in way), mesh)
    chosen = OPTIMIZERS[way](model.parameters())

    def step(text: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if "clipped" in way:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        chosen.step()
        return loss

    return model, step


def batch(mesh: Mesh, rows: int = 6) -> torch.Tensor:
    return meshbook.randint(0, 11, (rows, 5), mesh=mesh, sharding_spec=["dp"])


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {f"grad of {name}": p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    return grads | {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # type: ignore[operator]


@pytest.mark.some("momentum", "AdamW, noisy and clipped")
@pytest.mark.slow
@pytest.mark.parametrize("way", list(OPTIMIZERS)[1:])
def test_a_planned_step_is_the_step_bit_for_bit(mesh: Mesh, way: str) -> None:
    found = []
    for compile in (lambda step: step, meshbook.compile):
        model, step = talking(mesh, way)
        run = compile(step)
        torch.manual_seed(6)
        losses = [run(batch(mesh)).item() for _ in range(SETTLED + 3)]
        if compile is meshbook.compile:
            ((operations, named),) = [plan for plan in plans(mesh) if plan is not None]
            assert operations >= 80 and named < 12
        losses += [run(batch(mesh, rows)).item() for rows in (5, 6, 6)]
        found.append((losses, state(model)))
    (losses, values), (got, others) = found
    assert got == losses
    assert all(torch.equal(others[name], value) for name, value in values.items())


def test_a_step_whose_tensors_lie_in_another_way_is_done_as_always_and_planned_anew(mesh: Mesh) -> None:
    weight = meshbook.distribute(torch.arange(12.0).view(3, 4), mesh)

    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu() + 1

    x = torch.randn(4, 3)
    wanted = (x @ torch.arange(12.0).view(3, 4)).relu() + 1
    for spec in (["dp"], [None, "dp"], ["dp"], None, [None, "dp"]):  # type: ignore[list-item]
        for _ in range(SETTLED):
            torch.testing.assert_close(step(meshbook.distribute(x, mesh, spec)).full_tensor(), wanted)
        assert plans(mesh)[-1] is not None


def test_views_of_what_a_planned_step_writes_see_it(mesh: Mesh) -> None:
    counted = meshbook.zeros(4, 4, mesh=mesh, sharding_spec=["dp"])
    turned, flat = counted.t(), counted.flatten()
    x = meshbook.ones(4, 4, mesh=mesh, sharding_spec=["dp"])

    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        counted.add_(x)
        return counted.t()

    for times in range(1, SETTLED + 4):
        row = step(x)
        assert row.full_tensor().eq(times).all() and turned.full_tensor().eq(times).all()
        assert flat.full_tensor().eq(times).all()
    assert plans(mesh)[-1] is not None
    row.zero_()  # a view of what the step has written to
    assert counted.any().item() is False and flat.any().item() is False


@pytest.mark.slow
@pytest.mark.parametrize("times", [3, SETTLED])
def test_a_step_that_fails_says_where_and_the_next_ones_go_on(mesh: Mesh, times: int) -> None:
    table = meshbook.ones(4, 3, mesh=mesh)

    @meshbook.compile
    def step(at: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(at, table).sum(0) * 2

    def rows(*indices: int) -> torch.Tensor:
        return meshbook.distribute(torch.tensor(indices), mesh, ["dp"])

    for _ in range(times):
        assert step(rows(0, 1, 2, 3)).tolist() == [8.0] * 3
    assert (plans(mesh)[-1] is not None) is (times == SETTLED)
    for bad in ((9, 0, 0, 0), (0, 0, 0, 9)):
        with pytest.raises(TensorError, match=r"aten\.embedding.*test_step_plans.py, line \d+\) failed: IndexError"):
            step(rows(*bad)).tolist()
        assert step(rows(0, 1, 2, 3)).tolist() == [8.0] * 3


@pytest.mark.slow
def test_a_planned_step_that_was_cut_off_by_an_earlier_failure_goes_on(mesh: Mesh) -> None:
    """One rank fails before the step, while the other is in it and waits."""
    model, step = talking(mesh, "SGD")
    compiled, text = meshbook.compile(step), batch(mesh)
    for _ in range(SETTLED):
        compiled(text).item()
    assert plans(mesh)[-1] is not None
    for bad in ((9, 0), (0, 9)):
        before = state(model)
        wrong = nn.functional.embedding(
            meshbook.distribute(torch.tensor(bad), mesh, ["dp"]), meshbook.ones(4, 3, mesh=mesh)
        )
        loss = compiled(text)
        with pytest.raises(TensorError, match="IndexError"):
            wrong.sum().item()
        again, other = meshbook.module_to_mesh(Talker(), mesh), loss.item()
        again.load_state_dict({name: value for name, value in before.items() if "grad of" not in name})
        plain = nn.functional.cross_entropy(again(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        plain.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(torch.tensor(other), plain.full_tensor())
        now = state(model)
        for name, parameter in again.named_parameters():
            torch.testing.assert_close(now[name], before[name] - 0.1 * parameter.grad.full_tensor())


def test_the_hunt_looks_at_a_planned_step_too(mesh: Mesh) -> None:
    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.log() * 2

    good, bad = (meshbook.full((4,), value, mesh=mesh, sharding_spec=["dp"]) for value in (1.0, -1.0))
    for _ in range(SETTLED):
        step(good).sum().item()
    assert plans(mesh)[-1] is not None
    with pytest.raises(TensorError, match=r"aten\.log.*test_step_plans.py.*a NaN is on"), meshbook.detect_anomaly():
        step(bad).sum().item()
    assert step(bad).isnan().all().item()  # nobody looks now
