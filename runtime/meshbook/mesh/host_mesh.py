"""Hosts, as a mesh: their agents are launched, and processes are started on them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future, MappedFuture, join_futures
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, WorkerSpec
from meshbook.errors import CallFailed, SpawnError, UsageError
from meshbook.formatting import format_sizes
from meshbook.mesh.host_agents import HostProgress, replace_hosts
from meshbook.mesh.host_versions import warn_of_differences
from meshbook.mesh.log_streaming import hide_calls
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
from meshbook.shape.members import Extent, Members, Point, Region
from meshbook.shape.ndslice import NamedRegion
from meshbook.shape.view import MeshView


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
    ) -> None:
        """hosts: all of them, of which ``members`` are these; by default it is one host, without axes.

        env: what all that is spawned here gets. python: the interpreter that it runs in; empty for that of the hosts.
        """
        super().__init__(Region.of({}) if members is None else members)
        self._controller, self._hosts, self._env = controller, hosts, checked_variables(env)
        self._python = python

    def _part(self, members: Members) -> HostMesh:
        return HostMesh(self._controller, self._hosts, members, self._env, self._python)

    def with_environment(self, env: Mapping[str, str]) -> HostMesh:
        """The same hosts, where processes get more of an environment. Raises: UsageError."""
        return HostMesh(self._controller, self._hosts, self.members, {**self._env, **env}, self._python)

    def with_python_executable(self, python_executable: str | os.PathLike[str]) -> HostMesh:
        """The same hosts, where processes, and those that these start beside themselves, run another interpreter.

        python_executable: on the hosts; it must have meshbook. Raises: UsageError.
        """
        python = checked_python(python_executable)
        return HostMesh(self._controller, self._hosts, self.members, self._env, python)

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
        """Start ``per_host`` processes on every host and wait until each has answered.

        The mesh has the axes of the hosts, then those of ``per_host``.
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
            per_host = {"procs": 1} if per_host is None else checked_sizes(per_host)
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
            hosts = self.await_ready()
            placement = [host for host in hosts for _ in range(math.prod(per_host.values()))]
            mesh = MeshState(self._controller.next_id(), name, extent, placement, recipe)
            mesh.owns_hosts, mesh.grouped, mesh.host_axes = owns_hosts, group and torch, self.extent.names
            procs = ProcMesh(self._controller, mesh)
            if not shows_calls():
                hide_calls(procs)
            self._bring_up(mesh, procs, bootstrap)
        mesh.joined = not mesh.lost
        self._controller.folder.save_mesh(mesh.id, mesh.saved)
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

    def _bring_up(self, mesh: MeshState, procs: ProcMesh, bootstrap: Callable[[], object] | None) -> None:
        """Start the workers and form their group. Raises: SpawnError; then none of them is left."""
        timeout_s = setting_s("mesh_proc_spawn_max_idle")
        try:
            self._controller.recruit(mesh).done.get(timeout_s)
            warn_of_differences(self._controller, mesh)
            (procs.rebuild_groups() if mesh.grouped else procs.prepare_group()).get(timeout_s)
            if bootstrap is not None:
                _run_bootstrap(procs, bootstrap, timeout_s)
        except BaseException as error:
            self._controller.stop_mesh(mesh, 0.0)
            if isinstance(error, (SpawnError, KeyboardInterrupt)):
                raise
            if isinstance(error, TimeoutError):
                raise SpawnError(
                    f"not every worker answered within {timeout_s:g} s; see {self._controller.folder.logs}"
                ) from error
            raise SpawnError(f"the workers started, but their process group did not form: {error}") from error

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
        """End the hosts' agents, and with them every mesh on these hosts; done when it returns. Idempotent."""
        hosts = self._present()
        for host in hosts:
            host.retire()
        self._controller.stop_hosts(hosts, timeout_s)
        return Future.completed(None)

    def sync_workspace(
        self, workspace: str | Path = ".", conda: bool = False, auto_reload: bool = False
    ) -> Future[None]:
        """Send Python modules to all processes that have members on these hosts, as `ProcMesh.sync_workspace` does."""
        hosts = {host.id for host in self._present()}
        there = [mesh for mesh in self._controller.known_meshes() if hosts & {host.id for host in mesh.hosts}]
        sent = [ProcMesh(self._controller, mesh).sync_workspace(workspace, conda, auto_reload) for mesh in there]
        return MappedFuture(join_futures(sent), lambda _: None)

    @property
    def initialized(self) -> Future[bool]:
        """True when all hosts are there. Raises, when asked: SpawnError."""
        begun: Future[bool] = Future()

        def wait() -> None:
            try:
                self.await_ready()
            except BaseException as error:
                begun.set_exception(error)
            else:
                begun.set_result(True)

        run_in_background(wait)
        return begun

    @property
    def is_fake_in_process(self) -> bool:
        """False: hosts are processes of their own, also those on this machine."""
        return False

    @property
    def region(self) -> NamedRegion:
        """All hosts, by their ranks."""
        return self.extent.region

    async def __aenter__(self) -> HostMesh:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.shutdown()

    def __enter__(self) -> HostMesh:
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
            if host.lost:
                raise SpawnError(f"host {host.name} is lost: {host.lost}. Start it again: meshbook.mesh.shutdown()")
        return hosts


def _run_bootstrap(procs: ProcMesh, bootstrap: Callable[[], object], timeout_s: float) -> None:
    """Run it in every process. Raises: SpawnError, TimeoutError."""
    try:
        procs.execute(bootstrap).get(timeout_s)
    except CallFailed as error:
        raise SpawnError(f"the workers started, but their bootstrap failed: {error}") from error
