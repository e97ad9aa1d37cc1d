"""Operations that the ranks do without DTensor, once they know what they come to, give the same, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import meshbook
from meshbook.distributed import Mesh
from meshbook.tensors.ranks import known_meshes

REPEATS = 4
"""An operation is done without DTensor from its third time on."""


def known_ways() -> list[tuple[str, int]]:
    """On a rank: the operations that it does without DTensor, and how many calls each is."""
    known = [way for held in known_meshes.meshes.values() for way in held._operations._lowered._known.items()]
    return [(way[0].name, len(lowered.calls)) for way, lowered in known if lowered is not None]  # type: ignore[index]


def in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    view = a[1:]
    a.add_(b).mul_(-0.0)
    view += 2
    a.t().sub_(1)
    return a / 0.5


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "products": lambda a, b: (a @ b.T).softmax(-1) @ a,
    "a sum of parts": lambda a, b: (a.sum(0) + b.sum(0)) * 3,
    "views": lambda a, b: a.t().reshape(5, -1).flatten() + b.view(-1),
    "in place": in_place,
    "signs of zero": lambda a, b: torch.cat([1 / (a * a * 0.0), 1 / (b * b * -0.0)]),
    "one twice, then two": lambda a, b: sum(x * y for x, y in [(a, a)] * 3 + [(a, b)] * 3),
    "several results": lambda a, b: torch.cat([*a.chunk(2, 1), *functional.layer_norm(b, (7,)).split(3, 1)], 1),
}


@pytest.mark.some()
@pytest.mark.quick("products-['dp', None]")
@pytest.mark.parametrize("spec", (["dp", None], ["dp", "tp"]), ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_same_each_time(grid: Mesh, name: str, spec: list[object]) -> None:
    torch.manual_seed(3)
    for _ in range(REPEATS):  # other values each time: nothing of a time before may come back
        a, b = torch.randn(5, 7), torch.randn(5, 7)
        x, y = meshbook.distribute(a, grid, spec), meshbook.distribute(b, grid, spec)
        got, wanted = OPERATIONS[name](x, y).full_tensor(), OPERATIONS[name](a, b)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_same_values_come_back_bit_for_bit(grid: Mesh) -> None:
    x = meshbook.distribute(torch.randn(8, 6), grid, ["dp", None])
    weight = meshbook.distribute(torch.randn(6, 6), grid).requires_grad_()
    found = []
    for _ in range(REPEATS):
        weight.grad = None
        functional.gelu(functional.linear(x, weight)).square().sum().backward()  # type: ignore[no-untyped-call]
        found.append(weight.grad.full_tensor())  # type: ignore[union-attr]
    assert all(torch.equal(each, found[0]) for each in found)
    for ways in grid.procs.execute(known_ways).get(60).values():
        assert ("aten.gelu.default", 1) in ways
        assert any(name == "aten.mm.default" for name, _ in ways)


def test_random_numbers_are_drawn_anew(grid: Mesh) -> None:
    x = meshbook.ones(64, 8, mesh=grid, sharding_spec=["dp", None])
    drawn = [functional.dropout(x, 0.5).full_tensor() for _ in range(REPEATS)]
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(drawn))
