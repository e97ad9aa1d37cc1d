"""The host agent's side of a template process: start it, ask it for workers, notice its end."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshbook.concurrency.future import Future
from meshbook.launchers.templates import StartedTemplate, exec_template
from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import last_words
from meshbook.system.os_errors import explain
from meshbook.system.processes import describe_exit, kill_session, versions
from meshbook.wire import messages as wire
from meshbook.wire import template_messages as protocol

REAP_S = 0.5  # the agent waits so long for a template that was killed; in uninterruptible sleep it does not end
# how many workers are asked for at a time: their descriptors and the answers fit into the socket, so neither side waits
# to write messages that the other one does not read
_BATCH = 64
_KEPT_LINES = 200
_LAST_LINES = 5


class _ForkRequest(NamedTuple):
    descriptors: Sequence[Sequence[int]]
    on_forked: Callable[[list[int]], None]
    on_failed: Callable[[str], None]
    pids: list[int]


class TemplateOutput:
    """The output of a template and its forks: passed on to our own log, with the last of it kept."""

    def __init__(self, loop: EventLoop, fd: int) -> None:
        self._loop, self._fd = loop, fd
        os.set_blocking(fd, False)
        self._kept = b""
        self._watch = loop.watch(self._fd, self._read)

    def last_words(self) -> str:
        """Return the end of the output, indented, below a colon; empty when there was none."""
        self._read()
        words = last_words(self._kept.decode(errors="backslashreplace"), _LAST_LINES)
        return "; its last words:\n" + "\n".join(f"  {line}" for line in words.splitlines()) if words else ""

    @property
    def last_line(self) -> str:
        """Return the last line of the output; empty when there was none."""
        return last_words(self._kept.decode(errors="backslashreplace"), 1).strip()

    def close(self) -> None:
        if self._watch.active:
            self._loop.forget(self._watch)
            os.close(self._fd)

    def _read(self) -> None:
        while self._watch.active:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            self._kept = b"".join((self._kept + data).splitlines(keepends=True)[-_KEPT_LINES:])
            with contextlib.suppress(OSError):  # a full disk under the log
                os.write(2, data)


def _misfit(version: str) -> str:
    """Return why a template of another interpreter is of no use; empty where it is."""
    return "" if version == versions() else f"it is {version}, this side {versions()}; both sides need the same"


class TemplateProcess:
    """A template process. Fork requests wait until it is ready; they fail when it ends."""

    def __init__(self, loop: EventLoop, sock: socket.socket, voice: TemplateOutput) -> None:
        self.problem = ""  # why this template must not be forked; then its modules are imported by each worker instead
        self.failure = ""  # why it is unusable: it ended, or an import failed
        self.pid = 0  # pid of a child of ours; 0 until it is known, and once it was reaped
        self._loop = loop
        self._sock = sock
        self.voice = voice  # the output of it and of its forks
        self._watch = loop.watch(sock.fileno(), self._on_readable)
        self.ready: Future[None] = Future()  # done when it has finished its imports, or has failed
        self._forks: deque[_ForkRequest] = deque()

    @classmethod
    def start(cls, loop: EventLoop, inherited: StartedTemplate | None = None, *, python: str = "") -> TemplateProcess:
        """Return a template with the standard modules: the one that came with us, or a new one.

        python: the interpreter of a new one; ours by default. Raises: OSError if the system has no process or no
        descriptors for it, or no such interpreter.
        """
        started = exec_template(python) if inherited is None else inherited
        template = cls(loop, started.sock, TemplateOutput(loop, started.output))
        template.pid = started.pid
        return template

    def fork_template(self, preload: tuple[str, ...], sys_path: tuple[bytes, ...]) -> TemplateProcess:
        """Fork a template that also imports ``preload``; usable at once, requests wait until it is ready. Raises:
        OSError if the system has no descriptors for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked = TemplateProcess(self._loop, ours, self.voice)

        def ask() -> None:
            with theirs:
                forked.failure = self.failure
                try:
                    self._sock.send(wire.encode(protocol.ForkTemplate(os.getpid(), preload, sys_path)))
                    self._send_descriptors([theirs.fileno()])
                except OSError as error:
                    forked.failure = forked.failure or f"the template could not be forked: {explain(error)}"

        self.when_ready(ask)
        return forked

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the template is ready or has failed: look at `problem` and `failure`."""
        self.ready.add_done_callback(lambda _: callback())

    def fork_workers(
        self,
        descriptors: Sequence[Sequence[int]],
        on_forked: Callable[[list[int]], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Fork one worker per entry, each with its call, urgent and mail sockets, stdout and stderr. The descriptors
        are the caller's to close, once either callback has run. Call when ready only."""
        if self.failure:
            on_failed(self.failure)
            return
        self._forks.append(_ForkRequest(descriptors, on_forked, on_failed, []))
        if len(self._forks) == 1:
            self._ask_for_more()

    def _ask_for_more(self) -> None:
        """Ask for the next workers of the first request; the earlier ones are there."""
        if not self._forks:
            return
        fork = self._forks[0]
        batch = fork.descriptors[len(fork.pids) : len(fork.pids) + _BATCH]
        try:
            self._sock.send(wire.encode(protocol.ForkWorkers(os.getpid(), len(batch))))
            for each in batch:
                self._send_descriptors(each)
        except OSError as error:
            self._on_end(error)

    def close(self) -> None:
        """End the process; idempotent."""
        self._loop.forget(self._watch)
        self._sock.close()
        self._reap()
        self.voice.close()

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
            self.problem, self.failure = answer.problem, answer.failure or _misfit(answer.version)
            self.ready.set_result(None)
        elif isinstance(answer, protocol.ForkFailed):
            failed = self._forks.popleft()
            self._ask_for_more()
            self._fail(failed, answer.reason)
        elif not self.ready.done():  # it is itself, and imports
            self.pid = answer.pid
        else:
            fork = self._forks[0]
            fork.pids.append(answer.pid)
            if len(fork.pids) == len(fork.descriptors):
                self._forks.popleft()
                self._ask_for_more()  # first: the callback may ask for others
                fork.on_forked(fork.pids)
            elif len(fork.pids) % _BATCH == 0:
                self._ask_for_more()

    def _on_end(self, error: OSError | None = None) -> None:
        """Fail all requests, since the process ended, or does not take messages (``error``)."""
        if not self._watch.active:
            return
        self._loop.forget(self._watch)
        self._sock.close()
        how = self._reap()
        if not self.failure:
            why = how if error is None else f"it does not take requests: {explain(error)}"
            self.failure = f"the template process ended{f' ({why})' if why else ''}{self.voice.last_words()}"
        self.ready.set_result(None)
        while self._forks:
            self._fail(self._forks.popleft(), self.failure)

    def _reap(self) -> str:
        """End the process for certain; return how it ended, in words, where that is known."""
        pid, self.pid = self.pid, 0
        if not pid:
            return ""
        os.kill(pid, signal.SIGKILL)  # no news to one that has ended, and still ours, since nobody else reaps it
        deadline = time.monotonic() + REAP_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                return "it was killed, but waits for a disk"  # `reap_strangers` takes it when it has ended
            time.sleep(0.001)
        return describe_exit(os.waitstatus_to_exitcode(ended[1]))

    def _fail(self, fork: _ForkRequest, reason: str) -> None:
        """Give up a request, and end the workers that it has forked already."""
        for pid in fork.pids:
            kill_session(pid)
        fork.on_failed(reason)
