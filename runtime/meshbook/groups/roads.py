"""Whether what goes to other hosts is taken there: a wait in a collective ends where a road has gone without a word.

A network that drops what it is given tells nobody. The kernel repeats for a quarter of an hour, gloo waits for it, and
the controller, which may reach all hosts by another network, sees ranks at work. But the kernel knows what is under way
and was not acknowledged (`meshbook.wire.answering`), and a process may ask it of its own sockets. A process at the
other end that is stopped or busy acknowledges all the same, so it is never taken for a road that has gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from meshbook.errors.advice import advice
from meshbook.wire.answering import borrow, last_answer

UNANSWERED_S = 15.0
"""So long may anything be under way; as an agent's connection to its controller."""
LOOK_S = 1.0

_Ends = tuple[object, object]


class Roads:
    """Those of one rank, looked at while it waits. A wait on another thread may look too: that does no harm."""

    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}
        """The other hosts of the groups, by the addresses at which they are known; none on one machine."""
        self._next = 0.0
        self._answered: dict[_Ends, float] = {}

    def check(self, operation: str) -> None:
        """Look, at most once a second. Raises: RuntimeError that says which host is out of reach."""
        now = time.monotonic()
        if not self.hosts or now < self._next:
            return
        if now - self._next > UNANSWERED_S / 3:  # nobody has waited meanwhile
            self._answered.clear()
        self._next = now + LOOK_S
        self._answered, unanswered = self._look(now)
        for address, since in unanswered.items():
            if now - since > UNANSWERED_S:
                raise RuntimeError(
                    f"{operation}: host {self.hosts[address]} cannot be reached at {address}: nothing that was sent "
                    f"there was acknowledged for {now - since:.0f} s. Another road: {advice().shared_network}"
                )

    def _look(self, now: float) -> tuple[dict[_Ends, float], dict[str, float]]:
        """When each connection was last answered, and each address to which there is one."""
        connections, addresses = dict[_Ends, float](), dict[str, float]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                if (connection := borrow(int(name))) is None:
                    continue
                with connection:
                    here, there = connection.getsockname(), connection.getpeername()
                    if there[0] in self.hosts:
                        told = last_answer(connection, -math.inf)
                        known = told > -math.inf  # some sandboxes' kernels do not tell, nor is a closed one silent
                        at = max(told, self._answered.get((here, there), now)) if known else now
                        connections[here, there] = at
                        addresses[there[0]] = min(addresses.get(there[0], at), at)
        return connections, addresses
