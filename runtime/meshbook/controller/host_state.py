"""A host as the controller knows it: its start, its own report, and the time of its last message.

A host that was given up may come back, and is told to end as soon as it can be reached:

    cut off ──> lost: its ranks are dead for the mesh, others may have their places ──> reachable again ──> Goodbye

Its agent knows nothing of that, and would hold its ranks for its lease. So its key stays valid for that long, and a
heartbeat says every second that there is a message that it does not have; it asks for that, and ends (`LateHosts`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from meshbook.concurrency.future import Future
from meshbook.errors import PeerProtocolError
from meshbook.launchers.base import LaunchedHost
from meshbook.sessions.folder import SavedLauncher
from meshbook.wire import messages as wire
from meshbook.wire.link import HostLink
from meshbook.wire.transport import ControllerSocket

SUSPECT_S = 3.0  # a host that was not heard of for so long is suspect
# a silent host is lost when its machine has not answered for so long either (`meshbook.wire.tcp`), or no
# connection came back; on our own machine when we see that its process has ended
MAX_SILENCE_S = 10.0


class HostStarter(Protocol):
    """Starts hosts like one that is there (`meshbook.mesh.host_agents`). All raise SpawnError."""

    @property
    def fixed(self) -> str:
        """Return why there are no more hosts like it (`meshbook.launchers.base.Launcher.fixed`)."""

    @property
    def place_is_gone(self) -> bool:
        """See `meshbook.launchers.base.Launcher.place_is_gone`."""

    def another(self) -> HostState:
        """Start a host in its place."""

    def more(self, count: int, beside: Sequence[HostState]) -> list[HostState]:
        """Start hosts together, beside the existing ones and on other machines than ``beside``."""


class HostState(HostLink):
    """A host of the controller. Only the I/O thread uses it, but for the plain fields."""

    def __init__(
        self,
        id: str,
        epoch: int,
        launched: LaunchedHost,
        sock: ControllerSocket,
        *,
        shares_environment: bool,
        is_found: bool = False,
    ) -> None:
        """is_found: it was started by a former controller."""
        super().__init__(id, epoch, sock)
        self.name = id
        self.launched = launched
        self.shares_environment, self.is_found = shares_environment, is_found
        self.starter: HostStarter | None = None
        self.launcher = SavedLauncher()  # what starts another host in its place
        self.is_dismissed = False  # whether we have shut it down
        self.endpoint = ""  # the address that it dials, where that is on a network
        self._successor: HostState | None = None
        self.ready: Future[HostState] = Future()
        self.hello: wire.Hello | None = None
        self.answered = self.heard  # when the machine of a silent host was last known to be there

    @property
    def heard(self) -> float:
        """Return when the host was last heard of."""
        return self.silence.heard

    def present(self) -> HostState:
        """Return this host, or the one that has taken its place."""
        return self if self._successor is None else self._successor.present()

    def give_place_to(self, other: HostState) -> None:
        """Note that ``other`` was started in the place of this host, which is lost."""
        self.present()._successor = other

    @property
    def suspicion(self) -> str:
        """Return why the host is suspect, as in ``silent for 7 s: ...``; empty while it is heard of, or lost."""
        now = time.monotonic()
        if not self.is_up or now - self.heard <= SUSPECT_S:
            return ""
        is_there = self.is_watched or now - self.answered <= SUSPECT_S
        why = "its agent is stopped or its machine is busy" if is_there else "its connection has broken"
        return f"silent for {now - self.heard:.0f} s: {why}"

    @property
    def is_up(self) -> bool:
        """Whether it has dialled in and is not lost."""
        return self.hello is not None and not self.lost

    @property
    def is_overdue(self) -> bool:
        """Whether the host has been silent for so long that it counts as lost."""
        return not self.is_watched and time.monotonic() - max(self.heard, self.answered) > MAX_SILENCE_S

    @property
    def is_watched(self) -> bool:
        """Whether we see the host's process."""
        return self.shares_memory and self.launched.pid != 0

    def look(self) -> None:
        """Look whether the machine of a silent host is there; once per heartbeat."""
        if time.monotonic() - self.heard > SUSPECT_S / 2:
            self.answered = self._sock.answered(self.id, max(self.heard, self.answered))


# an agent that has found us waits nearly so long for a word, whatever its lease (`meshbook.agent.lease`)
SILENCE_S = 660.0


class _Late(NamedTuple):
    host: HostLink
    until: float


class LateHosts:
    """The hosts of one controller that were given up and may come back. Under its turn. lease_s: how long an agent
    waits for a controller. on_settled: told of each host that has got its goodbye, or whose lease is over."""

    def __init__(self, lease_s: float, on_settled: Callable[[str], object] = lambda id: None) -> None:
        self._lease_s, self._on_settled = lease_s, on_settled
        self._hosts: dict[str, _Late] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._hosts

    def keep(self, host: HostLink) -> None:
        """Repeat the last message to a host, its goodbye, until it has arrived or the host's lease is over."""
        self._hosts[host.id] = _Late(host, time.monotonic() + max(self._lease_s, SILENCE_S))

    def expect(self, host: HostLink) -> None:
        """Say goodbye to a host that a former controller has given up."""
        host.send_urgent(wire.Goodbye())
        host.lose("it was given up")
        self.keep(host)

    def on_frames(self, id: str, frames: list[bytes]) -> None:
        """Take frames of a host that may be kept here."""
        if (late := self._hosts.get(id)) is not None:
            with contextlib.suppress(PeerProtocolError):  # it was given up for that, perhaps
                late.host.repeat_farewell(frames)

    def tick(self) -> None:
        """Knock at the hosts that have not got their goodbye; once per heartbeat."""
        now = time.monotonic()
        for id, late in list(self._hosts.items()):
            if late.host.has_farewell or now > late.until:
                del self._hosts[id]
                late.host.shut_out()
                self._on_settled(id)
            else:
                late.host.beat()
