"""The loop of a driver, a process beside us that holds the hosts of an engine, as for Ray and Kubernetes.

A driver reads its task from stdin, a line of JSON. That pipe closes when its controller goes. Later requests come
by a socket in the session's folder, and each is answered by an empty line:

    {"start": {...}}                            one more host, in the engine's terms
    {"end": "ray-1"}                            end the host with this id

Its reports go to its stdout, a log that outlives it and is read by `meshbook.launchers.engines.clients`; other
lines, of the engine or of Python, may stand between:

    meshbook: {"job": "03000000"}
    meshbook: {"waits": "...", "host": "ray-1"}         of one host, or of all where none is named
    meshbook: {"node": "n2", "host": "ray-1"}           its agent was started there
    meshbook: {"ended": "...", "host": "ray-1"}         of one host, or of all
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from abc import ABC, abstractmethod
from typing import Any, NoReturn

MARK = "meshbook: "
CONNECT_S = 5.0
"""The time within which a request has to arrive, or an engine's address to answer."""
LINE_BYTES = 1 << 20


class Driver(ABC):
    """path: the socket at which the driver listens, for this user alone."""

    def __init__(self, path: str) -> None:
        self._is_over = False
        """Whether the driver was told to end."""
        self._is_alone = False
        """Whether its controller has gone."""
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._listening = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a driver that was killed
        self._listening.bind(path)
        os.chmod(path, 0o600)
        self._listening.listen()

    @abstractmethod
    def begin(self) -> None:
        """Ask the engine for the hosts, in threads."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether there is nothing left to do once the controller has gone."""

    @abstractmethod
    def on_request(self, request: dict[str, Any]) -> None:
        """Carry out a request. Raises: KeyError where it makes no sense."""

    def on_alone(self) -> None:  # noqa: B027  most have nothing to do
        """Called when the controller has gone."""

    def serve(self) -> None:
        """Have the hosts, and serve requests until there is nothing left to be served."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which may have been held while we started
        self.begin()
        poll = select.poll()
        for each in (0, self._listening.fileno(), self._woken.fileno()):
            poll.register(each, select.POLLIN)
        while not self._is_over and not (self._is_alone and self.is_done()):
            ready = [fd for fd, _ in poll.poll()]
            if 0 in ready and not os.read(0, 1 << 12):
                poll.unregister(0)
                self._is_alone = True
                self.on_alone()
            if self._listening.fileno() in ready:
                self._answer()
            if self._woken.fileno() in ready:
                self._woken.recv(1 << 12)

    def wake_up(self) -> None:
        """Have the loop look again; may be called by any thread."""
        with contextlib.suppress(OSError):  # it is awake
            self._wake.send(b"\0")

    def _answer(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # the asking side has gone, or makes no sense
            sock, _ = self._listening.accept()
            with sock, sock.makefile("rwb") as lines:
                sock.settimeout(CONNECT_S)
                self.on_request(json.loads(lines.readline(LINE_BYTES)))
                lines.write(b"\n")

    def _on_term(self, *_: object) -> None:
        self._is_over = True


def say(**event: str) -> None:
    """Write an event to the log."""
    os.write(1, f"\n{MARK}{json.dumps(event)}\n".encode())


def fail(why: str) -> NoReturn:
    """End the driver at once, and with it all its hosts."""
    say(ended=why)
    os._exit(1)
