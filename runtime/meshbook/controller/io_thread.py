"""The thread that speaks with the hosts, and how others have it do something.

It serves whenever the main thread does not (`meshbook.controller.io_turns`).
"""

from __future__ import annotations

import math
import os
import signal
import time

from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.own_faults import pass_on
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.io_turns import SocketTurn, TurnQueue
from meshbook.wire.lanes import HEARTBEAT_S
from meshbook.wire.transport import ControllerSocket

ACK_IDLE_S = 0.02
"""When nothing has come for so long, what has come is acknowledged."""

LINGER_MS = 500
"""How long, at the end, what was sent may take to go out: an agent that misses its goodbye waits for its lease."""


class IoThread:
    """Of one controller. It owns ``sock``, and closes it."""

    def __init__(self, inbox: TurnQueue, sock: ControllerSocket, dispatcher: Dispatcher) -> None:
        self._inbox, self._socket, self._dispatcher = inbox, sock, dispatcher
        self._tick_at = 0.0
        self._heard: set[str] = set()
        """Hosts to which we may owe acknowledgements."""
        self._ack_at = math.inf
        self.turn = SocketTurn(self._serve, inbox.wake)
        self._thread = hidden_thread(self._run, "meshbook.io")
        self._thread.start()

    def end_serving(self) -> None:
        """Serve no more after this turn."""
        self._inbox.is_closed = True

    def close(self) -> None:
        """End the thread, once."""
        self.end_serving()
        os.eventfd_write(self._inbox.wake_fd, 1)
        self._thread.join(timeout=5)
        os.close(self._inbox.wake_fd)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must wake the thread that waits
        try:
            self.turn.serve_until(lambda: self._inbox.is_closed)
        finally:
            self._socket.close(LINGER_MS)

    def _serve(self, timeout_s: float | None) -> None:
        """Do what was asked, then wait for messages, at most ``timeout_s``. Only whoever has the turn."""
        self._serve_inbox()
        if self._inbox.is_closed:
            return
        self._sleep(timeout_s)
        heard = self._heard
        messages = self._socket.receive()
        if messages or self._socket.has_datagrams or not self._tick_at:
            # An agent says what has become of ranks: what these have sent past it before counts first.
            for data, address in self._socket.receive_past():
                self._dispatcher.on_datagram(data, address)
                heard.add("")  # nobody's name: there is something to acknowledge, soon, though no pause may come
        for host_id, lane, frames in messages:
            self._dispatcher.on_frames(host_id, lane, frames)
            heard.add(host_id)
            self._ack_at = math.inf
        if heard and self._ack_at == math.inf:
            self._ack_at = time.monotonic() + ACK_IDLE_S
        elif heard and time.monotonic() >= self._ack_at:
            self._dispatcher.acknowledge(heard)
            heard.clear()
            self._ack_at = math.inf
        now = time.monotonic()
        if now >= self._dispatcher.due_at:
            self._dispatcher.expire(now)
        if now >= self._tick_at:
            self._tick_at = now + HEARTBEAT_S
            self._dispatcher.tick()
            self._socket.watch_door()

    def _sleep(self, timeout_s: float | None) -> None:
        inbox = self._inbox
        inbox.is_asleep = True  # from here on `submit` wakes us
        next_at = min(self._tick_at, self._ack_at, self._dispatcher.plan())
        left = max(0.0, next_at - time.monotonic())
        wait_s = 0 if inbox.asked else left if timeout_s is None else min(left, timeout_s)
        if self._socket.poll(inbox.wake_fd, wait_s):
            self._tick_at = 0.0  # a host's process has ended: the heartbeat finds out which
        inbox.is_asleep = False

    def _serve_inbox(self) -> None:
        while self._inbox.asked:
            action, fail = self._inbox.asked.popleft()
            try:  # `attempt` in its own words: this is on the path of every call
                action()
            except Exception as error:
                pass_on(error, "something that was asked of the thread of the hosts", fail)
        self._dispatcher.flush()
        payloads = self._dispatcher.payloads
        if payloads.freed or payloads.gone:
            payloads.tell_freed()
