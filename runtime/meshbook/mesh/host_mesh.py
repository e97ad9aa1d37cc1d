"""Hosts as a mesh: their agents are launched, and processes are started on them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from meshbook.actor.context import EndsWithBlock
from meshbook.actor.identity import groups_on
from meshbook.concurrency.future import Future, in_background
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.startup import WorkerSpec
from meshbook.errors import DeviceError, HostsEndedError, NotOwnerError, SpawnError, UsageError
from meshbook.formatting import format_sizes
from meshbook.mesh.coming_up import bring_up, bring_up_aside
from meshbook.mesh.host_agents import replace_hosts
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.rank_calls import hide_calls
from meshbook.mesh.settings import shows_calls
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
from meshbook.mesh.start_progress import StartProgress
from meshbook.shape.members import Extent, Members, MeshView, Point, Region, members_of
from meshbook.shape.ndslice import NamedRegion
from meshbook.wire import messages as wire


class HostMesh(EndsWithBlock, MeshView):
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

        env: variables for all processes spawned here. python: their interpreter; empty for that of the hosts.
        waits: see `without_waiting`.
        """
        super().__init__(Region.of({}) if members is None else members)
        self._controller, self._hosts, self._env = controller, hosts, checked_variables(env)
        self._python, self._waits = python, waits
        self._is_reference, self._anew = False, False
        self._spawned: set[int] = set()
        """The ids of the meshes that this handle and its views spawned; `stop` ends them."""

    def _part(self, members: Members) -> HostMesh:
        return self._like(members, _is_reference=self._is_reference or len(members) < len(self))

    def _like(self, members: Members | None = None, **changes: object) -> HostMesh:
        """The same hosts, or some of them, with some of our fields changed."""
        hosts = type(self).__new__(type(self))
        MeshView.__init__(hosts, members_of(self) if members is None else members)
        vars(hosts).update(vars(self), **changes)
        return hosts

    def with_environment(self, env: Mapping[str, str]) -> HostMesh:
        """The same hosts, where processes get more of an environment. Raises: UsageError."""
        return self._like(_env=checked_variables({**self._env, **env}))

    def with_python_executable(self, python_executable: str | os.PathLike[str]) -> HostMesh:
        """Return the same hosts, where processes, and the ones these start beside themselves, run another interpreter.

        python_executable: on the hosts; it must have meshbook. Raises: UsageError.
        """
        return self._like(_python=checked_python(python_executable))

    def without_waiting(self) -> HostMesh:
        """The same hosts, where `spawn_procs` returns before processes are there, as Monarch's does.

        Requests to them wait meanwhile; an error that keeps them is raised by `ProcMesh.initialized` and by each call,
        and told to `meshbook.actor.unhandled_fault_hook`.
        """
        return self._like(_waits=False)

    def running_python_anew(self) -> HostMesh:
        """Return the same hosts, where a named interpreter is started for each mesh, as for those of ranks."""
        return self._like(_anew=True)

    def apart(self, spawned: set[int] | None = None) -> HostMesh:
        """Return the same hosts by another handle, whose `stop` only ends meshes that it spawned.

        spawned: the ids of meshes that were spawned already.
        """
        return self._like(_spawned=set() if spawned is None else spawned)

    def as_owned(self) -> HostMesh:
        """The same hosts, for who has started them, though they are some of more: they are shut down by themselves."""
        return self._like(_is_reference=False)

    def as_reference(self) -> HostMesh:
        """The same hosts, for who has not started them: `shutdown` is refused."""
        return self._like(_is_reference=True)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle these hosts so that a rank gets a `meshbook.mesh.actor_hosts.HostRef`."""
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
        """The key to find the hosts again: session id, ids of all hosts, the members, environment, Python."""
        ids = tuple(host.present().id for host in self._hosts)
        return self._controller.folder.id, ids, members_of(self), self._env, self._python

    def _present(self) -> list[HostState]:
        """Return the hosts, or the replacements of lost ones."""
        return [self._hosts[rank].present() for rank in self.ranks]

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
        within_s: float | None = None,
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
        proc_bind: the CPUs and NUMA nodes of each process of a host; see `meshbook.system.devices`.
        bootstrap_command: another interpreter or environment; a function of a Point gives each process its own.
        within_s: how long a step of the start may make no progress; importing is progress. By default hosts have a
        minute, processes two (`meshbook.monarch.config`).
        Raises: SpawnError, also when ``bootstrap`` raises; DeviceError if there are fewer devices than ranks;
        SerializationError if ``bootstrap`` cannot travel.
        """
        with contextlib.ExitStack() as on_failure:
            if owns_hosts:
                on_failure.callback(self.end)  # they are for nothing else
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
                commands=commands_of(bootstrap_command, extent, self._python, self._anew),
                bindings=checked_bindings(proc_bind, math.prod(per_host.values())),
            )
            progress = StartProgress(self._controller, within_s)
            hosts = self.await_ready(progress) if self._waits else self._living()
            count = math.prod(per_host.values())
            for host in hosts if device == "cuda" else ():  # who has not dialled in yet, is known later
                if host.hello is not None and host.hello.cuda_devices < count:
                    raise DeviceError(count, host.hello.cuda_devices, host.name)
            placement = [host for host in hosts for _ in range(count)]
            mesh = MeshState(self._controller.next_id(), name, extent, placement, recipe)
            mesh.owns_hosts, mesh.grouped, mesh.host_axes = owns_hosts, group and torch, self.extent.names
            mesh.siblings = self._spawned
            self._spawned.add(mesh.id)
            procs = ProcMesh(self._controller, mesh)
            if not shows_calls():
                hide_calls(procs)
            if self._waits:
                bring_up(self._controller, procs, bootstrap, progress)
            else:
                bring_up_aside(self._controller, procs, bootstrap, progress, lambda: self.await_ready(progress))
            on_failure.pop_all()
        return procs

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """End the meshes of processes that were spawned by this handle, or its views, and have members on these hosts.

        The hosts stay: they can spawn again; so do meshes of other handles (a job's `state` gives another handle each
        time). reason: accepted, since Monarch has it. Returns: a future that is done.
        """
        for known in self._meshes():
            if known.id in self._spawned:
                ProcMesh(self._controller, known).stop()
        return Future.completed(None)

    def _meshes(self) -> list[MeshState]:
        """Every mesh that has members on these hosts."""
        hosts = {host.id for host in self._present()}
        return [known for known in self._controller.known_meshes() if hosts & {host.id for host in known.hosts}]

    def shutdown(self, timeout_s: float = 5.0) -> Future[None]:
        """End the hosts' agents, and with them every mesh on these hosts; done when it returns.

        Actors that are on their way to processes that are there are made before, if that takes no longer than
        ``timeout_s``. Raises: NotOwnerError for a mesh of hosts that was sent here, and for some of the hosts that were
        started; HostsEndedError, a RuntimeError, the second time.
        """
        if self._is_reference:
            raise NotOwnerError(
                "cannot shut down `HostMesh` that is a reference instead of owned: these hosts are another's, who has "
                "sent them here, or a slice of more. Shut down the whole mesh of hosts, where it was started."
            )
        if self._has_ended:
            raise HostsEndedError("HostMesh has already been shut down: start other hosts.")
        until = time.monotonic() + timeout_s
        for mesh in self._meshes():
            if mesh.arrival is None or mesh.arrival.is_over:
                for actors in groups_on(self._controller.folder.id, mesh.id):
                    if actors.initialized is not None:
                        actors.initialized.wait(max(0.0, until - time.monotonic()))
        self.end(timeout_s)
        return Future.completed(None)

    @property
    def _has_ended(self) -> bool:
        return all(host.is_dismissed for host in self._present())

    def end(self, timeout_s: float = 5.0) -> None:
        """Stop the hosts as `shutdown` does, but without waiting for actors; it may be called again."""
        self._controller.stop_hosts(self._present(), timeout_s)

    @property
    def initialized(self) -> Future[bool]:
        """True when all hosts are there. Raises, when asked: SpawnError."""
        return in_background(lambda: bool(self.await_ready()))

    @property
    def stream_logs(self) -> bool:
        """Whether the prints of calls on processes of these hosts are shown, unless `logging_option` says else."""
        return shows_calls()

    @property
    def is_fake_in_process(self) -> bool:
        """False: hosts are processes of their own, also those on this machine."""
        return False

    @property
    def region(self) -> NamedRegion:
        """The ranks of the hosts, as a region."""
        return self.extent.region

    async def __aexit__(self, *error: object) -> None:
        self.__exit__()

    def __enter__(self) -> HostMesh:
        """Raises: SpawnError for hosts that were shut down, or lost."""
        self._living()
        return self

    def __exit__(self, *error: object) -> None:
        """Shut them down, unless the block has done so."""
        if not self._has_ended:
            self.shutdown()

    def expect_torch(self) -> None:
        """Wait until all hosts are there, and have them import torch for ranks to come. Raises: SpawnError."""
        for host in self.await_ready():
            self._controller.submit(functools.partial(host.send, wire.ExpectTorch()))

    def replace_lost(self) -> None:
        """Start another host in the place of each that was lost. Raises: SpawnError."""
        replace_hosts(self._hosts, {}, self._controller, None)

    def await_ready(self, progress: StartProgress | None = None) -> list[HostState]:
        """Wait until all hosts are there. Raises: SpawnError."""
        (progress or StartProgress(self._controller)).await_hosts(self._undismissed())
        return self._living()

    def _living(self) -> list[HostState]:
        """The hosts, there or on their way. Raises: SpawnError for one that is known to have ended."""
        hosts = self._undismissed()
        for host in hosts:
            if host.lost:
                raise SpawnError(f"host {host.name} is lost: {host.lost}. Start it again: meshbook.shutdown()")
        return hosts

    def _undismissed(self) -> list[HostState]:
        """The hosts. Raises: HostsEndedError for one that was shut down."""
        hosts = self._present()
        if (ended := next((host for host in hosts if host.is_dismissed), None)) is not None:
            raise HostsEndedError(f"HostMesh has already been shut down, {ended.name} with it: start other hosts.")
        return hosts
