"""Processes that people have before they are there: what is asked of them meanwhile, and what becomes of it."""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import wait_until

import meshbook
from meshbook import Point, ProcMesh, actor, monarch
from meshbook.actor import Actor, ActorError, MeshFailure, ProcsNotStartedError, ProcsStoppedError, endpoint
from meshbook.errors import CallTimeout, SpawnError
from meshbook.monarch import BootstrapCommand, default_bootstrap_cmd

pytestmark = pytest.mark.slow

Spawn = Callable[..., ProcMesh]


class Counter(Actor):
    def __init__(self) -> None:
        self.value = 0

    @endpoint
    def add(self, by: int) -> int:
        self.value += by
        return self.value

    @endpoint
    def add_to(self, other: Counter, by: int) -> list[int]:
        return other.add.call(by).get().values()


class Gate:
    """A file for which processes wait as they begin."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        self.path.touch()

    def __call__(self) -> None:
        deadline = time.monotonic() + 120
        while not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[MeshFailure]:
    told: queue.Queue[MeshFailure] = queue.Queue()
    monkeypatch.setattr(actor, "unhandled_fault_hook", told.put)
    return told


@pytest.fixture
def spawn(clean_end: None) -> Iterator[Spawn]:
    def spawn(bootstrap: Callable[[], object] | None = None, **options: object) -> ProcMesh:
        procs = monarch.this_host().spawn_procs({"gpus": 2}, bootstrap, name="late", torch=False, **options)  # type: ignore[arg-type]
        assert isinstance(procs, ProcMesh)
        return procs

    yield spawn
    meshbook.shutdown()


def test_what_is_asked_meanwhile_is_done_in_order_when_they_are_there(spawn: Spawn, gate: Gate) -> None:
    with spawn(gate) as procs:
        assert repr(procs) == 'ProcMesh("late", gpus=2, cpu, starting)'
        counters = procs.spawn("counters", Counter)
        calls = [counters.add.call(by) for by in (1, 10, 100)]
        cell = procs.run("rank")
        with pytest.raises(CallTimeout):
            calls[0].get(0.05)
        assert not procs.initialized.done() and not cell.done()
        gate.open()
        assert [call.get(60).values() for call in calls] == [[1, 1], [11, 11], [111, 111]]
        assert cell.get(60).values() == [0, 1]
        assert procs.initialized.get(60) is True
        assert repr(procs) == 'ProcMesh("late", gpus=2, cpu)'


def test_what_cannot_queue_waits(spawn: Spawn, gate: Gate) -> None:
    with spawn(gate) as procs, spawn() as others:
        counters = procs.spawn("counters", Counter)
        gate.open()
        assert [each.state for each in procs.status()] == ["idle", "idle"]
        helper = others.slice(gpus=0).spawn("helper", Counter)
        assert helper.add_to.call_one(counters, 5).get(60) == [5, 5]  # the reference is sent when they are there


def test_a_call_is_dropped_before_they_are_there(spawn: Spawn, gate: Gate) -> None:
    with spawn(gate) as procs:
        counters = procs.spawn("counters", Counter)
        dropped, kept = counters.add.call(1), counters.add.call(10)
        dropped.cancel()
        with pytest.raises(ActorError, match="cancelled before it started"):
            dropped.get(10)
        gate.open()
        assert kept.get(60).values() == [10, 10]


def test_meshes_come_up_side_by_side(spawn: Spawn, tmp_path: Path) -> None:
    def meet(mine: str, other: str) -> Callable[[], None]:
        wait = Gate(tmp_path / other)

        def bootstrap() -> None:
            (tmp_path / mine).touch()
            wait()
            assert wait.path.exists()

        return bootstrap

    async def both() -> list[bool]:
        with spawn(meet("a", "b")) as first, spawn(meet("b", "a")) as second:
            return [await first.initialized, await second.initialized]

    assert asyncio.run(both()) == [True, True]


def numbered(point: Point) -> BootstrapCommand:
    return default_bootstrap_cmd().with_env({"NUMBER": str(point["gpus"])})


def raise_on_one() -> None:
    if os.environ["NUMBER"] == "1":
        raise ValueError("no set-up")


def end_on_one() -> None:
    if os.environ["NUMBER"] == "1":
        os._exit(3)


@pytest.mark.parametrize(
    ("bootstrap", "why"),
    [(raise_on_one, "their bootstrap failed: rank 1 raised ValueError: no set-up"), (end_on_one, "ended: exit code 3")],
)
def test_what_keeps_them_is_told_to_all(
    bootstrap: Callable[[], None], why: str, spawn: Spawn, failures: queue.Queue[MeshFailure]
) -> None:
    procs = spawn(bootstrap, bootstrap_command=numbered)
    counters = procs.spawn("counters", Counter)
    call = counters.add.call(1)
    for ask in (call.get, procs.status, lambda: procs.spawn("more", Counter)):
        with pytest.raises(ProcsNotStartedError, match='the processes "late" did not start: ') as raised:
            ask()
        assert why in str(raised.value)
    told = [procs.initialized.exception(10) for _ in range(2)]
    assert {type(error) for error in told} == {ActorError if bootstrap is raise_on_one else ProcsNotStartedError}
    assert str(told[0]) == str(told[1]) and why.removeprefix("their bootstrap failed: ") in str(told[0])
    with pytest.raises(ProcsNotStartedError):
        counters.add.call(1)
    failure = failures.get(timeout=60)
    assert (failure.mesh_name, failure.procs_name, failure.ranks) == ("late", "late", (1,))
    assert "did not start" in failure.report()
    assert repr(procs) == 'ProcMesh("late", gpus=2, cpu, not started)'
    procs.stop().get()
    assert failures.empty()


def test_each_process_is_told_of_where_none_is_at_fault(spawn: Spawn, failures: queue.Queue[MeshFailure]) -> None:
    procs = spawn(cwd="/nowhere/at/all")
    assert sorted(failures.get(timeout=60).ranks + failures.get(timeout=60).ranks) == [0, 1]
    with pytest.raises(SpawnError, match="/nowhere/at/all"):
        procs.initialized.get(60)


def test_what_nobody_has_asked_for_is_printed_once(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    procs, said = spawn(raise_on_one, bootstrap_command=numbered), ""

    def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "late: rank 1 did not start: no set-up" in said

    wait_until(is_told, 60)
    assert said.count("rank 1 did not start") == 1 and "its calls fail from now on" in said
    with pytest.raises(ProcsNotStartedError):
        procs.run("1")


def test_they_are_stopped_before_they_are_there(spawn: Spawn, gate: Gate, failures: queue.Queue[MeshFailure]) -> None:
    procs = spawn(gate)
    call = procs.spawn("counters", Counter).add.call(1)
    procs.stop().get()
    with pytest.raises(ProcsStoppedError):
        call.get(10)
    with pytest.raises(ProcsStoppedError):
        procs.initialized.get(10)
    with spawn() as again:
        assert again.initialized.get(60) is True
    assert failures.empty()


def test_hosts_are_shut_down_before_processes_are_there(spawn: Spawn, gate: Gate) -> None:
    procs = spawn(gate)
    meshbook.shutdown()
    with pytest.raises((ProcsStoppedError, ProcsNotStartedError)):
        procs.initialized.get(30)


def test_our_own_face_waits(clean_end: None, gate: Gate) -> None:
    gate.open()
    with meshbook.this_host().spawn_procs({"gpus": 2}, gate, torch=False) as procs:
        assert procs.initialized.done()
    with pytest.raises(SpawnError, match="their bootstrap failed: rank 1 raised ValueError: no set-up"):
        meshbook.this_host().spawn_procs({"gpus": 2}, raise_on_one, bootstrap_command=numbered, torch=False)
    meshbook.shutdown()
