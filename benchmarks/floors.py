"""Floors: the barest programs that do the same as meshbook, measured in the same run.

    echo        caller ──unix socket── process                         what a round trip costs at all
    relay       caller ──unix socket── relay ──unix sockets── n        the same through one more process
    memcpy      one copy between two warm buffers                      what a payload costs at all
    fork        a process that has imported torch, forked n times      what a worker costs at all

Each is a context manager that owns its processes.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from typing_extensions import Self

from benchmarks.floor_children import MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[1]
MESSAGE = b"x" * MESSAGE_BYTES
TIMEOUT_S = 60.0
WINDOW = 64  # messages in flight in the pipelined raw floor: few enough that neither side's socket buffer fills up


@contextmanager
def child(kind: str, *arguments: object, pass_fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of `benchmarks.floor_children`; killed and reaped on leaving."""
    command = [sys.executable, "-m", "benchmarks.floor_children", kind, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=pass_fds, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


class Floor:
    """A floor's processes and sockets; subclasses fill ``_stack`` on entering."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self) -> None:
        raise NotImplementedError

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        self._stack.enter_context(ours)
        self._stack.enter_context(theirs)
        return ours, theirs


class RawFanOut(Floor):
    """One unix socket to each of ``ranks`` processes; with one rank the plain echo."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self._ranks = ranks
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()

    def _open(self) -> None:
        self._stack.callback(self._poll.close)
        for _ in range(self._ranks):
            ours, theirs = self._pair()
            self._stack.enter_context(child("echo", theirs.fileno(), pass_fds=(theirs.fileno(),)))
            theirs.close()
            ours.setblocking(True)
            self._sockets[ours.fileno()] = ours
            self._poll.register(ours.fileno(), select.EPOLLIN)
        self.call()

    def call(self) -> None:
        """Send one message to every rank and wait for all answers."""
        for sock in self._sockets.values():
            sock.sendall(MESSAGE)
        missing = self._ranks
        while missing:
            for fd, _ in self._poll.poll(TIMEOUT_S):
                self._sockets[fd].recv(MESSAGE_BYTES, socket.MSG_WAITALL)
                missing -= 1

    def call_one(self) -> None:
        """Send one message to the first rank and wait for its answer; no poll in between."""
        sock = next(iter(self._sockets.values()))
        sock.sendall(MESSAGE)
        sock.recv(MESSAGE_BYTES, socket.MSG_WAITALL)

    def pipelined(self, count: int) -> None:
        """Send ``count`` messages to the first rank, at most `WINDOW` unanswered; wait for all answers."""
        sock = next(iter(self._sockets.values()))
        for first in range(0, count, WINDOW):
            sent = min(WINDOW, count - first)
            for _ in range(sent):
                sock.sendall(MESSAGE)
            for _ in range(sent):
                sock.recv(MESSAGE_BYTES, socket.MSG_WAITALL)


class Relay(Floor):
    """One unix socket to a relay, which has one to each of ``ranks`` processes and combines their answers."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self._ranks = ranks

    def _open(self) -> None:
        pairs = [self._pair() for _ in range(self._ranks)]
        self._caller, relay_end = self._pair()
        for _, theirs in pairs:
            self._stack.enter_context(child("echo", theirs.fileno(), pass_fds=(theirs.fileno(),)))
        fds = (relay_end.fileno(), *(ours.fileno() for ours, _ in pairs))
        for ours, _ in pairs:
            ours.setblocking(True)
        self._stack.enter_context(child("relay", *fds, pass_fds=fds))
        for sock in (relay_end, *(end for pair in pairs for end in pair)):
            sock.close()
        self._caller.setblocking(True)
        self.call()

    def call(self) -> None:
        """Send one message, which reaches every rank, and wait for the combined answer."""
        self._caller.sendall(MESSAGE)
        self._caller.recv(MESSAGE_BYTES * self._ranks, socket.MSG_WAITALL)


class Memcpy:
    """One copy of ``size_bytes`` between two buffers whose pages exist already."""

    def __init__(self, size_bytes: int) -> None:
        self._source = np.ones(size_bytes, np.uint8)
        self._target = np.zeros(size_bytes, np.uint8)

    def copy(self) -> None:
        """Copy once."""
        np.copyto(self._target, self._source)


class Forks(Floor):
    """A process that has imported torch and forks idle children on demand."""

    def _open(self) -> None:
        self._sock, theirs = self._pair()
        self._stack.enter_context(child("forks", theirs.fileno(), pass_fds=(theirs.fileno(),)))
        theirs.close()
        self._sock.recv(8, socket.MSG_WAITALL)

    @contextmanager
    def fork(self, count: int) -> Iterator[tuple[float, list[int]]]:
        """Fork ``count`` children, ended on leaving; yields the seconds until all answered and their pids."""
        started = time.perf_counter()
        self._sock.sendall(count.to_bytes(2, "little"))
        pids = [int.from_bytes(self._sock.recv(8, socket.MSG_WAITALL), "little") for _ in range(count)]
        took = time.perf_counter() - started
        try:
            yield took, pids
        finally:
            self._sock.sendall(b"\1\0")
            self._sock.recv(8, socket.MSG_WAITALL)


def import_torch() -> float:
    """Return the seconds from starting a fresh interpreter until it has imported torch."""
    with child("torch_import", time.monotonic()) as process:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    return float(out)


def flood(ranks: int, lines: int) -> tuple[float, int]:
    """Let ``ranks`` running processes print ``lines`` lines each into pipes, and read them all.

    Returns: seconds from the word go to the last byte, and the number of lines read.
    """
    with ExitStack() as stack:
        go_read, go_write = os.pipe()
        poll = stack.enter_context(select.epoll())
        processes = [stack.enter_context(child("flood", go_read, lines, pass_fds=(go_read,))) for _ in range(ranks)]
        os.close(go_read)
        pipes = [process.stdout.fileno() for process in processes if process.stdout is not None]
        for pipe in pipes:
            os.read(pipe, 64)
            poll.register(pipe, select.EPOLLIN)
        started, seen, open_pipes = time.perf_counter(), 0, set(pipes)
        os.close(go_write)
        while open_pipes:
            for fd, _ in poll.poll(TIMEOUT_S):
                if block := os.read(fd, 1 << 16):
                    seen += block.count(b"\n")
                else:
                    poll.unregister(fd)
                    open_pipes.discard(fd)
        return time.perf_counter() - started, seen
