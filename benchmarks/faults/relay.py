"""A relay, over TCP or Unix sockets, whose connections can be reset, and which can fall silent as a cut cable does."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time


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
