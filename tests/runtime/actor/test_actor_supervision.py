"""Who is told of failures of actors, and when."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from actor_classes import Broken, Counter, Reader
from patience import wait_until

import meshbook.actor
from meshbook import ProcMesh, this_host, this_proc
from meshbook.actor import Actor, ActorError, ActorNotMadeError, MeshFailure, SupervisionError, endpoint
from meshbook.errors import CallFailed


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """What the hook is told."""
    told: list[MeshFailure] = []
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", told.append)
    return told


class Awaiting(Actor):
    """Its endpoint ends when `__supervise__` has been told."""

    def __init__(self, procs: Any, cls: type[Actor]) -> None:
        self.children: Any = procs.spawn("children", cls)
        self.told: list[str] = []
        self.event = asyncio.Event()

    @endpoint
    async def until_told(self) -> list[str]:
        if "fail" in dir(self.children):
            self.children.fail.broadcast()
        await self.event.wait()
        return self.told

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        self.told.append(f"{failure.what} {failure.ranks}")
        self.event.set()
        return True


@pytest.mark.parametrize(("child", "what"), [(Counter, "children.fail (2,)"), (Broken, "children.__init__ (2,)")])
def test_an_endpoint_that_awaits_what_supervise_does_gets_it(mesh4: ProcMesh, child: type[Actor], what: str) -> None:
    owner = mesh4.slice(gpus=1).spawn("owner", Awaiting, mesh4.slice(gpus=2), child)
    assert owner.until_told.call_one().get(20) == [what]


class AsyncParent(Actor):
    """Has no async endpoint, and so no event loop of its own."""

    def __init__(self, child: type[Actor]) -> None:
        self._told: list[str] = []
        self._child: Any = this_proc().spawn("child", child)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0.01)
        self._told.append(failure.what)
        return True

    @endpoint
    def fail(self) -> None:
        self._child.fail.broadcast()

    @endpoint
    def told(self) -> list[str]:
        return self._told

    @endpoint
    def exhausted(self) -> int:
        return next(iter(()))


def test_an_async_supervise_is_awaited_where_all_endpoints_are_plain(mesh2: ProcMesh) -> None:
    parents = mesh2.spawn("parents", AsyncParent, Counter)
    parents.fail.call().get(20)
    wait_until(lambda: all(told == ["child.fail"] for told in parents.told.call().get(20).values()))


def test_a_plain_endpoint_may_raise_stop_iteration(mesh2: ProcMesh) -> None:
    with pytest.raises(ActorError) as raised:
        mesh2.spawn("parents", AsyncParent, Counter).exhausted.call().get(20)
    assert {failure.ename for failure in raised.value.failures} == {"StopIteration"}


def test_the_hook_is_told_of_constructors_that_raise_for_each_process(mesh4: ProcMesh, seen: list[MeshFailure]) -> None:
    broken = mesh4.spawn("broken", Broken)
    wait_until(lambda: len(seen) == 4)
    assert {failure.what for failure in seen} == {"broken.__init__"}
    assert sorted(failure.ranks for failure in seen) == [(0,), (1,), (2,), (3,)]
    assert seen[0].mesh == broken
    assert seen[0].report().startswith("broken.__init__: rank ")
    with pytest.raises(ActorError, match="no such file"):
        broken.get.call().get(20)


def test_constructors_that_raise_are_told_in_a_line_and_each_call_says_why(
    mesh4: ProcMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = mesh4.spawn("broken", Broken)
    text = ""

    def told() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return "the next use" in text

    wait_until(told)
    assert text.count("broken.__init__: ranks 0-3 raised RuntimeError: no such file") == 1
    for _ in range(2):
        with pytest.raises(ActorError, match=r"broken.get failed: .* raised RuntimeError: no such file") as raised:
            broken.get.call().get(20)
        assert isinstance(raised.value, ActorNotMadeError)
        assert isinstance(raised.value, SupervisionError)
        again = pickle.loads(pickle.dumps(raised.value))
        assert (str(again), again.ranks) == (str(raised.value), (0, 1, 2, 3))
    partly = mesh4.spawn("partly", Broken, 2)
    with pytest.raises(ActorError, match="rank 2 raised RuntimeError"):
        partly.initialized.get(20)
    assert partly.slice(gpus=0).get.call_one().get(20) == "there"


def test_endpoints_that_raise_leave_their_actors_there(mesh2: ProcMesh) -> None:
    with pytest.raises(ActorError) as raised:
        mesh2.spawn("counters", Counter).fail.call().get(20)
    assert not isinstance(raised.value, SupervisionError)


SCRIPT = """
from meshbook import this_host
from meshbook.actor import Actor, endpoint
class Reader(Actor):
    @endpoint
    def read(self):
        try:
            {}["shard"]
        except KeyError as error:
            raise ValueError("cannot read") from error
if __name__ == "__main__":
    this_host().spawn_procs({"gpus": 2}, group=False).spawn("reader", Reader).read.call().get()
"""


@pytest.mark.slow
def test_an_uncaught_error_of_a_script_shows_the_remote_traceback_and_its_cause(tmp_path: Any) -> None:
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    for once in ('raise ValueError("cannot read") from error', "program.py:10, in Reader.read"):
        assert done.stderr.count(once) == 1, done.stderr
    failed = "meshbook.actor.errors.ActorError: Actor call reader.read failed: ranks 0,1 raised ValueError: cannot read"
    assert done.stderr.splitlines()[-1] == failed, "what has led to it is told once, above"
    assert done.stderr.count("KeyError: 'shard'") == 1
    assert "\x1b" not in done.stderr


def test_the_cause_of_an_error_tells_what_has_led_to_it(mesh4: ProcMesh) -> None:
    readers = mesh4.spawn("readers", Reader)
    with pytest.raises(ActorError) as caught:
        readers.read.call().get(20)
    assert len(str(caught.value).splitlines()) == 1
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("KeyError: 'shard'") == 1 and "was the direct cause of" in printed


def test_the_remote_traceback_is_a_cause_that_notebooks_do_not_draw_again(mesh4: ProcMesh) -> None:
    counters = mesh4.spawn("counters", Counter)
    with pytest.raises(ActorError) as caught:
        counters.fail.call().get(20)
    assert str(caught.value.__cause__).count("in Counter.fail(") == 1
    assert str(CallFailed(caught.value.failures).__cause__) == str(caught.value.__cause__)
    drawn = re.sub("\x1b[^m]*m", "", "\n".join(caught.value._render_traceback_()))
    assert drawn.count("in Counter.fail(") == 1


class Handing(Actor):
    """Spawns and hands on."""

    @endpoint
    def spawn(self, procs: Any, cls: type[Actor]) -> Any:
        self.spawned = procs.spawn("spawned", cls)
        return self.spawned


def test_a_reference_from_elsewhere_knows_whether_actors_were_made(mesh4: ProcMesh, seen: list[MeshFailure]) -> None:
    handing = mesh4.slice(gpus=0).spawn("handing", Handing)
    handing.spawn.call_one(mesh4.slice(gpus=1), Counter).get(20).initialized.get(20)
    with pytest.raises(ActorError, match=r"spawned.__init__ failed: rank 1 raised RuntimeError: no such file"):
        handing.spawn.call_one(mesh4.slice(gpus=1), Broken).get(20).initialized.get(20)
    wait_until(lambda: [failure.what for failure in seen] == ["spawned.__init__"])


HOLD_THE_NEXT_SPAWN = """
import gc
from meshbook.actor.router import ACTORS, WATCH
from meshbook.worker.actors import ActorRegistry
(registry,) = [each for each in gc.get_objects() if type(each) is ActorRegistry]
mailboxes, held, overtaken_by = registry._mailboxes, [], []

def spawn_behind():
    if held and overtaken_by:
        mailboxes.open(ACTORS, registry._spawn, registry._cancel_spawn)
        mailboxes.open_rest(registry._keep_early)
        registry._spawn(*held.pop())

def keep(call, *message):
    registry._keep_early(call, *message)
    overtaken_by.extend([] if call.endpoint == WATCH else [call])
    spawn_behind()

def hold(*spawn):
    held.append(spawn)
    spawn_behind()

mailboxes.open(ACTORS, hold)
mailboxes.open_rest(keep)
"""


@pytest.mark.parametrize(
    "ask",
    [
        lambda spawned: spawned.initialized,
        lambda spawned: spawned.stop(),
        lambda spawned: spawned.add.call_one(1),
    ],
    ids=["made", "stop", "call"],
)
def test_a_message_may_overtake_the_spawn_of_its_actor(mesh4: ProcMesh, ask: Callable[[Any], Any]) -> None:
    handing = mesh4.slice(gpus=0).spawn("handing", Handing)
    mesh4.slice(gpus=1).run(HOLD_THE_NEXT_SPAWN).get(20)
    assert ask(handing.spawn.call_one(mesh4.slice(gpus=1), Counter).get(20)).get(20) in (None, 1)


class Maker(Actor):
    """Has an actor made in a process beside it, which fails or is killed."""

    def __init__(self) -> None:
        self.made = this_host().spawn_procs(per_host={"more": 1}, torch=False).spawn("made", Counter)

    @endpoint
    def fail(self) -> None:
        self.made.fail.broadcast()

    @endpoint
    def kill(self) -> None:
        os.kill(self.made.pid.call_one().get(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "why"), [("fail", "made.fail, which nobody waited for: rank 0 raised ValueError"), ("kill", "SIGKILL")]
)
def test_a_failure_of_actors_that_an_actor_has_made_is_reported(
    mesh2: ProcMesh, monkeypatch: pytest.MonkeyPatch, end: str, why: str
) -> None:
    seen: list[MeshFailure] = []
    monkeypatch.setattr(meshbook.actor, "unhandled_fault_hook", seen.append)
    maker = mesh2.slice(gpus=1).spawn("maker", Maker)
    getattr(maker, end).call_one().get(60)
    wait_until(lambda: bool(seen))
    assert why in seen[0].report()
    assert pickle.loads(pickle.dumps(seen[0])).report() == seen[0].report()
