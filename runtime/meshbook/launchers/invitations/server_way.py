"""A worker as the way to others, for a program that reaches one address of their network, and is reached from nowhere.

    attach("tcp://gateway:4444")
    hosts = attach_to_workers(workers=["tcp://nodeA:4444", ...], ca="trust_all_connections")    # as the gateway has it

         program ── connections to one address ──> worker (`invitations.worker_front`) ──> other workers
                 <─ each agent that has come ────         a port of its own  <── their agents

Where the connection to the server breaks the program makes it again, at the same port over there, and agents, which
dial again and again, are back with all that was under way (`meshbook.wire.link`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from meshbook.concurrency.background import hidden_thread, run_in_background
from meshbook.concurrency.forks import at_fork
from meshbook.errors import SpawnError, UsageError
from meshbook.launchers.invitations.invitation import TurnedAway
from meshbook.launchers.invitations.server_messages import (
    HANDSHAKE_S,
    Listens,
    OtherTicket,
    Reached,
    Reaches,
    SeesServer,
    ServerQuestion,
    Takes,
    ask_server,
    hear_number,
)
from meshbook.launchers.invitations.worker_ticket import (
    WITHIN_S,
    connect_to_worker,
    other_ticket,
    read_address,
    worker_secret,
)
from meshbook.system.processes import python_version
from meshbook.system.user_folders import runtime_base
from meshbook.wire.messages import PROTOCOL_VERSION
from meshbook.wire.spliced import Splices

AGAIN_S = 0.2


class ServerWay:
    """The way through one server."""

    def __init__(self, server: str) -> None:
        """server: its address, as of a worker. Raises: UsageError."""
        self.server, self._address, self._secret = server, read_address(server), worker_secret()
        self._splices, self._lock = Splices(), threading.Lock()
        self._ends: dict[tuple[str, str | tuple[str, ...]], _WayBack] = {}

    def see(self, within_s: float) -> None:
        """Wait until the server listens. Raises: SpawnError."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._ask(SeesServer(PROTOCOL_VERSION, python_version())).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise SpawnError(
                        f"no worker listens at {self._address.dial} ({error.strerror or error}), which was to be the "
                        f"way to others; it is started there by run_worker_loop_forever(address=..., "
                        f'ca="trust_all_connections")'
                    ) from None
            time.sleep(AGAIN_S)

    @contextlib.contextmanager
    def end_of(self, worker: str) -> Iterator[str]:
        """A socket here, as an endpoint, whose connections go to a worker. Raises: OSError where nobody listens."""
        self._ask(Reaches(worker)).close()
        path = f"{runtime_base()}/way-{secrets.token_hex(8)}"
        with socket.create_server(path, family=socket.AF_UNIX) as listener:
            hidden_thread(self._lead_on, "meshbook.way", listener, worker).start()
            try:
                yield f"ipc://{path}"
            finally:
                os.unlink(path)
                listener.shutdown(socket.SHUT_RDWR)  # closing it does not wake who accepts

    def _lead_on(self, listener: socket.socket, worker: str) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                sock, _ = listener.accept()
                try:
                    self._splices.join(sock, self._ask(Reaches(worker)))
                except (OSError, SpawnError):
                    sock.close()

    def way_back(self, endpoint: str, towards: tuple[str, ...], before: str = "") -> str:
        """Where agents on these machines find what listens here at ``endpoint``. Raises: OSError, SpawnError.

        before: where they do already, by the way of a former controller.
        """
        with self._lock:
            key = (endpoint, before or towards)
            known = self._ends.get(key)
            if known is None or known.is_over:
                known = self._ends[key] = _WayBack(self, endpoint, towards, before)
            return known.there

    def carry(self, number: int, endpoint: str) -> None:
        """Have a connection that has come to the server go on at ``endpoint``."""
        taken: socket.socket | None = None
        try:
            taken = self._ask(Takes(number))
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self._splices.join(taken, socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_S))
        except (OSError, SpawnError):  # whoever dialled does so again
            if taken is not None:
                taken.close()

    def listen(self, towards: tuple[str, ...], before: str) -> tuple[socket.socket, str]:
        """The connection by which the server tells of others, and where it listens. Raises: OSError, SpawnError."""
        sock, answer = self._ask_for(Listens(towards, before))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family != socket.AF_UNIX:
            for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.settimeout(None)
        return sock, answer.endpoint

    def _ask(self, question: ServerQuestion) -> socket.socket:
        return self._ask_for(question)[0]

    def _ask_for(self, question: ServerQuestion) -> tuple[socket.socket, Reached]:
        """Raises: OSError, also for what the server cannot do; SpawnError where it has another ticket, or refuses."""
        sock = connect_to_worker(self._address, HANDSHAKE_S)
        try:
            answer = ask_server(sock, self._secret.proof, question)
            if isinstance(answer, TurnedAway):
                if isinstance(question, SeesServer):
                    raise SpawnError(f"the worker at {self._address.dial} refuses: {answer.reason}")
                raise OSError(answer.reason)
        except OtherTicket:
            sock.close()
            raise other_ticket(self._address.dial, self._secret.origin) from None
        except BaseException:
            sock.close()
            raise
        return sock, answer

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            ends = list(self._ends.values())
            self._ends.clear()
        for end in ends:
            end.close()
        self._splices.close()


class _WayBack:
    """A port of the server at which agents find one of ours."""

    def __init__(self, way: ServerWay, endpoint: str, towards: tuple[str, ...], before: str) -> None:
        """before: the port that agents know already; the server is asked for it until it answers."""
        self._way, self._endpoint, self._towards = way, endpoint, towards
        self.there, self.is_over = before, False
        self._control: socket.socket | None = None
        if not before:
            self._control, self.there = way.listen(towards, "")
        hidden_thread(self._serve, "meshbook.way").start()

    def close(self) -> None:
        self.is_over = True
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self.is_over:
            if self._control is not None:
                with self._control, contextlib.suppress(OSError, EOFError):
                    self._hear(self._control)
            self._come_again()

    def _hear(self, control: socket.socket) -> None:
        """Take what comes until the connection ends. Raises: OSError, EOFError."""
        while True:
            run_in_background(functools.partial(self._way.carry, hear_number(control), self._endpoint))

    def _come_again(self) -> None:
        """The server has gone, or the connection to it: look for it, at the port that agents know."""
        deadline = time.monotonic() + WITHIN_S
        while not self.is_over:
            try:
                self._control, _ = self._way.listen(self._towards, self.there)
                return
            except (OSError, SpawnError):
                self.is_over = time.monotonic() > deadline
            time.sleep(AGAIN_S)


_attached: ServerWay | None = None
_lock = threading.Lock()


def attach_through(server: str) -> ServerWay:
    """Reach workers through this one from now on. Raises: UsageError, SpawnError."""
    global _attached
    with _lock:
        if _attached is None:
            way = ServerWay(server)
            try:
                way.see(WITHIN_S)
            except BaseException:
                way.close()
                raise
            _attached = way
        return _same(_attached, server)


def resume_way(server: str, endpoint: str, before: str) -> ServerWay:
    """That of a former controller, whose agents dial ``before`` to find what listens at ``endpoint``.

    Does not wait for the server. Raises: UsageError.
    """
    global _attached
    with _lock:
        _attached = _attached or ServerWay(server)
        way = _same(_attached, server)
    way.way_back(endpoint, (), before)
    return way


def _same(way: ServerWay, server: str) -> ServerWay:
    if read_address(way.server).dial != read_address(server).dial:
        raise UsageError(
            f"this program is already attached through {way.server}, not {server}; a program has one way, so that "
            "hosts find it. Use another process, or meshbook.shutdown() first."
        )
    return way


def attached_way() -> ServerWay | None:
    """By which workers are reached; None where directly."""
    return _attached


def forget_way() -> None:
    """The session has ended, or was left: what comes next reaches workers directly."""
    global _attached
    with _lock:
        found, _attached = _attached, None
    if found is not None:
        found.close()


def _forget_in_child() -> None:
    global _attached, _lock
    _attached, _lock = None, threading.Lock()


at_fork(in_child=_forget_in_child)
