"""Host agents on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from meshbook.launchers.base import LaunchedHost
from meshbook.system.exits import CRASH_REPORT_LINES, last_words, log_tail
from meshbook.system.process_ends import end_process
from meshbook.system.processes import MEMORY_VARIABLE, describe_exit, is_same_process, start_time
from meshbook.wire.ticket import Ticket, encode_ticket


class LocalLauncher:
    """Agents as child processes on this machine, each in a session of its own so that Ctrl-C passes them by.

    separate_hosts: every agent acts as if it were alone on its machine: payloads go over the sockets, over TCP.
    """

    name = "local"
    shares_environment = True

    def __init__(self, *, separate_hosts: bool = False) -> None:
        self.transport = "tcp" if separate_hosts else "unix"
        self._shares_memory = not separate_hosts

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start the agents; each reads its ticket from stdin and watches that pipe for our end."""
        hosts: list[LaunchedHost] = []
        for ticket in tickets:
            log = Path(ticket.log_dir) / f"agent-{ticket.host_id}.log"
            hosts.append(_start(msgspec.structs.replace(ticket, shares_memory=self._shares_memory), log))
        return hosts


def _start(ticket: Ticket, log: Path) -> LocalHost:
    _reap()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshbook.agent.host_agent"],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env=None if ticket.shares_memory else {**os.environ, MEMORY_VARIABLE: ticket.host_id},
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and `LocalHost.failure` says why
        process.stdin.write(encode_ticket(ticket) + b"\n")
        process.stdin.flush()
    return LocalHost(process, process.stdin, log)


class LocalHost:
    """A host agent that is our child."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: IO[bytes], log: Path) -> None:
        self._process, self._lifeline, self._log = process, lifeline, log
        self.pid, self.started = process.pid, start_time(process.pid) or 0

    def failure(self) -> str | None:
        """Exit status in words, with the end of the agent's own log; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        said = last_words(log_tail(self._log, CRASH_REPORT_LINES), 3).splitlines()
        return ": ".join([f"the host agent ended ({describe_exit(status)})", *(line.strip() for line in said)])

    def close(self, timeout_s: float) -> None:
        """Close the lifeline, wait, then kill; idempotent."""
        self._lifeline.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def release(self) -> None:
        """Close the lifeline. It stays our child until it ends, and is reaped when another one is started."""
        self._lifeline.close()
        _released.append(self._process)


class FoundHost:
    """A host agent that another controller has started, on this machine or elsewhere."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self.started = pid, started

    def failure(self) -> str | None:
        """That it has ended; None while it runs, and where that cannot be seen."""
        gone = self.pid and not is_same_process(self.pid, self.started)
        return f"the host agent (process {self.pid}) has ended" if gone else None

    def close(self, timeout_s: float) -> None:
        """Wait for its end, then kill exactly the process that was recorded."""
        if self.pid:
            end_process(self.pid, self.started, timeout_s)
        _reap()

    def release(self) -> None:
        pass  # it has nothing of ours


_released: list[subprocess.Popen[bytes]] = []


def _reap() -> None:
    _released[:] = [process for process in _released if process.poll() is None]
