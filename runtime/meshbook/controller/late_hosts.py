"""Hosts that were given up, and may come back: each is told to end as soon as it can be reached.

    cut off ──> lost: its ranks are dead for the mesh, others may have their places ──> reachable again ──> Goodbye

Its agent knows nothing of that, and would hold its ranks for its lease. So its key stays valid for that long, and a
heartbeat says every second that there is a message that it does not have; it asks for that, and ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from meshbook.errors import PeerProtocolError
from meshbook.wire import messages as wire
from meshbook.wire.host_link import HostLink
from meshbook.wire.lanes import LaneName

SILENCE_S = 660.0
"""An agent that has found us waits nearly so long for a word, whatever its lease (`meshbook.agent.lease`)."""


class _Late(NamedTuple):
    host: HostLink
    until: float


class LateHosts:
    """Of one controller; under its turn. lease_s: for how long an agent waits for a controller.

    on_settled: told of each that has heard it, or whose lease is over.
    """

    def __init__(self, lease_s: float, on_settled: Callable[[str], object] = lambda id: None) -> None:
        self._lease_s, self._on_settled = lease_s, on_settled
        self._hosts: dict[str, _Late] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._hosts

    def keep(self, host: HostLink) -> None:
        """Its last message, which says that it is to end, is sent again until it has come, or its lease is over."""
        self._hosts[host.id] = _Late(host, time.monotonic() + max(self._lease_s, SILENCE_S))

    def expect(self, host: HostLink) -> None:
        """One that a former controller has given up."""
        host.send_urgent(wire.Goodbye())
        host.lose("it was given up")
        self.keep(host)

    def on_frames(self, id: str, lane: LaneName, frames: list[bytes]) -> None:
        """One that may be kept here has spoken."""
        if (late := self._hosts.get(id)) is not None:
            with contextlib.suppress(PeerProtocolError):  # it was given up for that, perhaps
                late.host.repeat_farewell(lane, frames)

    def tick(self) -> None:
        """Once per heartbeat."""
        now = time.monotonic()
        for id, late in list(self._hosts.items()):
            if late.host.has_farewell or now > late.until:
                del self._hosts[id]
                late.host.shut_out()
                self._on_settled(id)
            else:
                late.host.knock()
