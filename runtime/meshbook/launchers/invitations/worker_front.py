"""Where a worker listens: who asks it for an agent goes on to its gate, and programs have it as a way to others.

    program ══> its address ──┬─ ZeroMQ ───────> the gate (`meshbook.wire.gate`)
                              └─ "meshbook" ──> one question (`invitations.server_messages`), then
                                   Reaches      bytes to another worker's address, or its agent's
                                   Listens      a port here at which agents find the program
                                   Takes        bytes of an agent that has come to that port

One port for all of it: the way into a cluster is often a single one that somebody forwards.
"""

from __future__ import annotations

import functools
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from meshbook.concurrency.background import hidden_thread, run_in_background
from meshbook.errors import MeshError
from meshbook.launchers.invitations.invitation import TurnedAway, difference
from meshbook.launchers.invitations.server_messages import (
    HANDSHAKE_S,
    Listens,
    Reached,
    Reaches,
    SeesServer,
    ServerAnswer,
    ServerQuestion,
    Takes,
    answer_question,
    hear_question,
    tell_number,
)
from meshbook.launchers.invitations.worker_ticket import connect_to_worker, is_loopback, read_address
from meshbook.system.connections import end_connection, unix_connection
from meshbook.system.os_errors import explain
from meshbook.system.processes import address_towards, family_of, in_endpoint, loopback_address
from meshbook.wire.spliced import Splices

STRANGERS_MAX = 64
"""So many connections may be at their first words."""
TAKEN_S = 30.0
"""How long a connection that has come waits for its program to take it."""
BACKLOG = 512
FULL_S = 0.1
"""How long nobody is let in when the process has no descriptors left."""
_OF_ZEROMQ = b"\xff"


class _Come(NamedTuple):
    """A connection that waits for its program. control: how that is told."""

    sock: socket.socket
    since: float
    control: socket.socket


class WorkerFront:
    """Listens at an address until it is closed."""

    def __init__(self, listener: socket.socket, gate: str, key: bytes) -> None:
        """listener: bound already. gate: the path of the gate's socket. key: what shows the ticket."""
        self._listener, self._gate, self._key = listener, gate, key
        self._splices = Splices()
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._numbers = itertools.count(1)
        self._come: dict[int, _Come] = {}
        self._controls: set[socket.socket] = set()
        """Of programs for which we listen."""
        hidden_thread(self._accept, "meshbook.front").start()

    def close(self) -> None:
        """Listen no more, and break what goes through us. Idempotent; in a fork it does nothing."""
        if self._owner != os.getpid():
            return
        end_connection(self._listener)
        with self._lock:
            ends = [*self._controls, *(come.sock for come in self._come.values())]
            self._controls.clear()
            self._come.clear()
        for sock in ends:
            end_connection(sock)
        self._splices.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(FULL_S)
                continue
            if self._strangers.acquire(blocking=False):
                run_in_background(functools.partial(self._meet, sock))
            else:
                sock.close()

    def _meet(self, sock: socket.socket) -> None:
        """Hear what a stranger wants."""
        try:
            try:
                sock.settimeout(HANDSHAKE_S)
                if sock.recv(1, socket.MSG_PEEK) == _OF_ZEROMQ:
                    self._splices.join(sock, unix_connection(self._gate, HANDSHAKE_S))
                    return
                question = hear_question(sock, self._key)
            finally:
                self._strangers.release()
            self._serve(sock, question)
        except (OSError, EOFError, MeshError, msgspec.MsgspecError):  # it learns nothing
            end_connection(sock)

    def _serve(self, sock: socket.socket, question: ServerQuestion) -> None:
        """Do what a program asks for, which has shown the ticket. Raises: OSError."""
        if isinstance(question, Listens):
            self._listen(sock, question)
            return
        try:
            other = self._find(question)
        except OSError as error:
            answer_question(sock, TurnedAway(explain(error)))
            end_connection(sock)
            return
        if isinstance(other, socket.socket):
            answer_question(sock, Reached())
            self._splices.join(sock, other)
        else:
            answer_question(sock, other)
            end_connection(sock)

    def _find(self, question: SeesServer | Reaches | Takes) -> socket.socket | ServerAnswer:
        """The other end of a connection, or what to answer. Raises: OSError."""
        if isinstance(question, SeesServer):
            differs = difference(question.protocol, question.python, "the program", "the worker")
            return TurnedAway(f"{differs}; install the same on both") if differs else Reached()
        if isinstance(question, Reaches):
            return connect_to_worker(read_address(question.worker), HANDSHAKE_S)
        with self._lock:
            found = self._come.pop(question.number, None)
        return found.sock if found is not None else TurnedAway("that connection has gone")

    # ---- for programs that agents cannot reach -------------------------------------------------------------------

    def _listen(self, control: socket.socket, question: Listens) -> None:
        """Until the program has gone. Raises: OSError."""
        try:
            host, _, port = question.before.removeprefix("tcp://").rpartition(":")
            host = host.strip("[]") or _address_for(question.towards)
            listener = socket.create_server((host, int(port or 0)), family=family_of(host), backlog=BACKLOG)
        except OSError as error:
            answer_question(control, TurnedAway(f"it cannot listen for the program: {explain(error)}"))
            end_connection(control)
            return
        with self._lock:
            self._controls.add(control)
        try:
            with listener:
                answer_question(control, Reached(f"tcp://{in_endpoint(host)}:{listener.getsockname()[1]}"))
                self._tell_of_each(listener, control)
        finally:
            with self._lock:
                self._controls.discard(control)
            self._drop(lambda come: come.control is control)
            end_connection(control)

    def _tell_of_each(self, listener: socket.socket, control: socket.socket) -> None:
        """Tell the program of each connection that comes; returns when the program has gone. Raises: OSError."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(control, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(TAKEN_S * 1000)]
            if control.fileno() in ready:  # it says nothing more, so that is its end
                return
            self._drop(lambda come: come.since < time.monotonic() - TAKEN_S)
            if ready:
                sock, _ = listener.accept()
                number = next(self._numbers)
                with self._lock:
                    self._come[number] = _Come(sock, time.monotonic(), control)
                tell_number(control, number)

    def _drop(self, is_meant: Callable[[_Come], bool]) -> None:
        """Close connections that nobody takes any more."""
        with self._lock:
            gone = [self._come.pop(number) for number, come in list(self._come.items()) if is_meant(come)]
        for come in gone:
            end_connection(come.sock)


def _address_for(machines: tuple[str, ...]) -> str:
    """By which they reach this one. Raises: OSError."""
    far = next((each for each in machines if each and not is_loopback(each)), "")
    return address_towards(far) if far else loopback_address()
