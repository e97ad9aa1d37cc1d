"""``--idle-stop`` and ``--max-hours``: meshes end by themselves, not while they are used, and say so before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from meshbook.mesh import states
from meshbook_extension.notebook import time_limits
from meshbook_extension.notebook.time_limits import Limit, TimeLimit, TimeLimits


class Told:
    """What a cell shows, as text."""

    replaces = False

    def __init__(self) -> None:
        self.texts: list[str] = []

    def stream(self, name: str, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def notebook(empty_notebook: Any) -> Iterator[Any]:
    yield empty_notebook
    empty_notebook.run("%mesh stop --all")


def test_an_idle_mesh_ends(notebook: Any) -> None:
    notebook.run("%mesh spawn gpus=1 --no-torch --idle-stop 1s --out procs")
    wait_until(lambda: not notebook["procs"].alive)
    assert 'mesh "main" was stopped' in notebook.fail("%%mesh\n1")
    assert "main  gpus=1  cpu  stopped" in notebook.run("%mesh list").stdout
    notebook.run("%mesh spawn gpus=1 --no-torch")


def test_calls_and_actors_at_work_keep_it(notebook: Any, tmp_path: Path) -> None:
    done = tmp_path / "done"
    notebook.run("%mesh spawn gpus=1 --no-torch --out procs")
    procs, told = notebook["procs"], Told()
    limit = TimeLimit(procs, Limit(idle_s=0.3), told)
    notebook.run("%%mesh --async\nimport time; time.sleep(60)")
    time.sleep(0.5)
    assert limit.pump(time.monotonic()) is not None
    notebook.run("%mesh interrupt")
    notebook.try_to_run("%mesh wait")
    notebook.run(
        "from meshbook.actor import Actor, endpoint\nimport os, time\n"
        "class Busy(Actor):\n    @endpoint\n    def work(self):\n"
        f"        while not os.path.exists({str(done)!r}):\n            time.sleep(0.02)\n"
        "busy = procs.spawn('busy', Busy)\nbusy.work.broadcast()"
    )
    wait_until(lambda: any(actor.doing for actor in procs.actors()))
    time.sleep(0.5)
    assert limit.pump(time.monotonic()) is not None
    assert procs.alive and not told.texts
    done.touch()
    wait_until(lambda: not any(actor.doing for actor in procs.actors()))
    wait_until(lambda: limit.pump(time.monotonic()) is None)


def test_it_is_told_once_before_it_ends_and_again_after_it_was_used(notebook: Any) -> None:
    notebook.run("%mesh spawn gpus=1 --no-torch --out procs")
    procs, told = notebook["procs"], Told()
    limit = TimeLimit(procs, Limit(idle_s=3600.0), told)
    now = states.called_at(procs)
    assert limit.pump(now + 3000) == pytest.approx(now + 3000 + time_limits.LOOK_S)
    limit.pump(now + 3310)
    limit.pump(now + 3320)
    assert told.texts == ['mesh "main" stops in 5 min: idle for 1 h (--idle-stop); any cell for it keeps it\n']
    procs.execute(abs, -1).get()
    limit.pump(states.called_at(procs) + 10)
    limit.pump(states.called_at(procs) + 3400)
    assert len(told.texts) == 2
    limit.pump(states.called_at(procs) + 3700)
    assert told.texts[-1] == 'mesh "main" stops now: idle for 1 h (--idle-stop)\n'
    wait_until(lambda: not procs.alive)
    assert limit.pump(now) is None


def test_a_mesh_that_is_too_old_ends_though_it_is_used(notebook: Any) -> None:
    notebook.run("%mesh spawn gpus=1 --no-torch --out procs")
    procs, told = notebook["procs"], Told()
    limit = TimeLimit(procs, Limit(total_s=7200.0, began=time.time() - 7000), told)
    limit.pump(time.monotonic())
    assert told.texts == ['mesh "main" stops in 3 min: 2 h are over (--max-hours)\n']
    limit = TimeLimit(procs, Limit(idle_s=3600.0, total_s=7200.0, began=time.time() - 7201), told)
    limit.pump(time.monotonic())
    assert told.texts[-1] == 'mesh "main" stops now: 2 h are over (--max-hours)\n'
    wait_until(lambda: not procs.alive)


def test_another_limit_takes_the_place_of_the_first(notebook: Any) -> None:
    notebook.run("%mesh spawn gpus=1 --no-torch --out procs")
    procs, told, limits = notebook["procs"], Told(), TimeLimits()
    publisher = notebook.shell._meshbook_session.publisher
    limits.add(procs, Limit(idle_s=1.0), told, publisher)
    limits.add(procs, Limit(idle_s=3600.0), told, publisher)
    assert limits.of(procs) == Limit(idle_s=3600.0)
    time.sleep(1.5)
    assert procs.alive and not told.texts


@pytest.mark.parametrize(
    "line, said",
    [
        ("spawn gpus=1 --idle-stop 5", '--idle-stop: "5" is no duration. 5 what? For example 5s, 30m, 2h or 1h30m.'),
        ("spawn gpus=1 --idle-stop 0s", "--idle-stop: 0s is no time at all"),
        ("spawn gpus=1 --max-hours 0", "--max-hours 0 is no time at all."),
        ("spawn gpus=1 --max-hours two", '--max-hours takes a number, not "two".'),
        ("detach --lease soon", '--lease: "soon" is no duration. Write it as 90s, 30m, 2h or 1h30m.'),
        ("detach --lease 0s", "--lease: 0s is no time at all; to end a mesh: %mesh stop"),
    ],
)
def test_times_that_make_no_sense(notebook: Any, line: str, said: str) -> None:
    assert f"UsageError: {said}" in notebook.fail(f"%mesh {line}")
