"""What a call costs: in calls of Python functions, a figure without noise, which only goes down; in wake-ups."""

from __future__ import annotations

import gc
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
from types import FrameType
from typing import Any

import pytest
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts, this_host
from meshbook.actor import Actor, endpoint

CALLS = 100

CONTROLLER_MAX = 86
"""On the main thread, which serves the sockets while it waits; measured: 78, and 2 for each other mesh that lives."""

AGENT_MAX = 49
"""In the agent, which has one thread but for its logs; measured: 45.1. Heartbeats are part of it, once a second."""

RANK_MAX = 36
"""On the rank's main thread; measured: 34.4."""

ACTOR_CONTROLLER_MAX, ACTOR_AGENT_MAX, ACTOR_RANK_MAX = 121, 49, 90
"""The same of a call to an actor, on all threads of its rank; measured: 113, 46, 71; 63 where it does not read the mail
itself, which is a wake-up more. Where it does, the mail's thread looks 200 times a second: more on a busy machine."""

WAKE_UPS_MAX, TIMERS_PER_S = 4.0, 1000
"""Of all threads of controller, agent and rank: per call, and besides in each second. Each of the three waits for the
one before it, the agent twice, less what is there already when it is asked for; measured: 2.9-3.8 in all. A busy
machine has more of what comes with time: gloo's thread looks 100 times a second, the resting I/O thread 200 times."""


class Counter:
    """Counts calls of Python functions on the thread that installs it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


def least(call: Callable[[], object], batch: int = 4) -> float:
    """How many calls of Python one ``call`` costs this thread, in the best of some batches.

    What else is counted comes from outside: what is due once a second, and what other tests have collections of garbage
    call.
    """
    counter, before, counts = Counter(), sys.getprofile(), [0]
    gc.disable()
    sys.setprofile(counter)
    try:
        for _ in range(CALLS // batch):
            for _ in range(batch):
                call()
            counts.append(counter.count)
    finally:
        sys.setprofile(before)
        gc.enable()
    return min(after - before for before, after in itertools.pairwise(counts)) / batch


def _count_from_now() -> None:
    sys.setprofile(Counter())


def _counted() -> int:
    counter = sys.getprofile()
    sys.setprofile(None)
    assert isinstance(counter, Counter)
    return counter.count


only_on_3_11 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons inline other functions")


@only_on_3_11
def test_a_call_costs_its_controller_few_calls_of_python(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    for _ in range(20):
        one.execute(abs, -1).get(30)
    assert least(lambda: one.execute(abs, -1).get(30)) < CONTROLLER_MAX


@only_on_3_11
def test_a_call_costs_its_rank_few_calls_of_python(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    one.execute(_count_from_now).get(30)
    for _ in range(CALLS):
        one.execute(abs, -1).get(30)
    (count,) = one.execute(_counted).get(30).values()
    assert count / CALLS < RANK_MAX


COUNTING_AGENT = """
import signal, sys

if "meshbook.agent.host_agent" in sys.orig_argv:
    count = 0

    def count_call(frame, event, argument):
        global count
        count += event == "call"

    def turn(*_):
        if sys.getprofile() is None:
            sys.setprofile(count_call)
        else:
            sys.setprofile(None)
            with open({path!r}, "w") as file:
                file.write(f"{{count}}\\n")

    signal.signal(signal.SIGUSR2, turn)
"""
"""What the agent's Python imports as it starts: from one SIGUSR2 to the next it counts, then it writes the count."""


@contextmanager
def _counted_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcMesh]:
    """A mesh of one rank whose agent counts; see `_agents_count`."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING_AGENT.format(path=str(tmp_path / "count")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with start_hosts({}, LocalLauncher()).spawn_procs({"gpus": 1}, owns_hosts=True) as mesh:
        yield mesh


def _agents_count(mesh: ProcMesh, tmp_path: Path, call: Callable[[], object]) -> float:
    """How many calls of Python one ``call`` costs the agent."""
    for _ in range(20):
        call()
    os.kill(_agent_of(mesh), signal.SIGUSR2)
    for _ in range(CALLS):
        call()
    os.kill(_agent_of(mesh), signal.SIGUSR2)
    path = tmp_path / "count"
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text()) / CALLS


@only_on_3_11
def test_a_call_costs_its_agent_few_calls_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _counted_agent(tmp_path, monkeypatch) as mesh:
        assert _agents_count(mesh, tmp_path, lambda: mesh.execute(abs, -1).get(30)) < AGENT_MAX


class Idle(Actor):
    @endpoint
    def no_op(self) -> None:
        """Do nothing."""


def _count_on_new_threads() -> None:
    threading.setprofile(Counter())


def _counted_so_far() -> int:
    counter = threading.getprofile()
    assert isinstance(counter, Counter)
    return counter.count


@only_on_3_11
def test_a_call_of_an_actor_costs_few_calls_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _counted_agent(tmp_path, monkeypatch) as mesh:
        mesh.execute(_count_on_new_threads).get(30)  # before the rank has any that takes part in this
        actor: Any = mesh.spawn("idle", Idle)

        def call() -> None:
            actor.no_op.call_one().get(30)

        on_agent = _agents_count(mesh, tmp_path, call)
        (before,) = mesh.execute(_counted_so_far).get(30).values()
        on_controller = least(call)
        (after,) = mesh.execute(_counted_so_far).get(30).values()
    assert on_controller < ACTOR_CONTROLLER_MAX
    assert on_agent < ACTOR_AGENT_MAX
    assert (after - before) / CALLS < ACTOR_RANK_MAX


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


def test_a_call_of_a_rank_by_another_wakes_only_the_two() -> None:
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        idle: Any = mesh.slice(gpus=1).spawn("idle", Idle)
        caller: Any = mesh.slice(gpus=0).spawn("caller", Caller)
        _assert_wakes_few(mesh, lambda: caller.call.call_one(idle, 30).get(30), WAKE_UPS_MAX + 2.3 * 30, 20)


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
