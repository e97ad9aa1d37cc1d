"""Several threads use the tensors of one mesh: a loop that trains, and one that logs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from patience import beside

import meshbook
from meshbook import ProcMesh
from meshbook.distributed import Mesh, TensorError


@pytest.mark.slow
def test_threads_get_their_own_values_beside_one_whose_operations_fail(square: ProcMesh) -> None:
    mesh = Mesh(square)
    x, table = meshbook.ones(4, mesh=mesh), meshbook.ones(4, 2, mesh=mesh)
    bad = meshbook.distribute(torch.tensor([7]), mesh)
    told: Counter[str] = Counter()
    done = threading.Event()

    def read(factor: int) -> Callable[[], None]:
        def loop() -> None:
            for i in range(60):
                assert (x * factor + i).sum().item() == 4 * (factor + i)

        return loop

    def fail() -> None:
        for _ in range(5):
            try:
                torch.nn.functional.embedding(bad, table).sum().item()
            except TensorError as error:
                told["index out of range" in str(error)] += 1
        done.set()

    def read_until_done() -> None:
        while not done.is_set():
            assert (x + 1).sum().item() == 8.0

    with beside(read(2), read(3), read_until_done):
        fail()
    assert told == {True: 5}
    assert (x + 1).sum().item() == 8.0


def test_each_call_of_a_recorded_step_is_done_once(square: ProcMesh) -> None:
    mesh = Mesh(square)
    total, one = meshbook.zeros(2, mesh=mesh), meshbook.ones(2, mesh=mesh)

    @meshbook.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return (total * 1).sum()

    for _ in range(4):
        step(one).item()
    with beside(*2 * [lambda: [step(one).item() for _ in range(40)]]):
        pass
    assert total.tolist() == [84.0, 84.0]
