"""How hosts come to be: a launcher starts host agents, which then dial in. Nothing else knows which launcher it was.

A launcher gets one `Ticket` per host, the agent's only way in. It travels on stdin: command lines and environments can
be read by others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Protocol

import msgspec

from meshbook.deaths import last_words
from meshbook.log_reading import log_tail
from meshbook.process_ends import end_process
from meshbook.processes import MEMORY_VARIABLE, describe_exit, is_same_process, start_time
from meshbook.rank_output import CRASH_REPORT_LINES


class Ticket(msgspec.Struct, frozen=True):
    """What an agent needs to find the controller and to prove who it is."""

    host_id: str
    """Chosen by the controller; the CURVE key pair is accepted for this host only."""
    endpoint: str
    controller_key: str
    public_key: str
    secret_key: str
    log_dir: str
    epoch: int
    """Which controller of the session this is; frames of an older one are ignored."""
    lease_s: float
    """How long the agent and its meshes wait for the next controller once theirs has ended (`meshbook.lease`)."""
    shares_memory: bool = True
    """False makes an agent behave as on another machine, whatever machine it is on."""
    session: str = ""
    """The session's folder, which the last agent removes when there is no controller; empty on other machines."""


encode_ticket = msgspec.json.Encoder().encode
decode_ticket = msgspec.json.Decoder(Ticket).decode


class LaunchedHost(Protocol):
    """A host agent that was started, and may not have dialled in yet."""

    pid: int
    """Of the process here whose end is the agent's end; 0 when there is none."""
    started: int
    """Its start time; 0 when there is none."""

    def failure(self) -> str | None:
        """Why it ended, or None while it runs (or while nobody can tell)."""

    def close(self, timeout_s: float) -> None:
        """Wait for it to end, and end it by force after ``timeout_s``."""

    def release(self) -> None:
        """Let it live on without us."""


class Launcher(Protocol):
    """Starts host agents somewhere."""

    name: str
    transport: str
    """``ipc`` when agents run on the controller's machine, ``tcp`` otherwise."""
    shares_environment: bool
    """Whether working folder, sys.path and environment of the controller make sense on its hosts."""

    def launch(self, tickets: list[Ticket]) -> list[LaunchedHost]:
        """Start one agent per ticket; does not wait for them. Raises: SpawnError."""


class LocalLauncher:
    """Agents as child processes on this machine, each in a session of its own so that Ctrl-C passes them by.

    separate_hosts: every agent acts as if it were alone on its machine: payloads go over the sockets, over TCP.
    """

    name = "local"
    shares_environment = True

    def __init__(self, *, separate_hosts: bool = False) -> None:
        self.transport = "tcp" if separate_hosts else "ipc"
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
            [sys.executable, "-m", "meshbook.host_agent"],
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
