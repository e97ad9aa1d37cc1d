"""`PortForwarder`: connections to a port of one process go on at a port of another one's machine.

    forwarder = this_proc().spawn("forwarder", PortForwarder)
    forwarder.forward.call_one(procs.slice(gpus=0), 6006, this_proc(), "127.0.0.1:6006").get()

         who connects ──> Listening ──── messages of the session ────> Dialing ──> 127.0.0.1:6006
                          in src_proc_mesh                             in dst_proc_mesh

Each connection has a thread for each direction at either end. A piece that the far socket has taken is acknowledged,
and `WINDOW` of them may be under way, so that a fast writer waits for a slow reader.
"""

from __future__ import annotations

import contextlib
import contextvars
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from meshbook.actor import Actor, Channel, Point, Port, PortReceiver, current_rank, endpoint
from meshbook.concurrency.background import run_in_background
from meshbook.errors import UsageError
from meshbook.system.connections import send_at_once

PIECE_BYTES = 64 << 10
WINDOW = 16
"""So many pieces may be under way in each direction."""
DIAL_S = 10.0

DATA, TAKEN, END, BROKEN = "data", "taken", "end", "broken"
ForwardedPart: TypeAlias = "tuple[str, bytes]"


class ForwardedConnection:
    """One end of a connection: a socket here, and the other end by ports."""

    def __init__(self, connection: socket.socket, receiver: PortReceiver[ForwardedPart]) -> None:
        self._socket, self._receiver = connection, receiver
        self._peer: Port[ForwardedPart]
        self._room = threading.Semaphore(WINDOW)
        self._lock = threading.Lock()
        self._open = {"here", "there"}
        """Who may say more."""

    def start(self, peer: Port[ForwardedPart]) -> None:
        """Carry what comes, until both sides have ended, or one breaks."""
        self._peer = peer
        _aside(self._read)
        _aside(self._receive)

    def _read(self) -> None:
        """What our socket says goes to the other end."""
        try:
            while data := self._socket.recv(PIECE_BYTES):
                self._room.acquire()
                self._send(DATA, data)
            self._send(END)
        except OSError:
            self._send(BROKEN)
            self.close()
        else:
            self._ended("here")

    def _receive(self) -> None:
        """What the other end says goes to our socket."""
        while True:
            try:
                kind, data = self._receiver.recv().get()
            except BaseException:
                kind, data = BROKEN, b""
            try:
                if kind == DATA:
                    self._socket.sendall(data)
                    self._send(TAKEN)
                elif kind == TAKEN:
                    self._room.release()
                elif kind == END:
                    self._socket.shutdown(socket.SHUT_WR)
                    if self._ended("there"):
                        return
            except OSError:
                self._send(BROKEN)
                kind = BROKEN
            if kind == BROKEN:
                self.close()
                return

    def _ended(self, side: str) -> bool:
        """One side has said all; whether both have."""
        with self._lock:
            self._open.discard(side)
            both = not self._open
        if both:
            self.close()
        return both

    def _send(self, kind: str, data: bytes = b"") -> None:
        with contextlib.suppress(Exception):  # the other process has gone, which its own end of the socket says
            self._peer.send((kind, data))

    def close(self) -> None:
        """Idempotent; wakes both threads."""
        self._room.release()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class PortEnd(Actor):
    """Either end: it closes its connections when it ends."""

    def __init__(self) -> None:
        self._connections: list[ForwardedConnection] = []

    def _add(self, connection: socket.socket) -> tuple[ForwardedConnection, Port[ForwardedPart]]:
        send_at_once(connection)
        port, receiver = Channel[ForwardedPart].open()
        made = ForwardedConnection(connection, receiver)
        self._connections.append(made)
        return made, port

    def __cleanup__(self, error: Exception | None) -> None:
        for connection in self._connections:
            connection.close()


class DialingEnd(PortEnd):
    """Connects to a port of its machine for those who connect to the other end."""

    @endpoint
    def dial(self, peer: Port[ForwardedPart], port: int | Callable[[Point], int], point: Point) -> Port[ForwardedPart]:
        """Connect; point: its place in the mesh. Raises: OSError, UsageError."""
        number = checked_port("dst_port", port(point) if callable(port) else port)
        made, mine = self._add(socket.create_connection(("127.0.0.1", number), timeout=DIAL_S))
        made._socket.settimeout(None)
        made.start(peer)
        return mine


class ListeningEnd(PortEnd):
    """Listens, and has the other end connect."""

    _listener: socket.socket | None = None

    @endpoint
    def listen(
        self, dialers: Any, port: int | Callable[[Point], int], address: str | Callable[[Point], str]
    ) -> tuple[str, int]:
        """Returns where it listens. Raises: OSError, UsageError."""
        point = current_rank()
        host, number = parsed_address(address(point) if callable(address) else address)
        self._listener = socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        dialer = dialers.slice(**point) if len(point) else dialers
        _aside(lambda: self._serve(lambda mine: dialer.dial.call_one(mine, port, point).get(DIAL_S * 2)))
        bound: tuple[str, int] = self._listener.getsockname()[:2]
        return bound

    def _serve(self, dial: Callable[[Port[ForwardedPart]], Port[ForwardedPart]]) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                made, mine = self._add(connection)
                try:
                    made.start(dial(mine))
                except Exception:  # who has connected sees a connection that closes
                    made.close()

    def __cleanup__(self, error: Exception | None) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        super().__cleanup__(error)


class PortForwarder(Actor):
    """Forwards ports for as long as it lives."""

    @endpoint
    def forward(
        self,
        dst_proc_mesh: Any,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: Any,
        src_address: str | Callable[[Point], str],
    ) -> Any:
        """Have each process of one mesh listen, for the process at its place in the other mesh.

        dst_port: on 127.0.0.1 there. src_address: ``host:port``; port 0 is one that is free. Both may be functions of
        the Point. Returns: where each listens. Raises: UsageError for other shapes, ports and addresses.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise UsageError(f"both meshes have one shape, not {dst_proc_mesh.extent} and {src_proc_mesh.extent}.")
        if not callable(dst_port):
            checked_port("dst_port", dst_port)
        if not callable(src_address):
            parsed_address(src_address)
        dialers = dst_proc_mesh.spawn("dialing", DialingEnd)
        listeners = src_proc_mesh.spawn("listening", ListeningEnd)
        return listeners.listen.call(dialers, dst_port, src_address).get()


def _aside(work: Callable[[], object]) -> None:
    """Run it on a thread of its own, as the actor that runs now."""
    context = contextvars.copy_context()
    run_in_background(lambda: context.run(work))


def checked_port(name: str, port: object, least: int = 1) -> int:
    """Raises: UsageError."""
    if not isinstance(port, int) or isinstance(port, bool) or not least <= port < 1 << 16:
        raise UsageError(f"{name} is a port, a whole number from {least} to 65535, not {port!r}.")
    return port


def parsed_address(address: object) -> tuple[str, int]:
    """Raises: UsageError."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdigit():
        raise UsageError(f'src_address is "host:port", as in "127.0.0.1:8080", not {address!r}.')
    return host.removeprefix("[").removesuffix("]"), checked_port("src_address", int(port), least=0)
