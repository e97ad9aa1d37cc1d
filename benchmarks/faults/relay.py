"""A relay, over TCP or Unix sockets, whose connections can be reset, and which can fall silent as a cut cable does."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time

import msgspec

from benchmarks.faults.namespace import Namespace
from meshbook import LocalLauncher
from meshbook.launchers.base import LaunchedHost
from meshbook.wire.ticket import Ticket
from meshbook.wire.unix_transport import SCHEME


class Relay:
    """Forwards connections to ``target``, (host, port) or a path, until `cut` or `close`."""

    def __init__(self, target: tuple[str, int] | str, address: str = "127.0.0.1") -> None:
        self._target = target
        self.port, self.path = 0, ""
        if isinstance(target, str):
            self.path = f"{target}.relay"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self.path)
            self._listener.listen()
        else:
            self._listener = socket.create_server((address, 0))
            self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._ended = False
        self._silent_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def cut(self) -> int:
        """Reset every connection; returns how many there were. New ones are let in at once."""
        with self._lock:
            pairs = len(self._peers) // 2
            for sock in list(self._peers):
                self._drop(sock)
            return pairs

    def silence(self, seconds: float) -> None:
        """Forward nothing for so long; connections stay, and nobody is told."""
        self._silent_until = time.monotonic() + seconds

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.cut()
        self._selector.close()
        self._listener.close()
        if self.path:
            os.unlink(self.path)

    def _run(self) -> None:
        while not self._ended:
            if time.monotonic() < self._silent_until:
                time.sleep(0.01)
                continue
            for key, _ in self._selector.select(0.05):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        inner, _ = self._listener.accept()
        if isinstance(self._target, str):
            outer = socket.socket(socket.AF_UNIX)
            outer.connect(self._target)
        else:
            outer = socket.create_connection(self._target)
        self._peers[inner], self._peers[outer] = outer, inner
        for sock in (inner, outer):
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
            if data:
                self._peers[sock].sendall(data)
                return
        except OSError:
            pass
        other = self._peers[sock]
        self._drop(sock)
        self._drop(other)

    def _drop(self, sock: socket.socket) -> None:
        if self._peers.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()


class RelayedLauncher(LocalLauncher):
    """Agents that dial in through a relay: over TCP, in a network namespace if there is one, or over a Unix socket."""

    relay_class = Relay

    def __init__(self, namespace: Namespace | None = None, *, separate_hosts: bool = True) -> None:
        super().__init__(separate_hosts=separate_hosts)
        self.namespace = namespace
        self.relay: Relay | None = None

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        endpoint = tickets[0].endpoint
        if endpoint.startswith(SCHEME):
            self.relay = self.relay_class(endpoint.removeprefix(SCHEME))
            endpoint = f"{SCHEME}{self.relay.path}"
        else:
            host, _, port = endpoint.removeprefix("tcp://").partition(":")
            address = self.namespace.address if self.namespace else "127.0.0.1"
            self.relay = self.relay_class((host, int(port)), address)
            endpoint = f"tcp://{address}:{self.relay.port}"
        with self.namespace.inside() if self.namespace else contextlib.nullcontext():
            return super().launch([msgspec.structs.replace(ticket, endpoint=endpoint) for ticket in tickets])

    def close(self) -> None:
        """End the relay, and the namespace."""
        if self.relay is not None:
            self.relay.close()
        if self.namespace is not None:
            self.namespace.close()
