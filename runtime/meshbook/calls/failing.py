"""How long the first failure of a call waits for more like it, so that one error tells of them all.

What a rank raises takes a few milliseconds from there to here, and eight ranks share the cores of a machine: they fail
one after the other though they failed together. So the agents are asked which ranks run, and for how long they have. A
rank that runs and has not answered may be about to fail as well, until it has had the time for that; when all others
sleep, wait in collectives or compute something, nobody will.

    failure ──> which ranks run? ──some may fail──> `LOOK_S`, ask again
                      └──none──> the error: what they had said by then came before the answer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from meshbook.calls.call import OpenCall
from meshbook.wire import messages as wire

FAILURE_GRACE_S = 0.02
"""How long an error waits where nobody can be asked."""

LONGEST_GRACE_S = 0.5
"""The most that it waits, on a machine on which ranks that run get no processor."""

FAILS_WITHIN_S = 0.02
"""Processor time in which a rank fails as the others did: with a long traceback, of which nothing is in memory yet."""

LOOK_S = 0.001
"""The pause between questions."""

ASK_S = 0.02
"""So long agents may take to answer."""

OnStates = Callable[[Mapping[int, wire.ProcessState]], object]


class StateSource(Protocol):
    """Who can ask the agents of a mesh."""

    def ask_states(self, ranks: Collection[int], timeout_s: float, on_done: OnStates) -> None:
        """Call ``on_done`` with the states of their processes, of those that are known.

        What ranks had answered when their states were read has come by then.
        """


class FailingCall:
    """A call that has failed on some ranks, and is to be told when no more failures can be expected."""

    def __init__(self, call: OpenCall, source: StateSource | None) -> None:
        """source: None where nobody can be asked."""
        self._call = call
        self._source = None if call.lost else source  # ranks that die together leave no sign of that
        now = time.monotonic()
        grace_s = FAILURE_GRACE_S if self._source is None else LONGEST_GRACE_S
        self._tell_at, self._look_at = now + grace_s, now
        self._asking = False
        self._ran_s: dict[int, float] = {}
        """How long each rank had run when it was first told of."""

    @property
    def due(self) -> float:
        """When to call `is_ripe`."""
        return self._tell_at if self._asking or self._source is None else min(self._look_at, self._tell_at)

    def on_answer(self) -> None:
        """One more rank has answered, or was lost."""
        if self._call.hurried:
            self._tell_at = 0.0

    def is_ripe(self, now: float) -> bool:
        """Whether to tell of the failures now; else asks again, if it is time to."""
        if self._tell_at <= now:
            return True
        if self._source is not None and not self._asking and self._look_at <= now:
            self._asking = True
            self._source.ask_states(self._call.waiting, ASK_S, self._on_states)
        return False

    def _on_states(self, states: Mapping[int, wire.ProcessState]) -> None:
        self._asking, now = False, time.monotonic()
        self._look_at = now + LOOK_S
        if not any(self._may_fail(rank, states.get(rank)) for rank in self._call.waiting):
            self._tell_at = min(self._tell_at, now)

    def _may_fail(self, rank: int, told: wire.ProcessState | None) -> bool:
        if told is None:
            return True  # its agent has no time to tell: others will not have either
        began_s = self._ran_s.setdefault(rank, told.ran_s)
        return told.state in ("R", "D") and told.ran_s - began_s < FAILS_WITHIN_S
