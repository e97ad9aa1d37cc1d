"""Host agents on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

import msgspec

from meshbook.errors import UsageError
from meshbook.launchers.agent_start import AGENT, LASTING, exec_agent, open_log
from meshbook.launchers.base import LaunchedHost, Launcher
from meshbook.launchers.registry import Asked
from meshbook.launchers.templates import UNSEEN, HostFork, HostTemplate
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.exits import CRASH_REPORT_LINES, end_process, last_words, log_tail
from meshbook.system.processes import MEMORY_VARIABLE, describe_exit, is_same_process, start_time
from meshbook.wire.ticket import Ticket, encode_ticket

REAP_S = 5.0
"""The time for the last threads of an agent whose main thread has ended."""


class LocalLauncher(Launcher):
    """Agents as child processes on this machine, each in a session of its own so that Ctrl-C passes them by.

    separate_hosts: every agent acts as if it were alone on its machine: payloads go over the sockets, over TCP.
    torch: several hosts are forked from a template that has imported it; else each imports it once ranks ask for it.
    """

    name = "local"
    transport = "unix"
    shares_environment = True

    def __init__(self, *, separate_hosts: bool = False, torch: bool = True) -> None:
        if separate_hosts:
            self.transport = "tcp"
        self._shares_memory = not separate_hosts
        self._torch = torch

    @property
    def saved(self) -> SavedLauncher:
        return SavedLauncher(self.name, separate=not self._shares_memory)

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start the agents; each reads its ticket from stdin and watches that pipe for our end.

        Several are forked from one template, and wait for its imports; so is another one while that template runs.
        """
        hosts: list[LaunchedHost] = []
        with _templates.launching:
            template = _templates.find(tickets, self._torch) if tickets else None
            for ticket in tickets:
                ticket = msgspec.structs.replace(ticket, shares_memory=self._shares_memory)
                hosts.append(_start(ticket, Path(ticket.log_dir) / f"agent-{ticket.host_id}.log", template))
        return hosts


class _Templates:
    """The template from which this process forks its hosts."""

    def __init__(self) -> None:
        self.launching = threading.Lock()
        self.last: HostTemplate | None = None

    def find(self, tickets: list[Ticket], torch: bool) -> HostTemplate | None:
        """Return the template to fork hosts from; None where each is better started by itself."""
        with contextlib.suppress(OSError):  # who starts the agents one by one says what is wrong
            if self.last is not None and self.last.fits:
                return self.last
            if (path := os.environ.get(LASTING)) is not None:
                self.last = HostTemplate.connect(path)
            elif torch and len(tickets) > 1:
                self.last = HostTemplate.start(AGENT, Path(tickets[0].log_dir) / "template.log")
            else:
                return None
            return self.last
        return None


_templates = _Templates()


def _start(ticket: Ticket, log: Path, template: HostTemplate | None) -> LocalHost:
    reap_released()
    environment = {} if ticket.shares_memory else {MEMORY_VARIABLE: ticket.host_id}
    process, stdin = (template and _fork(template, log, environment)) or _exec(log, environment)
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and `LocalHost.failure` says why
        stdin.write(encode_ticket(ticket) + b"\n")
        stdin.flush()
    return LocalHost(process, stdin, log)


def _fork(template: HostTemplate, log: Path, environment: dict[str, str]) -> tuple[HostFork, IO[bytes]] | None:
    """Fork an agent; None if the template cannot. Raises: OSError if the system has no descriptors for it."""
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    try:
        with open_log(log) as output:
            return template.fork(theirs, output.fileno(), environment), os.fdopen(ours, "wb")
    except BaseException as error:
        os.close(ours)
        if not isinstance(error, OSError):
            raise
        return None
    finally:
        os.close(theirs)


def _exec(log: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    process = exec_agent(log, environment)
    assert process.stdin is not None
    return process, process.stdin


def parse(asked: Asked) -> LocalLauncher:
    if asked.python is not None:
        raise UsageError("--python is for hosts elsewhere; ranks here run on the notebook's own.")
    return LocalLauncher(torch=asked.torch)


def find(id: str, saved: SavedHost, logs: Path) -> tuple[LaunchedHost, Launcher]:
    return FoundHost(saved.pid, saved.started), LocalLauncher(separate_hosts=saved.launcher.separate)


class LocalHost(LaunchedHost):
    """A host agent that is our child, or our template's."""

    def __init__(self, process: subprocess.Popen[bytes] | HostFork, lifeline: IO[bytes], log: Path) -> None:
        self._process, self._lifeline, self._log = process, lifeline, log
        self.pid, self.started = process.pid, start_time(process.pid) or 0

    def failure(self) -> str | None:
        """Return the exit status in words, with the end of the agent's own log; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        said = last_words(log_tail(self._log, CRASH_REPORT_LINES), 3).splitlines()
        is_unknown = status == UNSEEN or (status == 0 and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN)
        how = "" if is_unknown else f" ({describe_exit(status)})"
        return ": ".join([f"the host agent ended{how}", *(line.strip() for line in said)])

    def close(self, timeout_s: float) -> None:
        """Close the lifeline, wait, then kill; idempotent."""
        self._lifeline.close()
        if self._process.poll() is not None:
            return
        end_process(self.pid, self.started, timeout_s)
        if isinstance(self._process, subprocess.Popen):  # its main thread may end before the others
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)
        else:
            self._process.poll()

    def release(self) -> None:
        """Close the lifeline. It stays our child until it ends, and is reaped when another one is started."""
        self._lifeline.close()
        if isinstance(self._process, HostFork):
            self._process.disown()
        else:
            release_child(self._process)


class FoundHost(LaunchedHost):
    """A host agent that another controller has started, on this machine or elsewhere."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self.started = pid, started

    def failure(self) -> str | None:
        """Return that the agent has ended; None while it runs, and where that cannot be seen."""
        gone = self.pid and not is_same_process(self.pid, self.started)
        return f"the host agent (process {self.pid}) has ended" if gone else None

    def close(self, timeout_s: float) -> None:
        """Wait for its end, then kill exactly the process that was recorded."""
        if self.pid:
            end_process(self.pid, self.started, timeout_s)
        reap_released()

    def release(self) -> None:
        pass  # it has nothing of ours


_released: list[int] = []
"""The children of ours that were left to themselves, by pid."""


def release_child(process: subprocess.Popen[bytes]) -> None:
    """Let a child live on without us. It stays ours until it ends, and is reaped when another host is started."""
    if process.poll() is None:
        process.returncode = 0  # else its destructor complains of it when we end first
        _released.append(process.pid)


def reap_released() -> None:
    """Reap the children that were left to themselves and have ended."""
    _released[:] = [pid for pid in _released if _runs(pid)]


def _runs(pid: int) -> bool:
    """Whether a child of ours runs; one that has ended is reaped."""
    with contextlib.suppress(ChildProcessError):  # in a fork of this process it is none of ours
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False
