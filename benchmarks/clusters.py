"""Hosts by ssh on loopback, beside hosts of this machine by TCP: spawn, a host that is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import meshbook
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.ssh_hosts import LoopbackHosts, NoDaemonError, loopback_hosts
from benchmarks.subject import TIMEOUT_S, no_op
from meshbook import LocalLauncher, ProcMesh, errors, start_hosts
from meshbook.launchers.base import Launcher
from meshbook.launchers.ssh import SSHLauncher

QUESTION = (
    "Two hosts with two ranks each by a real sshd on loopback, beside two agents of this machine that act as two hosts "
    "(TCP): spawn until all have answered, process group formed (floor: `ssh HOST true`); the ssh client of a "
    "host is killed: until its loss is known, and healed."
)
NAMES = ("nodeA", "nodeB")
SPAWN_GOAL_S = 5.0
KNOWN_GOAL_MS = 100.0


def run(settings: Settings) -> Iterator[Figure]:
    """Nothing where there is no sshd."""
    try:
        with loopback_hosts() as there:
            yield from _spawn(there, settings.count(7))
            yield from _lose(there, settings.count(7))
    except NoDaemonError as error:
        print(f"left out: {error}")
    finally:
        meshbook.shutdown()


def _launchers(there: LoopbackHosts) -> dict[str, Callable[[], Launcher]]:
    return {
        "local, TCP": lambda: LocalLauncher(separate_hosts=True),
        "meshbook": lambda: SSHLauncher(NAMES, options=there.options),
    }


@contextlib.contextmanager
def _spawned(launcher: Launcher) -> Iterator[ProcMesh]:
    """A mesh of two hosts with two ranks each, all of which have answered."""
    with start_hosts({"hosts": 2}, launcher).spawn_procs({"gpus": 2}, device="cpu", owns_hosts=True) as procs:
        no_op(procs).get(TIMEOUT_S)
        yield procs


def _spawn(there: LoopbackHosts, count: int) -> Iterator[Figure]:
    samples: dict[str, list[float]] = {"ssh HOST true": [], **{name: [] for name in _launchers(there)}}
    for turn in range(count + 1):
        started = time.perf_counter()
        subprocess.run(["ssh", *there.options, NAMES[0], "true"], check=True, stdin=subprocess.DEVNULL, timeout=60)
        took = {"ssh HOST true": time.perf_counter() - started}
        for name, launcher in _launchers(there).items():
            started = time.perf_counter()
            with _spawned(launcher()):
                took[name] = time.perf_counter() - started
        if turn:  # the first fills the page cache
            for name, seconds in took.items():
                samples[name].append(seconds)
    goals = {"meshbook": Goal("at most", SPAWN_GOAL_S)}
    yield from side_by_side("clusters", "spawn", "2 hosts x 2 ranks", "s", samples, goals=goals)


def _lose(there: LoopbackHosts, count: int) -> Iterator[Figure]:
    """Kill the ssh client of the second host: how long until that is known, and until the host is there again."""
    known, healed = [], []
    with _spawned(_launchers(there)["meshbook"]()) as procs:
        for _ in range(count):
            future = procs.slice(hosts=1).run("import time; time.sleep(600)")
            started = time.perf_counter()
            os.kill(procs._mesh.hosts[1].launched.pid, signal.SIGKILL)
            try:
                future.get(TIMEOUT_S)
            except errors.WorkerLost:
                known.append(time.perf_counter() - started)
            started = time.perf_counter()
            procs.heal()
            healed.append(time.perf_counter() - started)
    yield timed("clusters", "lost host known", "2 of 4 ranks", "ms", known, goal=Goal("at most", KNOWN_GOAL_MS))
    yield timed("clusters", "lost host healed", "2 of 4 ranks", "s", healed)
