"""Processes that drive meshes, to be killed, and to come after one another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshbook
from meshbook.sessions.folder import living_owner, read_state
from meshbook.system.user_folders import runtime_base


class Driver:
    """One process that runs a script of a test; the script speaks by ``say`` and listens by ``wait``."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.process = psutil.Process(pid)
        self._in, self._out = stdin, stdout
        self._rest = b""
        self.heard: list[str] = []

    def expect(self, start: str, timeout_s: float = 120.0) -> str:
        """The rest of the next line that begins with ``start``; other lines are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.heard.append(line.decode())
                if self.heard[-1].startswith(start):
                    return self.heard[-1][len(start) :].strip()
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._out, 1 << 16) if ready else b""
            assert data, f"no line {start!r}; it said {self.heard[-20:]} {self._rest!r}"
            self._rest += data

    def expect_json(self, start: str, timeout_s: float = 60.0) -> Any:
        return json.loads(self.expect(start, timeout_s))

    def tell(self, line: str = "") -> None:
        os.write(self._in, f"{line}\n".encode())

    def family(self) -> list[psutil.Process]:
        """Its agents, templates and workers. Its agents may be forks of `lasting_template`."""
        return list({*self.process.children(recursive=True), *self.agents()})

    def agents(self) -> set[psutil.Process]:
        """Return its agents and the processes below them."""
        found = set()
        for folder in runtime_base().iterdir():
            if living_owner(folder) == self.pid and (state := read_state(folder)) is not None:
                for agent in (psutil.Process(host.pid) for host in state.hosts.values() if host.runs):
                    found |= {agent, *agent.children(recursive=True)}
        return found

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self, timeout_s: float = 30.0) -> None:
        """Wait for its end."""
        psutil.wait_procs([self.process], timeout=timeout_s)
        assert not self.process.is_running(), self.heard

    def close(self) -> None:
        if self.process.is_running():
            self.process.send_signal(signal.SIGKILL)
            self.wait()
        for fd in (self._in, self._out):
            os.close(fd)


class Zygote:
    """Starts drivers in no time."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.drivers: list[Driver] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("zygote.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def start(self, code: str) -> Driver:
        """Run ``code`` in a new process."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        socket.send_fds(self._requests, [code.encode()], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        self.drivers.append(Driver(int(self._requests.recv(64)), ours_in, ours_out))
        return self.drivers[-1]

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()
        self._requests.close()
        self._process.wait(30)


@contextlib.contextmanager
def alone() -> Iterator[Zygote]:
    """Drivers, and a place for sessions where there are none but ours; those that wait there at the end are ended."""
    with tempfile.TemporaryDirectory(prefix="mb") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("MESHBOOK_LEASE_S", "60")
        zygote = Zygote()
        yield zygote
        zygote.close()
        for session in meshbook.sessions():
            with contextlib.suppress(meshbook.errors.AttachError):
                meshbook.attach(session)
        meshbook.shutdown()
