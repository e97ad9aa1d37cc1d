"""What a call costs: in calls of Python functions, a figure without noise, which only goes down; in wake-ups."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts

CALLS = 100

CONTROLLER_MAX = 120
"""On the main thread, which serves the sockets while it waits; measured: 107, and 2 for each other mesh that lives."""

AGENT_MAX = 49
"""In the agent, which has one thread but for its logs; measured: 45.1. Heartbeats are part of it, once a second."""

RANK_MAX = 38
"""On the rank's main thread; measured: 36.4."""

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


@contextmanager
def counting() -> Iterator[Counter]:
    counter = Counter()
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(before)


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
    with counting() as counter:
        for _ in range(CALLS):
            one.execute(abs, -1).get(30)
    assert counter.count / CALLS < CONTROLLER_MAX


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


@only_on_3_11
def test_a_call_costs_its_agent_few_calls_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "count"
    (tmp_path / "sitecustomize.py").write_text(COUNTING_AGENT.format(path=str(path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with start_hosts({}, LocalLauncher()).spawn_procs({"gpus": 1}, owns_hosts=True) as mesh:
        for _ in range(20):
            mesh.execute(abs, -1).get(30)
        os.kill(_agent_of(mesh), signal.SIGUSR2)
        for _ in range(CALLS):
            mesh.execute(abs, -1).get(30)
        os.kill(_agent_of(mesh), signal.SIGUSR2)
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    assert int(path.read_text()) / CALLS < AGENT_MAX


def test_a_call_wakes_few_threads(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    (rank,) = one.execute(os.getpid).get(30).values()
    processes = [os.getpid(), _agent_of(mesh4), rank]
    for _ in range(20):
        one.execute(abs, -1).get(30)
    before, started = _sleeps(processes), time.monotonic()
    for _ in range(3 * CALLS):
        one.execute(abs, -1).get(30)
    most = WAKE_UPS_MAX * 3 * CALLS + TIMERS_PER_S * (time.monotonic() - started)
    assert _sleeps(processes) - before < most


def _agent_of(mesh: ProcMesh) -> int:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    return hello.pid


def _sleeps(processes: list[int]) -> int:
    """How often the threads of these processes have waited for something, each of which ended by a wake-up."""
    texts = [path.read_text() for pid in processes for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(count) for text in texts for count in re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M))
