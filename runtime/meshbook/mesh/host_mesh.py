"""Hosts, as a mesh: their agents are launched, and processes are started on them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from meshbook.concurrency.future import Future, MappedFuture, in_background, join_futures
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, WorkerSpec
from meshbook.errors import HostsEndedError, NotOwnerError, SpawnError, UsageError
from meshbook.formatting import format_sizes
from meshbook.mesh.coming_up import bring_up, bring_up_aside
from meshbook.mesh.host_agents import HostProgress, replace_hosts
from meshbook.mesh.log_streaming import hide_calls
from meshbook.mesh.proc_calls import refuse_conda
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.settings import setting_s, shows_calls
from meshbook.mesh.spawn_options import (
    BootstrapCommand,
    check_bootstrap,
    checked_bindings,
    checked_folder,
    checked_modules,
    checked_name,
    checked_python,
    checked_sizes,
    checked_variables,
    commands_of,
)
from meshbook.mesh.workspace_copies import copy_folders
from meshbook.shape.members import Extent, Members, Point, Region
from meshbook.shape.ndslice import NamedRegion
from meshbook.shape.view import MeshView
from meshbook.workspace.folders import Workspace


class HostMesh(MeshView):
    """Hosts, each with an agent that can start processes; or a view of some of them, which costs nothing.

    One host may have no axis.
    """

    def __init__(
        self,
        controller: Controller,
        hosts: list[HostState],
        members: Members | None = None,
        env: Mapping[str, str] | None = None,
        python: str = "",
        waits: bool = True,
    ) -> None:
        """hosts: all of them, of which ``members`` are these; by default it is one host, without axes.

        env: what all that is spawned here gets. python: the interpreter that it runs in; empty for that of the hosts.
        waits: see `without_waiting`.
        """
        super().__init__(Region.of({}) if members is None else members)
        self._controller, self._hosts, self._env = controller, hosts, checked_variables(env)
        self._python, self._waits = python, waits
        self._is_reference = False

    def _part(self, members: Members) -> HostMesh:
        hosts = HostMesh(self._controller, self._hosts, members, self._env, self._python, self._waits)
        hosts._is_reference = self._is_reference or len(members) < len(self)
        return hosts

    def with_environment(self, env: Mapping[str, str]) -> HostMesh:
        """The same hosts, where processes get more of an environment. Raises: UsageError."""
        return HostMesh(self._controller, self._hosts, self.members, {**self._env, **env}, self._python, self._waits)

    def with_python_executable(self, python_executable: str | os.PathLike[str]) -> HostMesh:
        """The same hosts, where processes, and those that these start beside themselves, run another interpreter.

        python_executable: on the hosts; it must have meshbook. Raises: UsageError.
        """
        python = checked_python(python_executable)
        return HostMesh(self._controller, self._hosts, self.members, self._env, python, self._waits)

    def without_waiting(self) -> HostMesh:
        """The same hosts, where `spawn_procs` returns before processes are there, as Monarch's does.

        What is asked of them meanwhile waits; what keeps them is told by `ProcMesh.initialized`, by each call, and to
        `meshbook.actor.unhandled_fault_hook`.
        """
        return HostMesh(self._controller, self._hosts, self.members, self._env, self._python, waits=False)

    def as_owned(self) -> HostMesh:
        """The same hosts, for who has started them, though they are some of more: they are shut down by themselves."""
        hosts = self._part(self.members)
        hosts._is_reference = False
        return hosts

    def as_reference(self) -> HostMesh:
        """The same hosts, for who has not started them: `shutdown` is refused."""
        hosts = self._part(self.members)
        hosts._is_reference = True
        return hosts

    def __reduce__(self) -> tuple[object, ...]:
        """On a rank it is a `meshbook.mesh.actor_hosts.HostRef`."""
        from meshbook.mesh.actor_hosts import find_hosts  # which stands above us

        ids = tuple(host.id for host in self._present())
        return find_hosts, (self._controller.folder.id, ids, dict(self.extent), self._env, self._python)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostMesh):
            return NotImplemented
        return (self._present(), self.extent) == (other._present(), other.extent)

    def __hash__(self) -> int:
        return hash(self.extent)

    def __repr__(self) -> str:
        return f"HostMesh({format_sizes(self.sizes)})"

    @property
    def kept(self) -> tuple[str, tuple[str, ...], Members, Mapping[str, str], str]:
        """What finds the hosts again: the session, the ids of all its hosts, which of these, environment, Python."""
        ids = tuple(host.present().id for host in self._hosts)
        return self._controller.folder.id, ids, self.members, self._env, self._python

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], object] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        device: str | None = None,
        preload: Sequence[str] = (),
        torch: bool = True,
        group: bool = True,
        owns_hosts: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> ProcMesh:
        """Start ``per_host`` processes on every host and wait until each has answered; see `without_waiting`.

        The mesh has the axes of the hosts, then those of ``per_host``; without these, one process on each host.
        name: of the mesh, and of the folder of its logs; ``procs`` by default.
        device: ``cpu`` or ``cuda``; by default CUDA where there are devices, one per rank.
        preload: modules to import once, before forking.
        torch: processes have it from the start; without it they are there sooner, weigh a quarter, import it when code
        asks for it, and have no process groups.
        group: form the default process group and prove it with a collective; not without torch.
        owns_hosts: the hosts are this mesh's alone, and end with it, also when this fails.
        env: more of an environment, on every host. cwd: the folder there, from ``/`` or ``~``; it is on sys.path too.
        bootstrap: called first in every process; may be ``async``.
        proc_bind: the CPUs and NUMA nodes of each process of a host; see `meshbook.system.binding`.
        bootstrap_command: another interpreter or environment; a function of a Point gives each process its own.
        Raises: SpawnError, also when ``bootstrap`` raises; DeviceError if there are fewer devices than ranks;
        SerializationError if ``bootstrap`` cannot travel.
        """
        with self._ended_on_failure(owns_hosts):
            per_host = {} if per_host is None else checked_sizes(per_host)
            extent = Extent.of({**self.extent, **per_host})
            if len(extent) != len(self.extent) + len(per_host):
                raise UsageError(f"the hosts have the axes {self.extent.labels} already; name the others otherwise.")
            if device not in (None, "cpu", "cuda"):
                raise UsageError(f'device must be "cpu" or "cuda", not "{device}".')
            if bootstrap is not None:
                check_bootstrap(bootstrap)
            name = "procs" if name is None else checked_name(name)
            variables = {**self._env, **checked_variables(env)}
            recipe = WorkerSpec.here(device, checked_modules(preload), torch, checked_folder(cwd), variables)
            recipe = recipe._replace(
                commands=commands_of(bootstrap_command, extent, self._python),
                bindings=checked_bindings(proc_bind, math.prod(per_host.values())),
            )
            hosts = self.await_ready() if self._waits else self._living()
            placement = [host for host in hosts for _ in range(math.prod(per_host.values()))]
            mesh = MeshState(self._controller.next_id(), name, extent, placement, recipe)
            mesh.owns_hosts, mesh.grouped, mesh.host_axes = owns_hosts, group and torch, self.extent.names
            procs = ProcMesh(self._controller, mesh)
            if not shows_calls():
                hide_calls(procs)
            if self._waits:
                bring_up(self._controller, procs, bootstrap)
            else:
                bring_up_aside(self._controller, procs, bootstrap, self.await_ready)
        return procs

    @contextlib.contextmanager
    def _ended_on_failure(self, owns_hosts: bool) -> Iterator[None]:
        """End the hosts if the block fails and they are for nothing else."""
        try:
            yield
        except BaseException:
            if owns_hosts:
                self.shutdown()
            raise

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """End every mesh of processes that has members on these hosts, and leave the hosts: they can spawn again.

        reason: accepted, since Monarch has it. Returns: a future that is done.
        """
        hosts = {host.id for host in self._present()}
        for known in self._controller.known_meshes():
            if hosts.intersection(host.id for host in known.hosts):
                ProcMesh(self._controller, known).stop()
        return Future.completed(None)

    def shutdown(self, timeout_s: float = 5.0) -> Future[None]:
        """End the hosts' agents, and with them every mesh on these hosts; done when it returns. Idempotent.

        Raises: NotOwnerError for a mesh of hosts that was sent here, and for some of the hosts that were started.
        """
        if self._is_reference:
            raise NotOwnerError(
                "cannot shut down `HostMesh` that is a reference instead of owned: these hosts are another's, who has "
                "sent them here, or a slice of more. Shut down the whole mesh of hosts, where it was started."
            )
        hosts = self._present()
        for host in hosts:
            host.retire()
        self._controller.stop_hosts(hosts, timeout_s)
        return Future.completed(None)

    def sync_workspace(
        self, workspace: str | Path | Workspace = ".", conda: bool = False, auto_reload: bool = False
    ) -> Future[None]:
        """Send Python modules to all processes that have members on these hosts, as `ProcMesh.sync_workspace` does.

        workspace: or folders, of which hosts get copies below their WORKSPACE_DIR, where these processes import from
        them. auto_reload: of folders, modules in use that have changed are reloaded.
        """
        hosts = {host.id for host in self._present()}
        there = [mesh for mesh in self._controller.known_meshes() if hosts & {host.id for host in mesh.hosts}]
        procs = [ProcMesh(self._controller, mesh) for mesh in there]
        if isinstance(workspace, Workspace):
            refuse_conda(conda)
            return in_background(lambda: copy_folders(self, workspace, procs, auto_reload))
        sent = [each.sync_workspace(workspace, conda, auto_reload) for each in procs]
        return MappedFuture(join_futures(sent), lambda _: None)

    @property
    def initialized(self) -> Future[bool]:
        """True when all hosts are there. Raises, when asked: SpawnError."""
        return in_background(lambda: bool(self.await_ready()))

    @property
    def stream_logs(self) -> bool:
        """Whether what calls print on processes of these hosts is shown, unless `ProcMesh.logging_option` says else."""
        return shows_calls()

    @property
    def is_fake_in_process(self) -> bool:
        """False: hosts are processes of their own, also those on this machine."""
        return False

    @property
    def region(self) -> NamedRegion:
        """All hosts, by their ranks."""
        return self.extent.region

    async def __aenter__(self) -> HostMesh:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.shutdown()

    def __enter__(self) -> HostMesh:
        """Raises: SpawnError for hosts that were shut down, or lost."""
        self._living()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def replace_lost(self) -> None:
        """Start another host in the place of each that was lost. Raises: SpawnError."""
        replace_hosts(self._hosts, {}, self._controller, None)

    def _present(self) -> list[HostState]:
        """The hosts, or those that have taken the places of lost ones."""
        return [self._hosts[rank].present() for rank in self.ranks]

    def await_ready(self) -> list[HostState]:
        """Wait until all hosts are there. Raises: SpawnError."""
        hosts = self._present()
        progress = HostProgress(hosts)
        for host in hosts:
            host.wait_ready(setting_s("host_spawn_ready_timeout"), progress.look)
        return self._living()

    def _living(self) -> list[HostState]:
        """The hosts, there or on their way. Raises: SpawnError for one that is known to have ended."""
        hosts = self._present()
        for host in hosts:
            if host.is_dismissed:
                raise HostsEndedError(f"HostMesh has already been shut down, {host.name} with it: start other hosts.")
            if host.lost:
                raise SpawnError(f"host {host.name} is lost: {host.lost}. Start it again: meshbook.mesh.shutdown()")
        return hosts
