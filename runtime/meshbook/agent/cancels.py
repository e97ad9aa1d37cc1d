"""Cancels at the agent: of calls that have not come yet or wait for their payload; processes that were stopped.

Calls and cancels travel on different lanes, so a cancel may come first. What it names then is answered for here,
without a worker. Which calls a worker has begun only the worker knows: once a call was passed on, so are its cancels.
"""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Iterable

from meshbook.agent.worker import AgentWorker
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire
from meshbook.wire.bulk import NamesPayload

KEPT = 1024
"""Cancels without a call are remembered up to this number: most name calls that have ended."""


class EarlyCancels:
    """Cancels of calls that this host does not know (yet)."""

    def __init__(self) -> None:
        self.targets: OrderedDict[int, wire.Target] = OrderedDict()
        """By call."""

    def add(self, cancel: wire.Cancel) -> None:
        self.targets[cancel.call] = (*self.targets.pop(cancel.call, ()), *cancel.target)
        if len(self.targets) > KEPT:
            self.targets.popitem(last=False)

    def take(self, call: int, ranks: Iterable[int]) -> set[int]:
        """Those of ``ranks`` for which ``call``, which has come now, was cancelled."""
        target = self.targets.pop(call, ())
        return {rank for rank in ranks if wire.target_has(target, rank)}


def find_held(
    held: Iterable[NamesPayload], cancel: wire.Cancel, ranks: Iterable[int]
) -> tuple[wire.Call, set[int]] | None:
    """Find a call that waits for its payload, if ``cancel`` names it for all of its members here.

    ranks: those that live here. Returns: the call, and its members among them.
    """
    for call in held:
        if isinstance(call, wire.Call) and call.id == cancel.call:
            members = {rank for rank in ranks if wire.target_has(call.target, rank)}
            if all(wire.target_has(cancel.target, rank) for rank in members):
                return call, members
    return None


def wake_stopped(workers: Iterable[AgentWorker]) -> None:
    """SIGCONT to those that a signal has stopped; what a debugger has stopped is left to it."""
    for worker in workers:
        if worker.pid and process_state(worker.pid) == "T":
            os.kill(worker.pid, signal.SIGCONT)
