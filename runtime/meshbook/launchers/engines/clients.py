"""Processes beside us that start agents elsewhere and speak for them: clients like srun and mpirun, and our drivers.

A client is our child, or was that of the controller before us, which it outlives: all that is known of it then is its
pid and its log. Each engine has a `ClientLog` that reads its lines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from typing_extensions import Self

from meshbook.errors import SpawnError
from meshbook.launchers.agent_start import open_log, with_words
from meshbook.launchers.base import LaunchedHost
from meshbook.launchers.engines.driver import MARK
from meshbook.launchers.local import reap_released, release_child
from meshbook.sessions.folder import SavedLauncher
from meshbook.system.exits import end_process
from meshbook.system.processes import describe_exit, is_same_process, start_time

END_S = 5.0
"""The time that a client has to end when it is told to."""
ASK_S = 5.0
"""The time within which a driver has to answer a request."""
LOOK_S = 0.02
"""The pause between two looks while a host ends."""

ON, ENDED = "meshbook: on ", "meshbook: ended "
"""Lines that our scripts write: the name of the agent's machine, and the agent's exit code."""


def wait_for_end(has_ended: Callable[[], object], timeout_s: float) -> None:
    """Wait until it has ended, at most ``timeout_s``, where looking again is the only way to know."""
    deadline = time.monotonic() + timeout_s
    while not has_ended() and time.monotonic() < deadline:
        time.sleep(LOOK_S)


class ClientLog(ABC):
    """The content of a client's log."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the facts that the log tells so far."""
        found = cls()
        for line in filter(None, map(str.strip, text.splitlines())):
            found.add(line)
        return found

    @abstractmethod
    def add(self, line: str) -> None:
        """Note the facts of a line, which is stripped and not empty."""


@dataclass
class TaskLog(ClientLog):
    """The log of a client whose tasks are agents. nodes: the names of their machines, by task."""

    nodes: dict[int, str] = field(default_factory=dict)
    said: dict[int | None, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Lines by the task that wrote them; under None those of the client."""

    label: ClassVar[re.Pattern[str]]
    """The beginning of a task's line, with the task's number and the line as its groups."""
    hints: ClassVar[tuple[tuple[str, str], ...]]

    def add(self, line: str) -> None:
        labelled = self.label.match(line)
        task, line = (int(labelled[1]), labelled[2].strip()) if labelled else (None, line)
        if task is not None and line.startswith(ON):
            self.nodes[task] = line.removeprefix(ON)
        else:
            self.add_said(task, line)

    @abstractmethod
    def add_said(self, task: int | None, line: str) -> None:
        """Note the facts of a line of a task; None: of the client."""

    def with_words(self, what: str, task: int | None) -> str:
        """Add the last lines of a task, or of the client, and advice."""
        return with_words(what, self.said.get(task, ()), self.hints)


Log = TypeVar("Log", bound=ClientLog)


class Client(Generic[Log]):
    """A process that starts agents. log: the file it writes. process: where it is our child, whose stdin is a pipe."""

    log_type: type[Log]

    def __init__(self, log: Path, pid: int, started: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.log, self.pid, self.started, self._process = log, pid, started, process
        self._read_bytes, self._said = -1, self.log_type()
        self.hosts: dict[str, str] = {}
        """The jobs of the hosts that it has for us, by their ids; with the last host it ends."""
        _by_log[type(self), log] = self

    @classmethod
    def start(cls, log: Path, command: Sequence[str], pass_fds: Sequence[int] = ()) -> Self:
        """Start the process. Raises: OSError."""
        reap_released()
        with open_log(log) as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return cls(log, process.pid, start_time(process.pid) or 0, process)

    @classmethod
    def find(cls, log: Path, pid: int, started: int) -> Self:
        """Return the client that has this log; hosts of a former controller share theirs."""
        found = _by_log.get((cls, log))
        return found if isinstance(found, cls) else cls(log, pid, started)

    @property
    def is_child(self) -> bool:
        """Whether this process has started it, and has not released it."""
        return self._process is not None

    @property
    def said(self) -> Log:
        """The content of its log, read again whenever there is more of it."""
        with contextlib.suppress(OSError):
            if (size := self.log.stat().st_size) != self._read_bytes:
                self._read_bytes, self._said = size, self.log_type.read(self.log.read_text(errors="replace"))
        return self._said

    def poll(self) -> int | None:
        """Return its exit status, as in `subprocess`, or 0 where it is no child of ours; None while it runs."""
        if self._process is not None:
            return self._process.poll()
        return None if is_same_process(self.pid, self.started) else 0

    def write(self, data: bytes) -> None:
        """Write to its stdin."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its log says why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def leave(self, host_id: str, timeout_s: float) -> None:
        """End a host, or note its end; with the last one all that was started here ends, within the time."""
        self.hosts.pop(host_id, None)
        if not self.hosts:
            self.end(timeout_s)

    def end(self, timeout_s: float) -> None:
        """Wait until it ends, as it does with its agents, then end it; idempotent."""
        self.close_stdin()
        if self._process is None:
            end_process(self.pid, self.started, timeout_s)
            return
        for deadline_s, end in ((timeout_s, self._process.terminate), (END_S, self._process.kill)):
            try:
                self._process.wait(deadline_s)
                return
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def release(self) -> None:
        """Let it live on: by the end of its stdin it sees that its controller has gone."""
        self.close_stdin()
        if self._process is not None:
            release_child(self._process)
            self._process = None  # a controller that attaches next, in this process too, finds it by its pid

    def close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


_by_log: weakref.WeakValueDictionary[tuple[type, Path], Client[Any]] = weakref.WeakValueDictionary()


AnyClient = TypeVar("AnyClient", bound=Client[Any])


class ClientHost(LaunchedHost, Generic[AnyClient]):
    """An agent that a client has started. task: its number among the client's."""

    def __init__(self, client: AnyClient, id: str, *, job: str = "", task: int = 0) -> None:
        self.client, self.id, self.task, self._job = client, id, task, job
        self.pid, self.started = client.pid, client.started
        client.hosts[id] = job

    def save(self, saved: SavedLauncher) -> SavedLauncher:
        return msgspec.structs.replace(saved, job=self.client.log.name, step=self._job, task=self.task)

    def close(self, timeout_s: float) -> None:
        """Leave the client, which ends with its last host; the agent was told before, if it could be reached."""
        self.client.leave(self.id, timeout_s)

    def release(self) -> None:
        self.client.release()


# ---- drivers of ours (`meshbook.launchers.engines.driver`) -----------------------------------------------------------


@dataclass
class DriverLog(ClientLog):
    """The log of a driver; most of its events are kept by the id of a host, ``""`` for all hosts."""

    job: str = ""
    socket: str = ""
    """The path at which the driver listens."""
    node: dict[str, str] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    """Lines of others."""

    engine: ClassVar[str]
    asked: ClassVar[str]
    """The text for a host of which nothing is known yet."""
    hints: ClassVar[tuple[tuple[str, str], ...]]
    outlived: ClassVar[bool] = False
    """Whether hosts that run live on without the driver."""

    def add(self, line: str) -> None:
        if not line.startswith(MARK):
            self.said.append(line)
            return
        with contextlib.suppress(ValueError):  # half a line: the rest comes yet
            event = json.loads(line.removeprefix(MARK))
            host = event.pop("host", "")
            for kind, value in event.items():
                if isinstance(by_host := getattr(self, kind), dict):
                    by_host[host] = value
                else:
                    setattr(self, kind, value)

    def waits_for(self, host: str) -> str:
        """Return the obstacle that a host waits for; empty once its agent was started."""
        return "" if host in self.node else self.waits.get(host) or self.waits.get("") or self.asked

    def end_of(self, host: str) -> str:
        """Return why a host has ended, in the driver's words; empty while it has not said so."""
        return self.ended.get(host) or self.ended.get("") or ""

    def why_ended(self, host: str, status: int | None) -> str | None:
        """Return why there is no agent any more, or will be none; None while there may be.

        status: the exit status of the driver, None while it runs.
        """
        if said := self.end_of(host):
            return with_words(said, hints=self.hints)
        if status is None or (self.outlived and host in self.node):
            return None
        words = self.said if status > 0 else ()  # else they are about something else
        return with_words(f"the driver of {self.engine} has ended ({describe_exit(status)})", words)


AnyDriverLog = TypeVar("AnyDriverLog", bound=DriverLog)


class DriverClient(Client[AnyDriverLog]):
    """A driver."""

    package: ClassVar[str]
    """The package of the engine's client, which the driver imports."""
    missing: ClassVar[str]
    """The message where that is not installed."""
    module: ClassVar[str]

    @classmethod
    def start_driver(cls, log: Path, wanted: Mapping[str, object]) -> Self:
        """Start a driver, with its task. Raises: OSError, SpawnError."""
        if importlib.util.find_spec(cls.package) is None:
            raise SpawnError(cls.missing)
        client = cls.start(log, [sys.executable, "-m", cls.module])
        client.write(json.dumps(wanted).encode() + b"\n")
        return client

    def ask(self, request: dict[str, object]) -> bool:
        """Send the driver a request; returns whether it has answered."""
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(ASK_S)
                sock.connect(self.said.socket)
                sock.sendall(json.dumps(request).encode() + b"\n")
                return bool(sock.recv(1))
        except OSError:
            return False

    def leave(self, host_id: str, timeout_s: float) -> None:
        super().leave(host_id, timeout_s)
        if self.hosts:
            wait_for_end(lambda: self.said.end_of(host_id) or self.poll() is not None, timeout_s)
            self.ask({"end": host_id})


AnyDriver = TypeVar("AnyDriver", bound=DriverClient[Any])


class DrivenHost(ClientHost[AnyDriver]):
    """An agent that a driver has started. job: the engine's number, where each host has one."""

    @property
    def job(self) -> str:
        return self._job or str(self.client.said.job)

    def failure(self) -> str | None:
        status = self.client.poll()  # first: when it has ended, the log is whole
        why: str | None = self.client.said.why_ended(self.id, status)
        return why

    def waits_for(self) -> str:
        return "" if self.failure() else self.client.said.waits_for(self.id)
