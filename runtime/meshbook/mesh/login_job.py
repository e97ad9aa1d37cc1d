"""Jobs whose hosts have names to log in by: the ground of `meshbook.job.SSHJob`, and of jobs that programs write."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from meshbook.errors import UsageError
from meshbook.launchers.workers import WorkersLauncher
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.job_trait import JobTrait
from meshbook.mesh.jobs import HostsJob, checked_names, start_all
from meshbook.system.processes import is_same_process, start_time


class StartedWorker(NamedTuple):
    """A process here, and the address at which its worker listens: what `LoginJob._start_host` gives.

    `meshbook.job` calls it ProcessState, as Monarch does.
    """

    pid: int
    channel: str


class NamedHostsJob(HostsJob):
    """A job of hosts that `add_mesh` names."""

    def __init__(self) -> None:
        super().__init__()
        self._meshes: dict[str, tuple[str, ...]] = {}

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Have ``hosts``, as they are called for a login, under a name. Raises: UsageError once the job was applied."""
        self._check_changeable(name)
        checked_names([name])
        self._meshes[name] = (hosts,) if isinstance(hosts, str) else tuple(hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, type(self)) and self.active and spec._spec == self._spec

    @property
    def _spec(self) -> object:
        """What two jobs have in common whose hosts are the same."""
        return self._meshes

    def _named(self) -> dict[str, tuple[str, ...]]:
        """The hosts by name. Raises: UsageError where there are none."""
        if not self._meshes:
            raise UsageError('the job has no hosts: add_mesh("trainers", ["nodeA", "nodeB"]).')
        return self._meshes


class LoginJob(NamedHostsJob):
    """Hosts by a way of one's own to run a command there. A subclass says which:

    class OursJob(LoginJob):
        def _start_host(self, host):
            worker = f'run_worker_loop_forever(address="tcp://*:4444", ca="trust_all_connections")'
            started = subprocess.Popen(["our-login", host, "python", "-c", f"from meshbook.actor import *; {worker}"])
            return ProcessState(started.pid, f"tcp://{host}:4444")

    The workers end when the job does.
    """

    @abstractmethod
    def _start_host(self, host: str) -> StartedWorker:
        """Have a worker (`meshbook.actor.run_worker_loop_forever`) run on a host; it may come up later."""

    def _start(self) -> dict[str, HostMesh]:
        begun: list[tuple[int, int]] = []
        wanted = {}
        try:
            for name, hosts in self._named().items():
                states = [self._start_host(host) for host in hosts]
                begun += [(state.pid, start_time(state.pid) or 0) for state in states]
                wanted[name] = (len(hosts), WorkersLauncher([state.channel for state in states]))
            return start_all(wanted)
        except BaseException:
            for pid, started in begun:
                if is_same_process(pid, started):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                        os.kill(pid, signal.SIGTERM)
            raise
