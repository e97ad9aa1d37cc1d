"""`once_per_host`: one rank of each host runs a block first, then the others do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from patience import kill

import meshbook
from meshbook import ProcMesh
from meshbook.errors import CallFailed, UsageError, WorkerLost

CELL = """
import time, os, pathlib, meshbook
folder = pathlib.Path({folder!r})
with meshbook.once_per_host() as first:
    made = folder / f"made-{{host}}"
    had = made.exists()
    if not had: time.sleep(0.5)
    with made.open("a") as file: file.write(f"{{rank}}\\n")
first, had
"""


def test_one_rank_of_each_host_is_first_and_the_others_find_what_it_made(mesh2x2: ProcMesh, tmp_path: Path) -> None:
    mesh2x2.run("host = rank // 2").get(30)
    for turn in range(2):
        folder = tmp_path / str(turn)
        folder.mkdir()
        found = mesh2x2.run(CELL.format(folder=str(folder))).get(60).values()
        for host in (0, 1):
            assert sorted(found[2 * host : 2 * host + 2]) == [(False, True), (True, False)], found
            ranks = (folder / f"made-{host}").read_text().split()
            assert sorted(ranks) == [str(2 * host), str(2 * host + 1)]
            assert found[int(ranks[0])] == (True, False)


def test_blocks_of_a_call_and_of_calls_to_a_part_do_not_meet(mesh4: ProcMesh) -> None:
    code = (
        "import meshbook\nfirst = []\nfor _ in range(3):\n    with meshbook.once_per_host() as one: first.append(one)\n"
    )
    assert mesh4.slice(gpus=0).run(f"{code}first").get(30).values() == [[True] * 3]
    found = mesh4.run(f"{code}first").get(30).values()
    assert [sum(column) for column in zip(*found, strict=True)] == [1, 1, 1]


def test_an_error_of_the_first_one_is_told_to_the_others(mesh4: ProcMesh) -> None:
    code = "import meshbook\nwith meshbook.once_per_host() as first:\n    assert first\n    raise OSError('no network')"
    with pytest.raises(CallFailed) as caught:
        mesh4.run(code).get(30)
    names = sorted(failure.ename for failure in caught.value.failures)
    assert names == ["MeshError"] * 3 + ["OSError"]
    told = next(failure for failure in caught.value.failures if failure.ename == "MeshError")
    assert told.evalue == "once_per_host: the first rank of this host raised OSError: no network"


def test_the_wait_is_bounded_and_can_be_interrupted(mesh4: ProcMesh) -> None:
    slow = "import meshbook, time\nwith meshbook.once_per_host({limit}) as first:\n    if first: time.sleep({body_s})"
    with pytest.raises(CallFailed, match=r"the first rank of this host is still at its block after 0\.2 s"):
        mesh4.run(slow.format(limit=0.2, body_s=2)).get(30)
    running = mesh4.run(slow.format(limit="", body_s=600))
    deadline = time.monotonic() + 30
    while "once_per_host" not in str(mesh4.stacks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted(mesh4.interrupt().obeyed) == [0, 1, 2, 3]
    assert running.exception(30) is not None
    with pytest.raises(CallFailed, match="above 0"):
        mesh4.run(slow.format(limit=0, body_s=0)).get(30)


def test_the_next_rank_is_first_where_the_first_one_dies(mesh4: ProcMesh, tmp_path: Path) -> None:
    code = f"""
import meshbook, time, pathlib, os
begun = pathlib.Path({str(tmp_path / "begun")!r})
with meshbook.once_per_host() as first:
    if first and not begun.exists():
        begun.write_text(str(rank))
        time.sleep(600)
first
"""
    running = mesh4.run(code)
    begun = tmp_path / "begun"
    while not (begun.exists() and begun.read_text()):
        time.sleep(0.05)
    victim = int(begun.read_text())
    kill(mesh4, victim)
    with pytest.raises(WorkerLost) as caught:
        running.get(30)
    assert caught.value.ranks == (victim,)
    assert sorted(caught.value.partial.values()) == [False, False, True]
    mesh4.heal()


def test_a_block_outside_of_ranks_just_runs() -> None:
    with meshbook.once_per_host() as first:
        assert first
    with pytest.raises(UsageError), meshbook.once_per_host(timeout_s=-1):
        pass


def test_pip_in_a_cell_of_ranks_points_at_the_command(mesh2: ProcMesh) -> None:
    with pytest.raises(
        CallFailed, match=r"%pip runs once in each environment, not on every rank: .*pip install einops"
    ):
        mesh2.run("%pip install einops").get(30)
