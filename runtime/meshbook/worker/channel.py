"""A worker's end of one of its sockets to the agent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from meshbook.concurrency import forks
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer, FrameSocket
from meshbook.worker.interrupt_gate import InterruptGate


class AgentChannel:
    """A message socket to the agent: one reading thread, any number of writers; useless in forked children."""

    def __init__(self, fd: int, gate: InterruptGate) -> None:
        self._frames = FrameSocket(socket.socket(fileno=fd))
        self._gate = gate
        self._lock = threading.Lock()
        self._generation = forks.generation

    def receive(self) -> tuple[wire.ToWorker, list[bytes]] | None:
        """Wait for the next message; None when the agent has closed the socket."""
        frames = self._frames.receive()
        return None if frames is None else (wire.decode_to_worker(frames[0]), frames[1:])

    def wait(self, timeout_s: float) -> bool:
        """Whether `receive` would find something within ``timeout_s``."""
        return self._frames.wait(timeout_s)

    def send(self, message: wire.FromWorker, payload: Sequence[Buffer] = ()) -> None:
        """Raises: BrokenPipeError when the agent is gone; UsageError in a forked child."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        with self._gate.shield, self._lock:
            self._frames.send([wire.encode(message), *payload])

    def close(self) -> None:
        """In a forked child: let go of the socket, which is its parent's."""
        self._frames.close()
