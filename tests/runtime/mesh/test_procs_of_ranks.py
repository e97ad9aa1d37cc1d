"""`spawn_procs` on a rank: it returns at once, what is done with the processes waits, and says what keeps them."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, ActorError, endpoint


class Echo(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def wait_for(path: str) -> None:
    """The bootstrap of processes that come when the test lets them."""
    while not Path(path).exists():
        time.sleep(0.02)


class Spawner(Actor):
    def __init__(self, path: str = "") -> None:
        self.path, self.procs = path, list[Any]()

    def _held(self, **sizes: int) -> Any:
        path = self.path
        return this_host().spawn_procs(sizes, lambda: wait_for(path), torch=False, group=False)

    @endpoint
    def spawn_two(self) -> list[Any]:
        self.procs = [self._held(a=2), self._held(b=1)]
        return [
            self.procs[0].sizes,
            self.procs[0].slice(a=1).sizes,
            self.procs[1].initialized.done(),
            repr(self.procs[0]),
        ]

    @endpoint
    def use(self) -> list[Any]:
        echoes = [procs.spawn("echoes", Echo) for procs in (self.procs[0].slice(a=1), *self.procs)]
        return [each.echo.call(1).get(60).values() for each in echoes]

    @endpoint
    def send(self) -> list[Any]:
        return self.procs

    @endpoint
    def spawn(self, options: dict[str, Any]) -> str:
        procs = this_host().spawn_procs(**options)
        procs.initialized.get(60)
        return repr(procs)

    @endpoint
    def spawn_and_leave(self) -> None:
        self.procs = [self._held(a=1)]


class AsyncSpawner(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    async def spawn(self) -> list[int]:
        path = self.path
        procs: Any = this_host().spawn_procs({"a": 2}, lambda: wait_for(path), torch=False, group=False)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                if ticks == 3:
                    Path(path).touch()  # only now may they come
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        await procs.initialized
        ticking.cancel()
        return [min(ticks, 3), *(await procs.spawn("echoes", Echo).echo.call(5)).values()]


@pytest.mark.slow
def test_several_meshes_come_up_side_by_side_and_their_first_use_waits(mesh4: ProcMesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spawner = mesh4.slice(gpus=1).spawn("spawner", Spawner, str(gate))
    told = spawner.spawn_two.call_one().get(60)
    assert told == [{"a": 2}, {}, False, "ProcMesh(a=2), which comes up"]
    using = spawner.use.call_one()
    with pytest.raises(TimeoutError):
        using.get(0.3)
    gate.touch()
    assert using.get(60) == [[1], [1, 1], [1]]
    twos, _ = spawner.send.call_one().get(60)
    assert isinstance(twos, ProcMesh) and twos.run("rank").get(60).values() == [0, 1]
    spawner.stop().get(60)
    wait_until(lambda: not twos.alive)


@pytest.mark.slow
def test_an_async_endpoint_awaits_them_beside_other_work(mesh4: ProcMesh, tmp_path: Path) -> None:
    spawner = mesh4.slice(gpus=2).spawn("async", AsyncSpawner, str(tmp_path / "gate"))
    assert spawner.spawn.call_one().get(60) == [3, 5, 5]
    spawner.stop().get(60)


def refuse() -> None:
    raise OSError("no disk")


def test_what_keeps_them_from_coming_is_raised_where_they_are_used(mesh4: ProcMesh) -> None:
    spawner = mesh4.slice(gpus=0).spawn("spawner", Spawner)
    with pytest.raises(ActorError, match=r"SpawnError: .*bootstrap failed: rank 0 raised OSError: no disk"):
        spawner.spawn.call_one({"per_host": {"a": 1}, "bootstrap": refuse, "group": False}).get(120)
    spawner.stop().get(60)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per_host": 3}, "per_host maps axes to sizes"),
        ({"per_host": {"a": 0}}, "a size is at least 1"),
        ({"bootstrap": 7}, "bootstrap must be a function"),
        ({"proc_bind": [{}, {}]}, "proc_bind"),
        ({"name": "a/b"}, "a mesh is named by a text"),
        ({"device": "tpu"}, 'device must be "cpu" or "cuda"'),
    ],
)
def test_arguments_that_cannot_be(mesh4: ProcMesh, options: dict[str, Any], words: str) -> None:
    spawner = mesh4.slice(gpus=0).spawn("spawner", Spawner)
    with pytest.raises(ActorError, match=re.escape(words)):
        spawner.spawn.call_one(options).get(120)
    spawner.stop().get(60)


@pytest.mark.slow
def test_processes_that_come_when_their_owner_has_ended_end_too(mesh4: ProcMesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spawner = mesh4.slice(gpus=3).spawn("spawner", Spawner, str(gate))
    spawner.spawn_and_leave.call_one().get(60)
    ends = threading.Thread(target=lambda: spawner.stop().get(60))
    ends.start()
    gate.touch()
    ends.join()
    from meshbook.mesh.driven import own_meshes

    wait_until(lambda: [mesh.name for mesh in own_meshes()] == ["four"])
