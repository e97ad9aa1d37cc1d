"""The template of hosts: it imports the modules of agents and workers once, and is forked into agents.

    launcher ──fork+exec──> template of hosts ──fork──> agent ──fork──> the agent's template of workers
                                     '── stays the agents' parent: they end as they like, it is asked how

Like a template of workers it stays single-threaded, never runs user code, and never touches CUDA. An agent begins as a
copy of it and forks its own template at once, before it knows or opens anything: the ticket, with its secrets, comes by
the agent's own stdin. `meshbook.launchers.templates` speaks to us over a SEQPACKET socket. Where that socket
listens, we serve every launcher that connects, until the process that started us ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import time
import traceback
from typing import NoReturn

from meshbook.launchers import templates
from meshbook.shell.shell import RankShell
from meshbook.system.exits import has_pidfds
from meshbook.system.os_errors import explain
from meshbook.system.processes import begin_as_host, set_title
from meshbook.wire import messages as wire
from meshbook.wire import template_messages as protocol
from meshbook.worker import template

_REQUEST_BYTES = 1 << 18  # the most that an environment takes


def main(agent: str, fd: int) -> NoReturn:
    """Import, say ready, and serve until the launcher closes the socket or ends. agent: the module of agents."""
    comes_with = repr(templates.inherited())  # before a signal is ignored
    begin_as_host()
    set_title("template of hosts")
    sock, started = socket.socket(fileno=fd), time.perf_counter()
    starter = os.pidfd_open(os.getppid()) if has_pidfds() else None
    shell = template.preload((*template.STANDARD_PRELOAD, *template.LATER, *templates.WITH_TORCH, agent))
    gc.freeze()
    took_s = time.perf_counter() - started
    ready = wire.encode(protocol.TemplateReady(os.getpid(), took_s, template.why_not_to_fork(), inherited=comes_with))
    serving = _Launchers(sock, starter, ready)
    while (request := serving.next_fork()) is not None:
        launcher, stdin, log, asked = request
        try:
            if (pid := os.fork()) == 0:
                _be_host(agent, shell, serving, stdin, log, asked)
            serving.hosts[launcher].add(pid)
            serving.say(launcher, wire.encode(protocol.Forked(pid)))
        except OSError as error:
            serving.say_failed(launcher, error)
        os.close(stdin)
        os.close(log)
    os._exit(0)


class _Launchers:
    """The launchers that we serve, with their hosts: one over a socket of its own, or all that connect."""

    def __init__(self, sock: socket.socket, starter: int | None, ready: bytes) -> None:
        """starter: a pidfd of the process that started us. ready: the first message to each launcher."""
        self._starter, self._ready = starter, ready
        self._listener = sock if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else None
        self._launchers: dict[int, socket.socket] = {}
        self.hosts: dict[int, set[int]] = {}  # the hosts that each launcher may ask for, by its descriptor
        self._left: dict[int, int] = {}  # the hosts that we reap since their launcher has gone, by their pidfds
        if self._listener is None:
            self._add(sock)

    def next_fork(self) -> tuple[int, int, int, protocol.ForkHost] | None:
        """Wait for a request for a host; return it with its launcher, stdin and log, or None when there is no launcher
        left. The starter is watched too, since copies of its end of a socket may live on in its forks."""
        while True:
            poll = select.poll()
            own = [] if self._listener is None else [self._listener.fileno()]
            for fd in (*([] if self._starter is None else [self._starter]), *own, *self._launchers, *self._left):
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            if self._starter in ready:
                return None
            for fd in ready:
                if fd in own and self._listener is not None:
                    self._add(self._listener.accept()[0])
                elif fd in self._left:
                    os.waitpid(self._left.pop(fd), 0)
                    os.close(fd)
                elif (request := self._hear(fd)) is not None:
                    return request
            if self._listener is None and not self._launchers:
                return None

    def _add(self, sock: socket.socket) -> None:
        self._launchers[sock.fileno()], self.hosts[sock.fileno()] = sock, set()
        self.say(sock.fileno(), self._ready)

    def _hear(self, fd: int) -> tuple[int, int, int, protocol.ForkHost] | None:
        sock = self._launchers[fd]
        try:
            data = sock.recv(_REQUEST_BYTES)
            if not data:
                self._part_with(fd)
                return None
            request = protocol.decode_host_request(data)
            if isinstance(request, protocol.ReapHost):
                self.hosts[fd].discard(request.pid)
                status = os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1])
                self.say(fd, wire.encode(protocol.HostReaped(status)))
                return None
            return fd, *template.receive_descriptors(sock), request
        except OSError as error:
            self.say_failed(fd, error)
            return None

    def say_failed(self, launcher: int, error: OSError) -> None:
        """Tell a launcher that there is no host."""
        self.say(launcher, wire.encode(protocol.ForkFailed(f"a process could not be forked: {explain(error)}")))

    def say(self, fd: int, answer: bytes) -> None:
        """Send a launcher a message."""
        with contextlib.suppress(OSError):  # it has gone, as the next poll says
            self._launchers[fd].send(answer)

    def _part_with(self, fd: int) -> None:
        """Forget a launcher that has gone, or leaves its hosts to themselves."""
        self._launchers.pop(fd).close()
        for pid in self.hosts.pop(fd) if self._listener is not None else ():
            self._left[os.pidfd_open(pid)] = pid

    def close_in_child(self) -> None:
        """Close our descriptors in a fork of this process."""
        for sock in filter(None, (*self._launchers.values(), self._listener)):
            sock.close()
        for fd in (*self._left, *([] if self._starter is None else [self._starter])):
            os.close(fd)


def _be_host(
    agent: str, shell: RankShell, others: _Launchers, stdin: int, log: int, asked: protocol.ForkHost
) -> NoReturn:
    """Fork the template of workers and become the agent, in a fresh fork."""
    try:
        others.close_in_child()
        os.setsid()
        os.environ.clear()
        os.environb.update(asked.environment)
        os.chdir(asked.folder)
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)
        started = templates.fork_template(lambda sock: template.serve(sock, shell, time.perf_counter()), True)
        gc.enable()
        importlib.import_module(agent).main(started)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    from meshbook.worker import host_template  # the importable module, so that forked code does not live in __main__

    host_template.main(sys.argv[1], int(sys.argv[-1]))
