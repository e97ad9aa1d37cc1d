"""What a call costs: in calls of Python functions, a figure without noise, which only goes down; in wake-ups."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from python_calls import CALLS, Counter, only_on_3_11, usual, usual_step

from meshbook import LocalLauncher, ProcMesh, start_hosts, this_host
from meshbook.actor import Actor, endpoint

CONTROLLER_MAX, BY_AGENT_MAX = 88, 92
"""On the main thread, which serves the sockets while it waits, past the agent and by it; measured: 73 and 77, and 2 for
each other mesh that lives: up to 84 behind the tests of other files."""

AGENT_MAX = 49
"""In the agent, which has one thread but for its logs, of a call that goes by it; measured: 45.1."""
PAST_AGENT_MAX = 3
"""The same of a call that goes past it; measured: 0.1. When a call takes longer than usual the agent is told of it."""

RANK_MAX = 39
"""On the rank's main thread; measured: 32, and 37 by the agent."""

ACTOR_CONTROLLER_MAX, ACTOR_RANK_MAX = 125, 78
"""The same of a call to an actor, on its own thread; measured: 110, or 115 behind other tests of
this file, and 75."""

WAKE_UPS_MAX, TIMERS_PER_S = 3.0, 1000
"""Of all threads of controller, agent and rank: per call, and besides in each second. Controller and rank wait for each
other, less what is there already when it is asked for; measured: 1.6-2.6 in all. A busy machine has more of what comes
with time: gloo's thread looks 100 times a second, the resting I/O thread 200 times, the agent hears of slow calls."""


def _count_from_now() -> None:
    sys.setprofile(Counter())


def _counted() -> int:
    counter = sys.getprofile()
    assert isinstance(counter, Counter)
    return counter.count


class Idle(Actor):
    @endpoint
    def no_op(self) -> None:
        """Do nothing."""

    @endpoint
    def count(self) -> int:
        return _counted()


class Waiter(Actor):
    @endpoint
    async def until(self, path: str) -> None:
        while not os.path.exists(path):
            await asyncio.sleep(0.05)


@contextmanager
def _by_agent(mesh: ProcMesh, tmp_path: Path) -> Iterator[None]:
    """Rank 0 has another call to answer meanwhile, so what is sent there goes by its agent."""
    path = tmp_path / "end"
    actor: Any = mesh.slice(gpus=0).spawn("waits", Waiter)
    future = actor.until.call_one(str(path))
    try:
        yield
    finally:
        path.touch()
        future.get(30)


@only_on_3_11
def test_a_call_costs_its_controller_few_calls_of_python(mesh4: ProcMesh, tmp_path: Path) -> None:
    one = mesh4.slice(gpus=0)
    for _ in range(20):
        one.execute(abs, -1).get(30)
    assert usual(lambda: one.execute(abs, -1).get(30)) < CONTROLLER_MAX
    with _by_agent(mesh4, tmp_path):
        assert usual(lambda: one.execute(abs, -1).get(30)) < BY_AGENT_MAX


@only_on_3_11
def test_a_call_costs_its_rank_few_calls_of_python(mesh4: ProcMesh, tmp_path: Path) -> None:
    one = mesh4.slice(gpus=0)
    one.execute(_count_from_now).get(30)
    assert usual_step([one.execute(_counted).get(30).values()[0] for _ in range(CALLS)]) < RANK_MAX
    with _by_agent(mesh4, tmp_path):
        assert usual_step([one.execute(_counted).get(30).values()[0] for _ in range(CALLS)]) < RANK_MAX
    one.execute(sys.setprofile, None).get(30)


COUNTING_AGENT = """
import signal, sys

if "meshbook.agent.host_agent" in sys.orig_argv:
    count = 0

    def count_call(frame, event, argument):
        global count
        count += event == "call"

    def turn(*_):
        sys.setprofile(count_call if sys.getprofile() is None else None)
        with open({path!r}, "w") as file:
            file.write(f"{{count}}\\n")

    signal.signal(signal.SIGUSR2, turn)
"""
"""What the agent's Python imports as it starts: from one SIGUSR2 to the next it counts; at each it writes the count."""


@contextmanager
def _counted_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcMesh]:
    """A mesh of one rank whose agent counts; see `_agents_count`."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING_AGENT.format(path=str(tmp_path / "count")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with start_hosts({}, LocalLauncher()).spawn_procs({"gpus": 1}, owns_hosts=True) as mesh:
        yield mesh


def _agents_count(mesh: ProcMesh, tmp_path: Path, call: Callable[[], object]) -> float:
    """How many calls of Python one ``call`` costs the agent, in the best of some batches.

    Where the machine is busy there is more: heartbeats, and calls that go past the agent and take long.
    """
    path = tmp_path / "count"

    def turn() -> int:
        path.unlink(missing_ok=True)
        os.kill(_agent_of(mesh), signal.SIGUSR2)
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
        return int(path.read_text())

    counts = [0]
    for _ in range(10):
        call()
        turn()
        for _ in range(CALLS // 5):
            call()
        counts.append(turn())
    return min(after - before for before, after in itertools.pairwise(counts)) / (CALLS // 5)


@pytest.mark.slow
@only_on_3_11
def test_a_call_costs_its_agent_few_calls_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _counted_agent(tmp_path, monkeypatch) as mesh:
        assert _agents_count(mesh, tmp_path, lambda: mesh.execute(abs, -1).get(30)) < PAST_AGENT_MAX
        with _by_agent(mesh, tmp_path):
            assert _agents_count(mesh, tmp_path, lambda: mesh.execute(abs, -1).get(30)) < AGENT_MAX


def _count_here(*_: object) -> None:
    sys.setprofile(Counter())


def _count_on_new_threads() -> None:
    threading.setprofile(_count_here)


@pytest.mark.slow
@only_on_3_11
def test_a_call_of_an_actor_costs_few_calls_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _counted_agent(tmp_path, monkeypatch) as mesh:
        mesh.execute(_count_on_new_threads).get(30)  # before the rank has any that takes part in this
        actor: Any = mesh.spawn("idle", Idle)

        def call() -> None:
            actor.no_op.call_one().get(30)

        on_agent = _agents_count(mesh, tmp_path, call)
        on_controller = usual(call)
        on_rank = usual_step([actor.count.call_one().get(30) for _ in range(CALLS)])
    assert on_controller < ACTOR_CONTROLLER_MAX
    assert on_agent < PAST_AGENT_MAX
    assert on_rank < ACTOR_RANK_MAX


def test_a_call_wakes_few_threads(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    _assert_wakes_few(one, lambda: one.execute(abs, -1).get(30))


def test_a_call_of_an_actor_wakes_no_more() -> None:
    with this_host().spawn_procs({"gpus": 1}) as mesh:
        actor: Any = mesh.spawn("idle", Idle)
        _assert_wakes_few(mesh, lambda: actor.no_op.call_one().get(30))


class Caller(Actor):
    @endpoint
    async def call(self, other: Any, times: int) -> None:
        for _ in range(times):
            await other.no_op.call_one()


@pytest.mark.slow
def test_a_call_of_a_rank_by_another_wakes_only_the_two() -> None:
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        idle: Any = mesh.slice(gpus=1).spawn("idle", Idle)
        caller: Any = mesh.slice(gpus=0).spawn("caller", Caller)
        _assert_wakes_few(mesh, lambda: caller.call.call_one(idle, 30).get(30), WAKE_UPS_MAX + 2.6 * 30, 20)


@pytest.mark.slow
def test_an_actor_with_an_event_loop_wakes_no_more() -> None:
    with this_host().spawn_procs({"gpus": 1}) as mesh:
        caller: Any = mesh.spawn("caller", Caller)
        _assert_wakes_few(mesh, lambda: caller.call.call_one(None, 0).get(30))


def _assert_wakes_few(
    mesh: ProcMesh, call: Callable[[], object], wake_ups: float = WAKE_UPS_MAX, calls: int = 3 * CALLS
) -> None:
    processes = [os.getpid(), _agent_of(mesh), *mesh.execute(os.getpid).get(30).values()]
    for _ in range(20):
        call()
    before, started = _sleeps(processes), time.monotonic()
    for _ in range(calls):
        call()
    assert _sleeps(processes) - before < wake_ups * calls + TIMERS_PER_S * (time.monotonic() - started)


def _agent_of(mesh: ProcMesh) -> int:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    return hello.pid


def _sleeps(processes: list[int]) -> int:
    """How often the threads of these processes have waited for something, each of which ended by a wake-up."""
    texts = [path.read_text() for pid in processes for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(count) for text in texts for count in re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M))
