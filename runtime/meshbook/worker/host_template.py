"""The template of hosts: what agents and their workers import, imported once, and forked into agents.

    launcher ──fork+exec──> template of hosts ──fork──> agent ──fork──> the agent's template of workers
                                     '── stays the agents' parent: they end as they like, it is asked how

Like a template of workers it stays single-threaded, never runs user code, and never touches CUDA. An agent begins as a
copy of it and forks its own template at once, before it knows or opens anything: the ticket, with its secrets, comes by
the agent's own stdin. `meshbook.launchers.starting.templates` speaks to us over a SEQPACKET socket.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from meshbook.launchers.starting.templates import WITH_TORCH, fork_template
from meshbook.shell.shell import RankShell
from meshbook.system.os_errors import explain
from meshbook.system.process_ends import has_pidfds
from meshbook.wire import messages as wire
from meshbook.wire.template_messages import (
    ForkFailed,
    HostAnswer,
    HostForked,
    HostReaped,
    ReapHost,
    TemplateReady,
    decode_host_request,
)
from meshbook.worker import template


def main(agent: str, fd: int) -> NoReturn:
    """Import, say ready, and serve until the launcher closes the socket or ends. agent: the module of agents."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock, started = socket.socket(fileno=fd), time.perf_counter()
    launcher = os.pidfd_open(os.getppid()) if has_pidfds() else None
    shell = template.preload((*template.STANDARD_PRELOAD, *template.LATER, *WITH_TORCH, agent))
    gc.freeze()
    sock.send(wire.encode(TemplateReady(os.getpid(), time.perf_counter() - started, template.why_not_to_fork())))
    while data := _next_request(sock, launcher):
        request = decode_host_request(data)
        if isinstance(request, ReapHost):
            answer: HostAnswer = HostReaped(os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1]))
        else:
            try:
                stdin, log = template.receive_descriptors(sock)
                if (pid := os.fork()) == 0:
                    for each in filter(None, (sock.detach(), launcher)):
                        os.close(each)
                    _be_host(agent, shell, stdin, log, request.environment)
                os.close(stdin)
                os.close(log)
                answer = HostForked(pid)
            except OSError as error:
                answer = ForkFailed(f"a process could not be forked: {explain(error)}")
        sock.send(wire.encode(answer))
    os._exit(0)


def _next_request(sock: socket.socket, launcher: int | None) -> bytes:
    """Empty when the launcher has gone: copies of its socket may live on in what it has forked."""
    poll = select.poll()
    for fd in filter(None, (launcher, sock.fileno())):
        poll.register(fd, select.POLLIN)
    return b"" if launcher in [fd for fd, _ in poll.poll()] else sock.recv(1 << 16)


def _be_host(agent: str, shell: RankShell, stdin: int, log: int, environment: dict[str, str]) -> NoReturn:
    """In a fresh fork: fork the template of workers, and be the agent."""
    try:
        os.setsid()
        os.environ.update(environment)
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)
        started = fork_template(lambda sock: template.serve(sock, shell, time.perf_counter()), True)
        gc.enable()
        importlib.import_module(agent).main(started)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    from meshbook.worker import host_template  # the importable module, so that forked code does not live in __main__

    host_template.main(sys.argv[1], int(sys.argv[2]))
