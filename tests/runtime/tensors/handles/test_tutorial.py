"""Programs of tensors as a tutorial has them: one import, a mesh by its shape, a training step, a rank that ends."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import pytest

import meshbook as monarch
from meshbook import DeviceMeshError

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
