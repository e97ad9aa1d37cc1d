"""The host agent's side of a template process: start it, ask it for workers, notice its end."""

from __future__ import annotations

import array
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshbook import template as protocol
from meshbook.event_loop import EventLoop

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # read at import: any other value starts threads that do not survive a fork
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else torch.cuda.is_available() calls cuInit and poisons every fork
    "TORCH_GLOO_LAZY_INIT": "1",
}


class _Fork(NamedTuple):
    descriptors: Sequence[Sequence[int]]
    on_forked: Callable[[list[int]], None]
    on_failed: Callable[[str], None]
    pids: list[int]


class HostedTemplate:
    """A template process. Fork requests wait until it is ready; they fail when it ends."""

    def __init__(self, loop: EventLoop, sock: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.problem = ""
        """Why this template must not be forked; then its modules are imported by each worker instead."""
        self.failure = ""
        """Why it is unusable: it ended, or an import failed."""
        self.pid = process.pid if process else 0
        self._process = process
        self._loop = loop
        self._sock = sock
        self._watch = loop.watch(sock.fileno(), self._on_readable)
        self._ready = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._forks: deque[_Fork] = deque()

    @classmethod
    def start(cls, loop: EventLoop) -> HostedTemplate:
        """Start one with the standard modules, in an interpreter of its own."""
        ours, theirs = _socket_pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "meshbook.template", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env={**os.environ, **_ENVIRONMENT},
            )
        return cls(loop, ours, process)

    def fork_template(self, preload: tuple[str, ...], sys_path: tuple[str, ...]) -> HostedTemplate:
        """Fork a template that also imports ``preload``; usable at once, requests wait until it is ready."""
        ours, theirs = _socket_pair()

        def ask() -> None:
            with theirs:
                if self.failure:
                    return
                self._sock.send(protocol.encode(protocol.ForkTemplate(os.getpid(), preload, sys_path)))
                self._send_descriptors([theirs.fileno()])

        self.when_ready(ask)
        return HostedTemplate(self._loop, ours, None)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the template is ready or has failed: look at `problem` and `failure`."""
        if self._ready or self.failure:
            callback()
        else:
            self._waiting.append(callback)

    def fork_workers(
        self,
        descriptors: Sequence[Sequence[int]],
        on_forked: Callable[[list[int]], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Fork one worker per entry, each with its call socket, urgent socket, stdout and stderr.

        The descriptors are the caller's to close, once either callback has run. Call when ready only.
        """
        if self.failure:
            on_failed(self.failure)
            return
        self._forks.append(_Fork(descriptors, on_forked, on_failed, []))
        try:
            self._sock.send(protocol.encode(protocol.ForkWorkers(os.getpid(), len(descriptors))))
            for each in descriptors:
                self._send_descriptors(each)
        except OSError:
            self._on_end()

    def close(self) -> None:
        """End the process; idempotent."""
        self._loop.forget(self._watch)
        self._sock.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _send_descriptors(self, descriptors: Sequence[int]) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._sock.sendmsg([b"fds"], [rights])

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._on_end()
            return
        answer = protocol.decode_answer(data)
        if isinstance(answer, protocol.TemplateReady):
            self.problem, self.failure, self.pid = answer.problem, answer.failure, answer.pid
            self._ready = True
            self._serve_waiting()
            return
        fork = self._forks[0]
        fork.pids.append(answer.pid)
        if len(fork.pids) == len(fork.descriptors):
            self._forks.popleft()
            fork.on_forked(fork.pids)

    def _on_end(self) -> None:
        status = self._process.wait() if self._process else None
        self.failure = self.failure or f"the template process ended{'' if status is None else f' (status {status})'}"
        self._loop.forget(self._watch)
        self._serve_waiting()
        while self._forks:
            self._forks.popleft().on_failed(self.failure)

    def _serve_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
