"""Whether the agent's controller is there, and how long the agent waits for the next one.

A controller on our machine is watched by its pidfd, or by the pipe at our stdin before we know its pid; one elsewhere
by the connection, while its machine answers there (`meshbook.wire.tcp`). While it runs it may be silent for
long (native code, a stopped process, a laptop asleep). Once it has ended, has taken its leave, or cannot be reached,
silence counts against the lease.

    controller           the agent waits, with meshes that are up         without
    runs                 10 min of silence                                the same
    has ended, has left  the lease: 10 min, or as told on leaving         5 s
    is out of reach      the lease, counted from the last sign of life    5 s, if the pipe at stdin has ended
    was never reached                                                     20 s, `Ticket.arrive_s`, in any case
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from meshbook.errors import UsageError
from meshbook.system.event_loop import EventLoop, Watch
from meshbook.system.exits import open_end
from meshbook.system.processes import is_same_process
from meshbook.wire.link import PeerSilence

LEASE_S = 600.0  # meshes wait so long for the next controller
MAX_SILENCE_S = 600.0  # a controller that runs may be busy in native code, stopped, or asleep
IDLE_LEASE_S = 5.0  # an agent without meshes has nothing to wait for
UNHEARD_S = 4.0  # a controller that was not heard of for so long is taken not to listen; messages are kept for it


def default_lease_s() -> float:
    """Return the lease that a controller tells its agents: `LEASE_S`, or MESHBOOK_LEASE_S. Raises: UsageError."""
    text = os.environ.get("MESHBOOK_LEASE_S")
    if not text:
        return LEASE_S
    try:
        lease_s = float(text)
    except ValueError:
        lease_s = -1.0
    if not lease_s >= 0:
        raise UsageError(f"MESHBOOK_LEASE_S must be a number of seconds, not {text!r}.")
    return lease_s


class Lease:
    """The lease of one agent, used by its loop. silence: the controller's silence. arrive_s: see `Ticket`. on_gone:
    called when the controller has ended on our machine, or has left."""

    def __init__(
        self,
        loop: EventLoop,
        lease_s: float,
        silence: PeerSilence,
        on_gone: Callable[[], object] = lambda: None,
        arrive_s: float = math.inf,
    ) -> None:
        self.lease_s, self._arrive_s = lease_s, arrive_s
        self.has_arrived = False  # whether the controller's machine was ever there to connect to
        self._loop, self._silence, self._on_gone = loop, silence, on_gone
        self._stdin: Watch | None = None
        self._process: Watch | None = None
        self._is_connected = False

    def watch_stdin(self) -> None:
        """Watch stdin, whose end means that our launcher has ended."""
        os.set_blocking(0, False)
        self._stdin = self._loop.watch(0, self._on_stdin)

    def watch_process(self, pid: int, started: int) -> None:
        """Watch our controller's process, which runs on our machine."""
        self._forget_process()
        try:
            fd = open_end(pid)
        except OSError:
            return
        if is_same_process(pid, started):
            self._process = self._loop.watch(fd, self._on_end)
            self._forget_stdin()
        else:
            os.close(fd)

    def leave(self, lease_s: float) -> None:
        """Note that the controller has left; its process may go on."""
        self.lease_s = lease_s
        self._is_connected = False
        self._forget_process()
        self._forget_stdin()
        self._on_gone()

    def beat(self, *, is_connected: bool, has_arrived: bool = True) -> None:
        """Take in the state of the connection, once a second. is_connected: a connection to a controller elsewhere
        stands, on which its machine answers. has_arrived: one has stood at any time, or none is needed."""
        self._is_connected = is_connected
        self.has_arrived = self.has_arrived or has_arrived

    @property
    def is_heard(self) -> bool:
        """Whether a controller seems to listen."""
        return self._silence.length_s < (UNHEARD_S if self.runs else UNHEARD_S / 2)

    @property
    def runs(self) -> bool:
        """Whether a controller is known to run."""
        return self._stdin is not None or self._process is not None or self._is_connected

    def is_over(self, has_meshes: bool) -> bool:
        """Whether the agent has waited long enough."""
        if not self.has_arrived and self._silence.length_s > self._arrive_s:
            return True
        if self.runs:
            return self._silence.length_s > MAX_SILENCE_S
        return self._silence.length_s > (self.lease_s if has_meshes else min(self.lease_s, IDLE_LEASE_S))

    def _on_stdin(self) -> None:
        try:
            ended = not os.read(0, 1 << 12)
        except BlockingIOError:
            return
        if ended:
            self._forget_stdin()

    def _forget_stdin(self) -> None:
        if self._stdin is not None:
            self._loop.forget(self._stdin)
            self._stdin = None

    def _on_end(self) -> None:
        self._forget_process()
        self._on_gone()

    def _forget_process(self) -> None:
        if self._process is not None:
            self._loop.forget(self._process)
            os.close(self._process.fd)
            self._process = None
