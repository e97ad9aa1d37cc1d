"""A start is waited for step by step: hosts dial in, workers import and answer, groups form, the bootstrap runs.

The limit counts from the last progress, so a slow disk or a loaded machine may take its time, and a step without
progress is given up with an error that names the step, the missing ranks, and where to look.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple, TypeVar

from meshbook.calls.call_future import CallFuture
from meshbook.concurrency.future import Future
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.startup import PendingWorkers
from meshbook.errors import HostLost, SpawnError, UsageError
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.mesh.settings import setting_s
from meshbook.system.exits import log_tail
from meshbook.system.processes import count_moves

T = TypeVar("T")

LOOK_S = 0.5
"""The interval at which progress is checked and shown."""

SHOWN = 8
"""An error names so many hosts, and so many causes."""


class _Step(NamedTuple):
    """The progress of a step."""

    what: str
    """Its name, as in ``importing torch``; empty while hosts wait in a queue."""
    moves: Hashable
    """A value that differs whenever the step has moved."""
    missing: str
    """A sentence that names the hosts or ranks that have not answered."""
    last_line: str = ""
    """The log of the host that told last ends with it."""
    there: str = ""
    """The number of ranks that have done it, as ``3/8 ranks``."""


class StartProgress:
    """The waits of one start, or repair, on the thread of the user.

    within_s: how long each may go without progress; by default the setting of `meshbook.monarch.config.configure`.
    """

    def __init__(self, controller: Controller, within_s: float | None = None) -> None:
        """Raises: UsageError."""
        if within_s is not None and not within_s > 0:
            raise UsageError(f"a start is given a number of seconds above 0, not within_s={within_s!r}.")
        self._controller = controller
        self._hosts_s = within_s or setting_s("host_spawn_ready_timeout")
        self._workers_s = within_s or setting_s("mesh_proc_spawn_max_idle")
        self._told = ""

    def await_hosts(self, hosts: Sequence[HostState], on_up: Callable[[HostState], object] = lambda host: None) -> None:
        """Wait until all have dialled in. on_up: called with each, in their order. Raises: SpawnError."""
        for host in hosts:
            try:
                self._wait(host.ready, lambda host=host: self._step_of(host, hosts), self._hosts_s)  # type: ignore[misc]
            except HostLost as error:
                raise SpawnError(_describe_failed(host, error.cause, hosts)) from None
            if not host.lost and (why := host.launched.failure()):  # some are known to be wrong only when they run
                raise SpawnError(f"{_name_hosts([host], hosts)} cannot be used: {why}")
            on_up(host)

    def _step_of(self, host: HostState, hosts: Sequence[HostState]) -> _Step:
        """Return the step of a host. A host that waits in a queue is reported once, and its time does not count."""
        there = [each.name for each in hosts if each.is_up]
        if waits_for := host.launched.waits_for():
            line = waits_for + (f"; there: {', '.join(there)}" if there else "")
            if line != self._told:
                print(line, flush=True)
                self._told = line
        moves = time.monotonic() if waits_for else (len(there), count_moves(each.launched.pid for each in hosts))
        where = f" at {host.endpoint}, which must be reachable from there" if host.endpoint else ""
        some = f"; {len(there)} of {len(hosts)} hosts are there" if len(hosts) > 1 else ""
        log = self._controller.folder.logs / f"agent-{host.id}.log"
        name = _name_hosts([host], hosts)
        what = "" if waits_for else f"waiting for {name}{some}"
        return _Step(what, moves, f"{name} has not dialled in{where}{some}", log_tail(log, 1).strip())

    def await_workers(self, pending: PendingWorkers) -> None:
        """Wait until all have answered. Raises: SpawnError."""

        def step() -> _Step:
            late, came = tuple(pending.waiting), len(pending.workers)
            told = pending.describe(), pending.moves, _no_answer(late), pending.last_line
            return _Step(*told, there=f"{came}/{came + len(late)} ranks")

        self._wait(pending.done, step, self._workers_s)

    def await_call(self, call: Future[T], what: str) -> T:
        """Wait for a call to ranks, the step ``what`` of the start. Raises: SpawnError, and the errors of the call."""

        def step() -> _Step:
            waiting = tuple(call.call.waiting) if isinstance(call, CallFuture) else ()
            everyone = len(call.call.members) if isinstance(call, CallFuture) else 0
            return _Step(what, len(waiting), _no_answer(waiting), there=f"{everyone - len(waiting)}/{everyone} ranks")

        return self._wait(call, step, self._workers_s)

    def _wait(self, future: Future[T], look: Callable[[], _Step], within_s: float) -> T:
        began = moved_at = time.monotonic()
        moves: Hashable = None
        try:
            while True:
                left_s = moved_at + within_s - time.monotonic()
                try:
                    return future.get(max(0.0, min(LOOK_S, left_s)))
                except TimeoutError:
                    if future.done():
                        raise
                step, now = look(), time.monotonic()
                if step.moves != moves:
                    moves, moved_at = step.moves, now
                elif now >= moved_at + within_s:
                    last = f"\n  the last line of the log: {step.last_line}" if step.last_line else ""
                    what = f" while {step.what}" if step.what else ""
                    raise SpawnError(
                        f"no progress for {within_s:g} s{what}: {step.missing}{last}\n"
                        f"  logs: {self._controller.folder.logs}    give it longer: {advice().within}"
                    )
                if step.what and now - began >= LOOK_S:
                    parts = filter(None, [step.what, step.there, f"{math.ceil(now - began)} s"])
                    self._controller.front_end.show_progress(", ".join(parts))
        finally:
            self._controller.front_end.show_progress("")


def _describe_failed(host: HostState, cause: str, hosts: Sequence[HostState]) -> str:
    """Say which of ``hosts`` have failed by now, those of one cause in one line; ``host`` has, and comes first."""
    causes = {cause: [host]}
    for other in hosts:
        if other is not host and (why := other.lost or other.launched.failure()):
            causes.setdefault(why, []).append(other)
    lines = [f"{_name_hosts(failed, hosts)} did not start: {why}" for why, failed in causes.items()]
    return "\n  ".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])])


def _name_hosts(some: Sequence[HostState], hosts: Sequence[HostState]) -> str:
    """Return the names of ``some`` of ``hosts`` for people: their numbers before these are known."""
    if len(hosts) == 1 and some[0].name == some[0].id:
        return "the host"
    names = [str(hosts.index(host) + 1) if host.name == host.id else host.name for host in some]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    of = f" of {len(hosts)}" if some[0].name == some[0].id else ""
    return f"host{'s' * (len(names) > 1)} {', '.join(names[:SHOWN])}{more}{of}"


def _no_answer(ranks: Collection[int]) -> str:
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not answered"
