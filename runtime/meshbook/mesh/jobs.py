"""Monarch's jobs: hosts by name, started together, each name a HostMesh.

    job = SSHJob(ssh_args=("-p", "2222"))
    job.add_mesh("trainers", ["nodeA", "nodeB"])
    procs = job.state().trainers.spawn_procs({"gpus": 8})
    job.kill()

The hosts of a job have the axis ``hosts``, and live until `JobTrait.kill` or the end of the program. A job can be kept
in a file (`dump`, ``state(cached_path=...)``): whoever loads it has its hosts as long as their session lives, in this
program, or in one that has left it by `meshbook.detach`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from meshbook.errors import UsageError
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.driven import start_hosts, this_host
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.job_trait import JobState, JobTrait
from meshbook.mesh.kept_hosts import KeptHosts, keep

HOSTS = "hosts"


class HostsJob(JobTrait):
    """A job whose hosts are started here: `_start` does."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[str, HostMesh] | None = None
        self._kept: dict[str, KeptHosts] = {}
        """In a job that was loaded: where its hosts are."""

    @property
    def _running(self) -> JobTrait | None:
        running = super()._running
        if running is self and self._hosts is None and not all(kept.live for kept in self._kept.values()):
            self._apply_id = None
            return None
        return running

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            raise UsageError("there is no batch mode: start the script by itself, and have it apply the job.")
        self._hosts = {name: hosts.without_waiting() for name, hosts in self._start().items()}

    def _state(self) -> JobState:
        hosts = self._hosts
        if hosts is None:
            hosts = self._hosts = {name: kept.find().without_waiting() for name, kept in self._kept.items()}
        for each in hosts.values():
            each.replace_lost()
        return JobState(hosts)

    def _kill(self) -> None:
        if self._hosts is None:
            self._hosts = {name: kept.find() for name, kept in self._kept.items() if kept.live}
        hosts, self._hosts, self._kept = self._hosts, None, {}
        for each in hosts.values():
            self._end(each)

    def _check_changeable(self, name: str) -> None:
        """Raises: UsageError once the job was applied."""
        if self.active:
            raise UsageError(f'the job has its hosts already; kill() it, then add "{name}".')

    @abstractmethod
    def _start(self) -> dict[str, HostMesh]:
        """Start the hosts. Raises: SpawnError; then none is left."""

    def _end(self, hosts: HostMesh) -> None:
        hosts.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        kept = self._kept if self._hosts is None else {name: keep(hosts) for name, hosts in self._hosts.items()}
        return {**self.__dict__, "_hosts": None, "_kept": kept}


class LocalJob(HostsJob):
    """This machine under one or several names: a stand-in for a job on others."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = checked_names(hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, LocalJob) and spec._names == self._names

    def _start(self) -> dict[str, HostMesh]:
        return {name: this_host() for name in self._names}

    def _end(self, hosts: HostMesh) -> None:
        pass  # others have meshes there too

    @property
    def process(self) -> object:
        """Refused: there is no batch mode. Raises: UsageError."""
        raise UsageError("there is no batch mode, so a local job has no process of its own.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hosts": None, "_apply_id": None}  # this machine is another wherever it is loaded


class ProcessJob(HostsJob):
    """Hosts that are agents on this machine, each as if it were alone there; to try what several hosts do."""

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        """meshes: how many hosts by name. env: more of an environment for what is spawned there."""
        super().__init__()
        self._meshes, self._env = checked_counts(meshes), dict(env or {})

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, ProcessJob) and self.active and (spec._meshes, spec._env) == (self._meshes, self._env)

    def _start(self) -> dict[str, HostMesh]:
        wanted = {name: (count, LocalLauncher(separate_hosts=True)) for name, count in self._meshes.items()}
        return {name: hosts.with_environment(self._env) for name, hosts in start_all(wanted).items()}


def start_all(wanted: Mapping[str, tuple[int, Launcher]]) -> dict[str, HostMesh]:
    """Start hosts, so many by each launcher. Raises: SpawnError; then none is left."""
    started: dict[str, HostMesh] = {}
    try:
        for name, (count, launcher) in wanted.items():
            started[name] = start_hosts({HOSTS: count}, launcher)
        for hosts in started.values():
            hosts.await_ready()
    except BaseException:
        for hosts in started.values():
            hosts.shutdown()
        raise
    return started


def checked_counts(meshes: Mapping[str, int]) -> dict[str, int]:
    """Raises: UsageError."""
    checked_names(meshes)
    for name, count in meshes.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f'hosts are counted from 1, as in {{"{name}": 2}}, not {count!r}.')
    return dict(meshes)


def checked_names(names: Sequence[str] | Mapping[str, int]) -> tuple[str, ...]:
    """Raises: UsageError."""
    for name in (found := (names,) if isinstance(names, str) else tuple(names)):
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise UsageError(f"hosts are named by an identifier, as in state.trainers, not {name!r}.")
    if not found:
        raise UsageError("name the hosts of the job.")
    return found
