"""heal, respawn, grow, shrink, and cells marked --setup, as a person uses them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from patience import wait_until

SUM = "t = torch.ones(1); dist.all_reduce(t); int(t)"


@pytest.fixture
def mesh(empty_notebook: Any) -> Iterator[Any]:
    """Four ranks of the test's own."""
    empty_notebook.run("%mesh spawn gpus=4 --device cpu --out procs")
    yield empty_notebook
    empty_notebook.run("%mesh stop --all")


def kill(notebook: Any, *ranks: int) -> None:
    procs = notebook["procs"].base()
    pids = {status.rank: status.pid for status in procs.status()}
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: set(ranks) <= set(procs.lost))


def test_heal_runs_the_setup_cells_again_on_the_new_ranks(mesh: Any) -> None:
    mesh.run("%%mesh --setup\nbase = 100")
    mesh.run("%%mesh --setup gpus=2:4\nx = base + rank; print('made', x)")
    mesh.run("%%mesh\ny = 1")
    kill(mesh, 0, 3)
    text = mesh.fail("%%mesh\nx")
    assert "repair: %mesh heal    go on without: %mesh shrink" in text
    ran = mesh.run("%mesh heal")
    assert 'mesh "main": ranks 0,3 started again, all 4 ranks joined in ' in ran.stdout
    assert "[3] made 103" in ran.stdout and "[2] made" not in ran.stdout
    assert "  ranks 0,3 lost their variables; setup cells " in ran.stdout
    assert ran.stdout.rstrip().endswith("ran there again")
    assert mesh["procs"].last_repair.ranks == (0, 3) and str(mesh["procs"].last_repair) in ran.stdout
    assert mesh.run(f"%%mesh\n{SUM}").plain.strip() == "[0-3] 4"
    assert mesh.run("%mesh eval ('x' in globals(), 'base' in globals(), 'y' in globals())").stdout.splitlines() == [
        "[0] (False, True, False)",
        "[1] (False, True, True)",
        "[2] (True, True, True)",
        "[3] (True, True, False)",
    ]
    assert mesh.run("%mesh heal").stdout == 'mesh "main" is whole: nothing to heal\n'


def test_without_setup_cells_it_says_what_was_lost(mesh: Any) -> None:
    kill(mesh, 2)
    text = mesh.run("%mesh heal").stdout
    assert "  rank 2 lost its variables; mark cells that make them %%mesh --setup, and heal runs them again\n" in text


def test_a_setup_cell_that_fails_is_owed(mesh: Any) -> None:
    mesh.run("%%mesh --setup\nimport os, pathlib; assert not pathlib.Path(os.environ['HOME'] + '/no such').exists()")
    mesh.run("%%mesh --setup\nfirst = globals().get('first', 'here') if rank != 1 or 'spoilt' in globals() else 1")
    mesh.run(f"%%mesh --setup\n{SUM}")
    kill(mesh, 1)
    ran = mesh.try_to_run("%mesh heal")
    assert "did not end well on rank 1; mend it, then: %mesh heal" in ran.stdout
    assert "rank 1" in ran.stdout and ran.error is not None
    ran = mesh.try_to_run("%mesh heal")  # it is tried again, and fails again
    assert "is whole: nothing to heal" in ran.stdout and "did not end well on rank 1" in ran.stdout


def test_respawn_takes_a_target_and_replays_when_told_to(mesh: Any) -> None:
    mesh.run("%%mesh --setup\nx = rank")
    text = mesh.run("%mesh respawn gpus=1").stdout
    assert 'mesh "main": rank 1 started again, all 4 ranks joined in ' in text
    assert mesh["procs"].slice(gpus=0).last_repair.ranks == (1,)
    again = "%mesh respawn gpus=1 --replay"
    assert f"  rank 1 has no variables; the setup cells give it theirs: {again}\n" in text
    assert "ran there again" in mesh.run(again).stdout
    assert mesh.run("%mesh eval x").stdout.splitlines() == ["[0] 0", "[1] 1", "[2] 2", "[3] 3"]
    assert "say which ranks" in mesh.fail("%mesh respawn")


@pytest.mark.slow
def test_names_follow_a_mesh_that_grows_and_shrinks(mesh: Any) -> None:
    mesh.run("%mesh slice left gpus=0:2")
    mesh.run("%mesh slice last gpus=3")
    mesh.run("%mesh slice pair rank=0,2")
    mesh.run("%%mesh --setup rank=2\nx = 'two'")
    kill(mesh, 1)
    text = mesh.run("%mesh shrink").stdout
    assert 'mesh "main": gpus=3; rank 1 ended, ranks 2,3 are ranks 1,2 now, all 3 joined in ' in text
    assert '  slice "last" is gone: gpus=3 selects nothing; gpus runs from 0 to 2.\n' in text
    assert mesh.run("%%mesh left\nrank").plain.splitlines() == ["[0] 0", "[1] 1"]
    assert mesh.run("%%mesh pair\nrank").plain.splitlines() == ["[0] 0", "[1] 1"]
    assert "since this view of it was made" in mesh.fail("procs.run('1')")
    text = mesh.run("%mesh grow gpus=2").stdout
    assert 'mesh "main": gpus=5; ranks 3,4 are new, all 5 joined in ' in text
    assert "  ranks 3,4 have no variables; run the cells that make them there, as in %%mesh rank=3\n" in text
    assert mesh.run(f"%%mesh\n{SUM}").plain.strip() == "[0-4] 5"
    mesh.run("%mesh use main --out procs")
    kill(mesh, 1)
    mesh.run("%mesh heal")
    assert mesh.run("%%mesh rank=1\nx").plain.strip() == "[1] 'two'"
    assert "gpus=5" in mesh.run("%mesh").stdout


def test_a_running_job_keeps_the_ranks_as_they_are(mesh: Any) -> None:
    mesh.run("%%mesh --async gpus=0\nimport time; time.sleep(30)")
    text = mesh.fail("%mesh shrink gpus=1")
    assert 'rank 0 of mesh "main" is busy; ranks get other numbers when it shrinks.' in text
    assert "wait: %mesh wait    or interrupt: %mesh interrupt" in text
    mesh.run("%mesh cancel 1")


def test_typing_errors_are_answered(mesh: Any) -> None:
    assert "say along which axis" in mesh.fail("%mesh grow")
    assert "say along which axis" in mesh.fail("%mesh shrink")
    assert "gpus=all: say by how many" in mesh.fail("%mesh grow gpus=all")
    assert 'unknown axis "gpu"' in mesh.fail("%mesh grow gpu=1")
    assert "--setup does not go with --async" in mesh.fail("%%mesh --setup --async\n1")


def test_a_mesh_that_a_program_has_grown_is_followed(mesh: Any) -> None:
    mesh.run("procs.grow(gpus=1)")
    assert mesh.run("%mesh eval world_size").stdout.strip() == "[0-4] 5"
    assert "gpus=5" in mesh.run("%mesh").stdout
