"""How long until a mesh is ready, what an idle rank weighs, and how long a mesh takes to stop."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import floors
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.processes import memory
from benchmarks.stats import Summary, summarise
from benchmarks.subject import TIMEOUT_S, mesh, no_op, pids

QUESTION = (
    "Spawn until every rank has answered a call, process group formed: from a fresh interpreter (floor: "
    "one import of torch), without torch too, and with the template warm (floor: fork of a process that has torch). "
    "Memory of idle ranks; stop."
)
SIZES = (2, 4, 8, 16, 32, 64, 256)
WARM_GOALS_S = {8: 0.4, 64: 0.8, 256: 4.0}
STOP_GOALS_S = {8: 0.1}
NO_TORCH_GOAL_S = 0.4
PSS_GOALS_MB = {8: 30.0, 64: 12.0}
SETTLE_S = 0.3  # how long ranks are left alone before their memory is read


class Weights(NamedTuple):
    """Megabytes of each of several processes."""

    pss_mb: list[float]
    private_mb: list[float]


def run(settings: Settings) -> Iterator[Figure]:
    """Cold once per size of interest, then each size warm."""
    yield from _cold(8, settings)
    without = [_spawn_in_fresh_process(8, "no-torch") for _ in range(settings.count(7) + 1)][1:]
    yield timed("spawn", "cold, no torch", "8 ranks", "s", without, goal=Goal("at most", NO_TORCH_GOAL_S))
    with mesh(2):
        pass  # the host agent and its template stay; other ranks would share pages with those that are weighed
    with floors.Forks() as forks:
        for ranks in SIZES:
            if not (settings.quick and ranks > 8):
                yield from _warm(ranks, forks, settings.count(11 if ranks <= 16 else 5 if ranks <= 64 else 3))


def _cold(ranks: int, settings: Settings) -> Iterator[Figure]:
    """A fresh process to ready, in turns with a fresh process that imports torch."""
    samples: dict[str, list[float]] = {"import torch": [], "meshbook": []}
    for turn in range(settings.count(7) + 1):
        took = floors.import_torch(), _spawn_in_fresh_process(ranks)
        if turn:  # the first pair fills the page cache
            for seconds, kept in zip(took, samples.values(), strict=True):
                kept.append(seconds)
    yield from side_by_side(
        "spawn", "cold", f"{ranks} ranks", "s", samples, goals={"import torch": Goal("x floor", 1.3)}
    )


def _spawn_in_fresh_process(ranks: int, *options: str) -> float:
    command = [sys.executable, "-m", "benchmarks.cold_start", str(time.monotonic()), str(ranks), *options]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as installed: the first of several turns compiles
    done = subprocess.run(
        command, cwd=floors.ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S, env=environment
    )
    return float(done.stdout)


def _warm(ranks: int, forks: floors.Forks, count: int) -> Iterator[Figure]:
    """Spawn, weigh and stop in turns with the bare fork; the template is warm since `run` spawned once."""
    spawned, stopped, forked = [], [], []
    ours = bare = Weights([], [])
    for turn in range(count + 1):
        with forks.fork(ranks) as (took, bare_pids):
            if turn == 1:
                bare = _weigh(bare_pids)
        started = time.perf_counter()
        with mesh(ranks) as procs:
            no_op(procs).get(TIMEOUT_S)
            ready = time.perf_counter()
            if turn == 1:
                ours = _weigh(pids(procs))
            stopping = time.perf_counter()
        if turn:
            forked.append(took)
            spawned.append(ready - started)
            stopped.append(time.perf_counter() - stopping)
    size = f"{ranks} ranks"
    goals = {"meshbook": Goal("at most", WARM_GOALS_S[ranks])} if ranks in WARM_GOALS_S else {}
    yield from side_by_side("spawn", "warm", size, "s", {"fork": forked, "meshbook": spawned}, goals=goals)
    stop_goal = Goal("at most", STOP_GOALS_S[ranks]) if ranks in STOP_GOALS_S else None
    yield timed("spawn", "stop", size, "s", stopped, goal=stop_goal)
    goal = Goal("at most", PSS_GOALS_MB[ranks]) if ranks in PSS_GOALS_MB else None
    yield _weight("PSS per idle rank", size, "fork", bare.pss_mb, None, None)
    yield _weight("PSS per idle rank", size, "meshbook", ours.pss_mb, bare.pss_mb, goal)
    yield _weight("private per idle rank", size, "fork", bare.private_mb, None, None)
    yield _weight("private per idle rank", size, "meshbook", ours.private_mb, bare.private_mb, None)


def _weigh(idle: list[int]) -> Weights:
    """Return PSS and private megabytes of each process, after a pause."""
    time.sleep(SETTLE_S)
    weights = [memory(pid) for pid in idle]
    return Weights([weight.pss_mb for weight in weights], [weight.private_mb for weight in weights])


def _weight(
    what: str, size: str, subject: str, megabytes: list[float], floor: list[float] | None, goal: Goal | None
) -> Figure:
    """One figure of memory; the spread is over the ranks."""
    summary: Summary = summarise(megabytes)
    ratio = summary.median / statistics.median(floor) if floor else None
    return Figure("spawn", what, size, subject, "MB", summary, "fork" if floor else "", ratio, goal)
