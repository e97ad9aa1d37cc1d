"""Monarch's jobs: hosts by name, started together, each name a HostMesh.

    job = SSHJob(ssh_args=("-p", "2222"))
    job.add_mesh("trainers", ["nodeA", "nodeB"])
    procs = job.state().trainers.spawn_procs({"gpus": 8})
    job.kill()

The hosts of a job have the axis ``hosts``, and live until `JobTrait.kill` or the end of the program. A job is not kept
in a file: another program takes meshes over by `meshbook.attach`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from meshbook.errors import UsageError
from meshbook.formatting import did_you_mean
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.driven import start_hosts, this_host
from meshbook.mesh.host_mesh import HostMesh

HOSTS = "hosts"


class JobState:
    """The hosts of a job: ``state.trainers`` is the HostMesh of that name."""

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, name: str) -> HostMesh:
        if name.startswith("_") or name not in self._hosts:
            names = list(self._hosts) if not name.startswith("_") else []
            raise AttributeError(
                f'the job has no hosts "{name}"; it has {", ".join(names)}.{did_you_mean(name, names)}'
            )
        return self._hosts[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState({', '.join(f'{name}={hosts!r}' for name, hosts in self._hosts.items())})"


class JobTrait(ABC):
    """A job: what it is to have, and once it was applied, its hosts."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostMesh] | None = None

    @property
    def active(self) -> bool:
        """Whether it has hosts now."""
        return self._hosts is not None

    def apply(self, client_script: str | None = None) -> None:
        """Start the hosts, unless they are there. Raises: SpawnError; then none of them is left.

        client_script: there is no batch mode, so None.
        """
        if client_script is not None:
            raise UsageError("there is no batch mode: start the script by itself, and have it apply the job.")
        if self._hosts is None:
            self._hosts = self._create()

    def state(self, cached_path: str | None = None) -> JobState:
        """The hosts, started where they are not there; a lost one is started again in its place. Raises: SpawnError.

        cached_path: jobs are not kept in files, so None.
        """
        if cached_path is not None:
            raise UsageError(
                "a job is not kept in a file, so cached_path is None: the meshes of a program that ends live on after "
                "meshbook.detach(), and another one has them by meshbook.attach()."
            )
        self.apply()
        assert self._hosts is not None
        for hosts in self._hosts.values():
            hosts.replace_lost()
        return JobState(self._hosts)

    def kill(self) -> None:
        """End the hosts, and every mesh on them. Idempotent."""
        hosts, self._hosts = self._hosts or {}, None
        for each in hosts.values():
            self._end(each)

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether the hosts that it has are those that ``spec`` asks for."""

    @abstractmethod
    def _create(self) -> dict[str, HostMesh]:
        """Start the hosts. Raises: SpawnError; then none is left."""

    def _end(self, hosts: HostMesh) -> None:
        hosts.shutdown()


class LocalJob(JobTrait):
    """This machine under one or several names: a stand-in for a job on others."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = _checked_names(hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, LocalJob) and spec._names == self._names

    def _create(self) -> dict[str, HostMesh]:
        return {name: this_host() for name in self._names}

    def _end(self, hosts: HostMesh) -> None:
        pass  # others have meshes there too


class ProcessJob(JobTrait):
    """Hosts that are agents on this machine, each as if it were alone there; to try what several hosts do."""

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        """meshes: how many hosts by name. env: more of an environment for what is spawned there."""
        super().__init__()
        self._meshes, self._env = checked_counts(meshes), dict(env or {})

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, ProcessJob) and self.active and (spec._meshes, spec._env) == (self._meshes, self._env)

    def _create(self) -> dict[str, HostMesh]:
        wanted = {name: (count, LocalLauncher(separate_hosts=True)) for name, count in self._meshes.items()}
        return {name: hosts.with_environment(self._env) for name, hosts in start_all(wanted).items()}


class SSHJob(JobTrait):
    """Hosts by ssh, which `add_mesh` names (`meshbook.launchers.ssh`)."""

    def __init__(self, python_exe: str | None = None, ssh_args: Sequence[str] = ()) -> None:
        """python_exe: the interpreter there; by default the path of our own where there is one, else ``python3``.

        ssh_args: options of ssh.
        """
        super().__init__()
        self._python, self._options = python_exe, tuple(ssh_args)
        self._meshes: dict[str, tuple[str, ...]] = {}

    def add_mesh(self, name: str, hosts: Sequence[str]) -> None:
        """Have ``hosts``, as ssh calls them, under a name. Raises: UsageError once the job was applied."""
        if self.active:
            raise UsageError(f'the job has its hosts already; kill() it, then add "{name}".')
        _checked_names([name])
        self._meshes[name] = (hosts,) if isinstance(hosts, str) else tuple(hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, SSHJob) and self.active and spec._spec == self._spec

    @property
    def _spec(self) -> object:
        return self._meshes, self._python, self._options

    def _create(self) -> dict[str, HostMesh]:
        from meshbook.launchers.ssh import SSHLauncher  # only here: who has no such hosts need not load it

        if not self._meshes:
            raise UsageError('the job has no hosts: add_mesh("trainers", ["nodeA", "nodeB"]).')

        return start_all(
            {
                name: (len(hosts), SSHLauncher(hosts, python=self._python, options=self._options))
                for name, hosts in self._meshes.items()
            }
        )


class SlurmJob(JobTrait):
    """Nodes of one allocation of Slurm, arranged by name (`meshbook.launchers.slurm`)."""

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str | None = None,
        slurm_args: Sequence[str] = (),
        *,
        job_name: str | None = None,
        time_limit: str | None = None,
        partition: str | None = None,
        exclusive: bool = False,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
    ) -> None:
        """meshes: how many nodes by name. slurm_args: options of salloc, beside the others.

        python_exe: the interpreter there; by default the path of our own where there is one, else ``python3``.
        """
        super().__init__()
        self._meshes, self._python = checked_counts(meshes), python_exe
        named = {
            "job-name": job_name, "time": time_limit, "partition": partition, "gpus-per-node": gpus_per_node,
            "cpus-per-task": cpus_per_task, "mem": mem,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in named.items() if value is not None]
        self._options = (*options, *(["--exclusive"] if exclusive else []), *slurm_args)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, SlurmJob) and self.active and spec._spec == self._spec

    @property
    def _spec(self) -> object:
        return self._meshes, self._python, self._options

    def _create(self) -> dict[str, HostMesh]:
        from meshbook.launchers.slurm import SlurmLauncher  # only here: who has no such hosts need not load it

        return _start_together(self._meshes, SlurmLauncher(python=self._python, options=self._options))


class RayJob(JobTrait):
    """Nodes of one placement group of Ray, arranged by name (`meshbook.launchers.ray`)."""

    def __init__(
        self,
        meshes: Mapping[str, int],
        address: str = "",
        python_exe: str | None = None,
        ray_args: Sequence[str] = (),
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """meshes: how many nodes by name. address: of the cluster; by default that of this machine.

        num_cpus, num_gpus, resources: what each host asks for. ray_args: more options, as of `RayLauncher`.
        python_exe: the interpreter there; by default the path of our own where there is one, else Ray's.
        """
        super().__init__()
        self._meshes, self._python, self._address = checked_counts(meshes), python_exe, address
        named = {"num-cpus": num_cpus, "num-gpus": num_gpus, "resources": resources and json.dumps(dict(resources))}
        self._options = (*(f"--{name}={value}" for name, value in named.items() if value is not None), *ray_args)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, RayJob) and self.active and spec._spec == self._spec

    @property
    def _spec(self) -> object:
        return self._meshes, self._address, self._python, self._options

    def _create(self) -> dict[str, HostMesh]:
        from meshbook.launchers.ray import RayLauncher  # only here: who has no such hosts need not load it

        return _start_together(self._meshes, RayLauncher(self._address, python=self._python, options=self._options))


def _start_together(meshes: Mapping[str, int], launcher: Launcher) -> dict[str, HostMesh]:
    """Start all hosts at once, and part them by name. Raises: SpawnError; then none is left."""
    everything = start_all({HOSTS: (sum(meshes.values()), launcher)})[HOSTS]
    parts, first = {}, 0
    for name, count in meshes.items():
        parts[name] = everything.slice(**{HOSTS: slice(first, first + count)})
        first += count
    return parts


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
    _checked_names(meshes)
    for name, count in meshes.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f'hosts are counted from 1, as in {{"{name}": 2}}, not {count!r}.')
    return dict(meshes)


def _checked_names(names: Sequence[str] | Mapping[str, int]) -> tuple[str, ...]:
    """Raises: UsageError."""
    for name in (found := (names,) if isinstance(names, str) else tuple(names)):
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise UsageError(f"hosts are named by an identifier, as in state.trainers, not {name!r}.")
    if not found:
        raise UsageError("name the hosts of the job.")
    return found
