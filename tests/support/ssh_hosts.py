"""Hosts by a real sshd on loopback, for tests: skipped where there is none, and held to leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.ssh_hosts import LoopbackHosts, NoDaemonError, loopback_hosts


class SshHosts(LoopbackHosts):
    """`benchmarks.ssh_hosts.LoopbackHosts`, and what runs there."""

    def processes(self) -> list[psutil.Process]:
        """What runs for connections: daemons of their own, shells, agents, workers."""
        return psutil.Process(self.daemon.pid).children(recursive=True)

    def await_quiet(self, timeout_s: float = 30.0) -> None:
        """Wait until no connection is left, nor anything that ran for one."""
        _, left = psutil.wait_procs(self.processes(), timeout=timeout_s)
        assert not left, [process.cmdline() for process in left if process.is_running()]


@contextlib.contextmanager
def ssh_hosts() -> Iterator[SshHosts]:
    """Hosts as `benchmarks.ssh_hosts.loopback_hosts` has them; at the end nothing runs there any more."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(loopback_hosts())
        except NoDaemonError as error:
            pytest.skip(str(error))
        hosts = SshHosts(found.folder, found.daemon)
        yield hosts
        hosts.await_quiet()
