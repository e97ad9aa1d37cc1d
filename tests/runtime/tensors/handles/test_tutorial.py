"""Programs of tensors as a tutorial has them: one import, a mesh by its shape, a training step, a rank that ends."""

from __future__ import annotations

import copy
import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import meshbook as monarch
from meshbook import DeviceMeshError
from meshbook.distributed import Mesh


@pytest.fixture(scope="module")
def shelves(clean_end: None) -> Iterator[Mesh]:
    with Mesh(shape=(2, 2), mesh_dim_names=("rows", "columns")) as mesh:
        yield mesh


def test_a_table_is_spread_over_a_mesh_and_multiplied_by_itself(shelves: Mesh) -> None:
    assert shelves.size() == 4
    table = torch.arange(30.0).view(6, 5)
    spread = monarch.distribute(table, shelves, sharding_spec=["rows", None])
    assert spread.shape == table.shape
    products = spread @ spread.T
    assert products.shape == (6, 6)
    torch.testing.assert_close(products.full_tensor(), table @ table.T)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.bend, self.narrow = nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.narrow(self.bend(self.widen(x)))
        return made


def fit(model: nn.Module, given: torch.Tensor, wanted: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(given), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_spread", [True, False])
def test_steps_of_a_module_on_a_mesh_are_those_of_one_process(shelves: Mesh, is_spread: bool) -> None:
    torch.manual_seed(4)
    plain, given, wanted = Encoder(), torch.randn(8, 12), torch.randn(8, 12)
    model = monarch.module_to_mesh(copy.deepcopy(plain), shelves)
    batch = [given, wanted]
    if is_spread:
        batch = [monarch.distribute(each, shelves, sharding_spec=["rows", None]) for each in batch]
    assert fit(model, *batch) == pytest.approx(fit(plain, given, wanted), abs=1e-6)


RESILIENT = """
import os, signal
import torch
import meshbook as monarch
from meshbook.distributed import Mesh
from meshbook import DeviceMeshError

def totals(mesh, chunks):
    done = []
    for number, chunk in enumerate(chunks):
        try:
            found = add_up(mesh, chunk)
        except DeviceMeshError as error:
            print(f"chunk {number}: {error}".splitlines()[0])
            mended = monarch.heal_mesh(mesh)
            mesh = mended
            found = add_up(mesh, chunk)
        done.append([total.item() for total in found.values()])
    return done

def add_up(mesh, chunk):
    return mesh.execute(lambda x: x.sum(), chunk)

def chunks_and_a_death(pid):
    for number in range(4):
        if number == 2:
            os.kill(pid, signal.SIGKILL)
        yield torch.full((3,), float(number))

if __name__ == "__main__":
    mesh = Mesh(shape=(2, 2), mesh_dim_names=("rows", "columns"))
    print(f"{mesh.size()} processes")
    print(totals(mesh, chunks_and_a_death(mesh.procs.status()[3].pid)))
    print(mesh.last_repair.ranks, mesh.slice(rows=0).last_repair is mesh.last_repair)
    mesh.stop()
"""


def test_a_program_goes_on_with_the_mesh_that_was_healed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(RESILIENT)
    runpy.run_path(str(program), run_name="__main__")
    done = capsys.readouterr()
    count, told, totals, rest = done.out.splitlines()
    assert count == "4 processes"
    assert told.startswith("chunk 2: rank 3 on ") and "killed by SIGKILL" in told
    assert totals == str([[3.0 * number] * 4 for number in range(4)])
    assert rest == "(3,) True"
    (line,) = done.err.splitlines()
    assert line.startswith('mesh "procs": rank 3 started again, all 4 ranks joined in ')


@pytest.mark.slow
def test_a_slice_of_a_mesh_is_returned_when_the_whole_was_healed() -> None:
    with monarch.Mesh(shape=(2, 2), mesh_dim_names=("rows", "columns")) as mesh:
        part = mesh.slice(rows=0)
        everywhere = monarch.ones(4, mesh=mesh)
        assert everywhere.sum().item() == 4 and part.last_repair is None
        os.kill(mesh.procs.status()[2].pid, signal.SIGKILL)  # not in the slice
        with pytest.raises(DeviceMeshError):
            mesh.execute(os.getpid)
        assert monarch.heal_mesh(part) is part
        repaired = mesh.last_repair
        assert repaired is not None and repaired.ranks == (2,)
        assert part.last_repair is mesh.procs.last_repair is repaired
        assert (everywhere + 1).tolist() == [2.0] * 4
    with pytest.raises(monarch.DeviceMeshError, match="was stopped"):
        monarch.heal_mesh(mesh)
