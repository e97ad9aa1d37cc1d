"""Questions and answers with strangers who may become hosts: `Gate` listens, `ask_gate` asks, CURVE encrypts.

Anybody may ask, but only so many at a time (`meshbook.wire.admission`); what proves who asks is in the question, which
only the owner of the gate's key can read. What a question means is its owner's affair (`meshbook.launchers.manual`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import zmq

from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.own_faults import attempt
from meshbook.errors import ProtocolError
from meshbook.system.processes import connect_to
from meshbook.wire.zmq_transport import hear_monitor, listen

MAX_BYTES = 1 << 16
CONNECT_S = 10.0
HANDSHAKE_MS = 5000

_REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Gate:
    """Answers questions at a port of its own, on a thread of its own, until it is closed."""

    def __init__(self, address: str, answer: Callable[[bytes], bytes]) -> None:
        """address: where to listen, as ``tcp://10.0.0.5:*``. answer: called on that thread. Raises: OSError."""
        public, secret = zmq.curve_keypair()
        self.key = public.decode()
        """Public; whoever knows it knows that we answer."""
        self._answer, self._owner = answer, os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 500
        self._socket.maxmsgsize = MAX_BYTES
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.curve_server = True
        self._socket.curve_secretkey, self._socket.curve_publickey = secret, public
        try:
            self._door, self._monitor, self.endpoint = listen(self._socket, address)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, error.strerror) from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = hidden_thread(self._serve, "meshbook.gate")
        self._thread.start()

    def close(self) -> None:
        """Answer no more; returns when the port is free. Idempotent; in a fork it does nothing."""
        if self._thread.is_alive() and self._owner == os.getpid():
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        poll = zmq.Poller()
        poll.register(self._socket, zmq.POLLIN)
        poll.register(self._wake, zmq.POLLIN)
        poll.register(self._monitor, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poll.poll())):
                while hear_monitor(self._monitor, self._door):
                    pass
                if self._socket in ready:
                    question = self._socket.recv()
                    answers: list[bytes] = []
                    attempt(lambda: answers.append(self._answer(question)), "a question at the gate")  # noqa: B023
                    self._socket.send(b"".join(answers))
        finally:
            os.close(self._wake)
            self._socket.disable_monitor()
            self._door.close()
            self._context.destroy(linger=500)


def ask_gate(endpoint: str, key: str, question: bytes, timeout_s: float) -> bytes:
    """The answer of the gate that has this key.

    Raises: OSError where nobody can be reached; ProtocolError where it is another that listens, or does not answer.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connect_to((host.strip("[]"), int(port)), CONNECT_S).close()  # the system's own words where nobody listens
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.linger = 0
        sock.maxmsgsize = MAX_BYTES
        sock.ipv6 = "[" in host
        sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = key.encode(), public, secret
        monitor = sock.get_monitor_socket(_REFUSED)
        try:
            sock.connect(endpoint)
            sock.send(question)
            return _await_answer(sock, monitor, time.monotonic() + timeout_s)
        finally:
            sock.disable_monitor()
            monitor.close(linger=0)


def _await_answer(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes], deadline: float) -> bytes:
    """Raises: ProtocolError."""
    poll = zmq.Poller()
    poll.register(sock, zmq.POLLIN)
    poll.register(monitor, zmq.POLLIN)
    ready = dict(poll.poll(max(0, round((deadline - time.monotonic()) * 1000))))
    if sock in ready:
        return sock.recv()
    raise ProtocolError("another key is used there" if ready else "nothing was answered in time")
