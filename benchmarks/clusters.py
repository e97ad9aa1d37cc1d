"""Hosts by ssh, Slurm and Ray, on loopback, beside hosts of this machine by TCP: spawn, a call, a host that is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator

import meshbook
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.ray_nodes import ray_nodes
from benchmarks.slurm_nodes import slurm_nodes
from benchmarks.ssh_hosts import LoopbackHosts, NoDaemonError, loopback_hosts
from benchmarks.stats import interleave
from benchmarks.subject import TIMEOUT_S, no_op
from meshbook import LocalLauncher, ProcMesh, errors, start_hosts
from meshbook.controller.host_state import HostState
from meshbook.launchers.base import Launcher
from meshbook.launchers.ray import RayLauncher
from meshbook.launchers.slurm import SlurmLauncher
from meshbook.launchers.ssh import SSHLauncher

QUESTION = (
    "Two hosts with two ranks each by a real sshd on loopback, beside two agents of this machine that act as two hosts "
    "(TCP): spawn until all have answered, process group formed (floor: `ssh HOST true`); a call; the ssh client of a "
    "host is killed: until its loss is known, and healed. The same on two nodes of a real Slurm (floor: "
    "`srun -N2 true`), and on two nodes of a real Ray, where the agent is killed."
)
NAMES = ("nodeA", "nodeB")
SPAWN_GOAL_S = 5.0
KNOWN_GOAL_MS = 100.0


def run(settings: Settings) -> Iterator[Figure]:
    """Nothing where there is no sshd."""
    try:
        with loopback_hosts() as there:
            yield from _spawn(there, settings.count(7))
            yield from _call(there, settings.count(1000))
            yield from _lose(there, settings.count(7))
    except NoDaemonError as error:
        print(f"left out: {error}")
    finally:
        meshbook.shutdown()
    count = settings.count(5)
    yield from in_slurm(lambda: (_spawn_by_slurm(count), lose_agents("clusters", SlurmLauncher(), "Slurm", count)))
    yield from by_ray(count)


def in_slurm(benchmarks: Callable[[], Iterable[Iterator[Figure]]]) -> Iterator[Figure]:
    """What they say beside a real Slurm of two nodes, which its commands find; nothing where there is none."""
    before = dict(os.environ)
    try:
        with slurm_nodes(2) as nodes:
            os.environ.update(nodes.environment)
            for figures in benchmarks():
                yield from figures
    except NoDaemonError as error:
        print(f"left out: {error}")
    finally:
        meshbook.shutdown()
        os.environ.clear()
        os.environ.update(before)


def by_ray(count: int) -> Iterator[Figure]:
    """On three nodes, of which two are taken; nothing where there is no Ray."""
    try:
        with ray_nodes(3) as nodes:
            yield from spawn_and_lose("clusters", RayLauncher(nodes.address), "Ray", count)
    except NoDaemonError as error:
        print(f"left out: {error}")
    finally:
        meshbook.shutdown()


def own_pid(host: HostState) -> int:
    """The number of its agent, as that knows it."""
    assert host.hello is not None
    return host.hello.pid


def spawn_and_lose(
    subject: str, launcher: Launcher, engine: str, count: int, pid_of: Callable[[HostState], int] = own_pid
) -> Iterator[Figure]:
    """Meshes by an engine, and as `lose_agents`."""
    samples = []
    for turn in range(count + 1):
        started = time.perf_counter()
        with spawned(launcher):
            took = time.perf_counter() - started
        if turn:  # the first fills the page cache
            samples.append(took)
    yield timed(subject, f"spawn by {engine}", "2 hosts x 2 ranks", "s", samples)
    yield from lose_agents(subject, launcher, engine, count, pid_of)


def _launchers(there: LoopbackHosts) -> dict[str, Callable[[], Launcher]]:
    return {
        "local, TCP": lambda: LocalLauncher(separate_hosts=True),
        "meshbook": lambda: SSHLauncher(NAMES, options=there.options),
    }


@contextlib.contextmanager
def spawned(launcher: Launcher) -> Iterator[ProcMesh]:
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
            with spawned(launcher()):
                took[name] = time.perf_counter() - started
        if turn:  # the first fills the page cache
            for name, seconds in took.items():
                samples[name].append(seconds)
    goals = {"meshbook": Goal("at most", SPAWN_GOAL_S)}
    yield from side_by_side("clusters", "spawn", "2 hosts x 2 ranks", "s", samples, goals=goals)


def _call(there: LoopbackHosts, count: int) -> Iterator[Figure]:
    launchers = _launchers(there)
    with spawned(launchers["local, TCP"]()) as local, spawned(launchers["meshbook"]()) as remote:
        samples = interleave(
            {
                "local, TCP": lambda: no_op(local).get(TIMEOUT_S),
                "meshbook": lambda: no_op(remote).get(TIMEOUT_S),
            },
            rounds=count // 50,
            per_round=50,
            warmup=20,
        )
    yield from side_by_side("clusters", "call", "4 ranks", "ms", samples)


def _spawn_by_slurm(count: int) -> Iterator[Figure]:
    samples: dict[str, list[float]] = {"srun -N2 true": [], "meshbook": []}
    for turn in range(count + 1):
        started = time.perf_counter()
        subprocess.run(["srun", "-N2", "true"], check=True, stdin=subprocess.DEVNULL, timeout=60)
        floor = time.perf_counter() - started
        started = time.perf_counter()
        with spawned(SlurmLauncher()):
            took = time.perf_counter() - started
        if turn:
            samples["srun -N2 true"].append(floor)
            samples["meshbook"].append(took)
    yield from side_by_side("clusters", "spawn by Slurm", "2 hosts x 2 ranks", "s", samples)


def lose_agents(
    subject: str, launcher: Launcher, engine: str, count: int, pid_of: Callable[[HostState], int] = own_pid
) -> Iterator[Figure]:
    """The agent of the second host is killed: until that is known, and until all is healed. pid_of: its number here."""
    with spawned(launcher) as procs:
        known, healed = _lose_and_heal(procs, count, pid_of)
    yield timed(subject, f"lost agent known, {engine}", "2 of 4 ranks", "s", known)
    yield timed(subject, f"lost agent healed, {engine}", "2 of 4 ranks", "s", healed)


def _lose_and_heal(procs: ProcMesh, count: int, pid_of: Callable[[HostState], int]) -> tuple[list[float], list[float]]:
    """The second host ends by the end of a process: how long until that is known, and until it is there again."""
    known, healed = [], []
    for _ in range(count):
        future = procs.slice(hosts=1).run("import time; time.sleep(600)")
        started = time.perf_counter()
        os.kill(pid_of(procs._mesh.hosts[1]), signal.SIGKILL)
        try:
            future.get(TIMEOUT_S)
        except errors.WorkerLost:
            known.append(time.perf_counter() - started)
        started = time.perf_counter()
        procs.heal()
        healed.append(time.perf_counter() - started)
    return known, healed


def _lose(there: LoopbackHosts, count: int) -> Iterator[Figure]:
    with spawned(_launchers(there)["meshbook"]()) as procs:
        known, healed = _lose_and_heal(procs, count, lambda host: host.launched.pid)
    yield timed("clusters", "lost host known", "2 of 4 ranks", "ms", known, goal=Goal("at most", KNOWN_GOAL_MS))
    yield timed("clusters", "lost host healed", "2 of 4 ranks", "s", healed)
