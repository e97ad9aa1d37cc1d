"""Profiles of a cell on many ranks: brought from the ranks, on one clock, each rank's own.

The profiler of a rank reads the wall clock of its machine. Clocks of other machines are compared over the control link:
a question goes there and back, and the shortest of several round trips says how far they are apart, to half of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from meshbook.errors import CallError, CallInterrupted
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask
from meshbook.mesh.states import by_host
from meshbook.profiling.recorder import RankTrace, take

MAX_EVENTS = 400_000
"""The most events of a merged trace: Perfetto shows these quickly, and the file has some 10 MB."""
LEAST_EVENTS = 200
"""The events that each rank may have at least, however many ranks there are."""
TAKE_TIMEOUT_S = 300.0
ROUND_TRIPS = 7


class Profile(NamedTuple):
    """The profile that the ranks recorded of one cell."""

    traces: dict[int, RankTrace]
    problems: dict[int, str]
    """The reason for each rank that has no trace."""
    clock_error_s: float
    """The clocks of the ranks' machines are aligned to this; 0 on one machine."""


class _Clock(NamedTuple):
    ahead_s: float
    error_s: float


def collect(procs: ProcMesh, name: str, ended: Collection[int], begun_s: float) -> Profile:
    """Bring the records of the ranks under ``name``.

    ended: the ranks that have ended the cell: others could not answer now. begun_s: the time here (`time.time`) that
    becomes 0 in the traces. Raises: KeyboardInterrupt, as CallInterrupted.
    """
    lost = set(procs.lost)
    problems = {rank: "it has ended" if rank in lost else "it is still busy" for rank in procs.ranks}
    ranks = [rank for rank in procs.ranks if rank in ended and rank not in lost]
    if not ranks:
        return Profile({}, problems, 0.0)
    asked = procs.select(ranks)
    clocks = compare_clocks(asked)
    base_s = {rank: begun_s + clocks[rank].ahead_s for rank in ranks}
    max_events = max(LEAST_EVENTS, MAX_EVENTS // len(ranks))
    try:
        values = asked.execute(take, name, base_s, max_events).get(TAKE_TIMEOUT_S)
        found = {rank: values.get(rank) for rank in ranks}
    except CallError as error:
        if isinstance(error, CallInterrupted):
            raise
        problems.update(dict.fromkeys(ranks, str(error)))
        found = dict(error.partial)
    traces = {rank: trace for rank, trace in found.items() if not trace.problem}
    problems.update({rank: trace.problem for rank, trace in found.items()})
    return Profile(
        dict(sorted(traces.items())),
        {rank: problem for rank, problem in problems.items() if rank not in traces},
        max(clock.error_s for clock in clocks.values()),
    )


def compare_clocks(procs: ProcMesh) -> dict[int, _Clock]:
    """Measure how far each member's wall clock is ahead of ours, in seconds."""
    clocks: dict[int, _Clock] = {}
    for part in by_host(procs):
        clock = _Clock(0.0, 0.0) if part.is_here else _compare(procs, part.ranks[0])
        clocks.update(dict.fromkeys(part.ranks, clock))
    return clocks


def _compare(procs: ProcMesh, rank: int) -> _Clock:
    one = procs.select([rank])
    best = _Clock(0.0, float("inf"))
    for _ in range(ROUND_TRIPS):
        asked = time.time()
        answer = ask(one, float, "clock")
        now = time.time()
        if rank in answer and (now - asked) / 2 < best.error_s:
            best = _Clock(answer[rank] - (asked + now) / 2, (now - asked) / 2)
    return best if best.error_s < float("inf") else _Clock(0.0, 1.0)
