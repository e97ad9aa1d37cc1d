"""The sessions that this process drives: one that spawns begin or join, and others attached beside it."""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from meshbook.actor.actor_mesh import ProcRef, this_proc
from meshbook.actor.identity import forget_session
from meshbook.actor.router import Place, router_for, routers
from meshbook.agent.lease import default_lease_s
from meshbook.concurrency.forks import ForkLock, at_fork
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import Repaired
from meshbook.curves.recorder import own
from meshbook.curves.table import MetricsTable
from meshbook.errors import HostsEndedError, MeshError, SpawnError, UsageError
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.lifecycle import MeshPhase
from meshbook.mesh import states
from meshbook.mesh.actor_router import ControllerRouter
from meshbook.mesh.attach import Attachment, attach_session, new_controller
from meshbook.mesh.host_agents import launch_hosts
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.prompt import ProcessFrontEnd, tell_person
from meshbook.mesh.visits import receive_visits
from meshbook.sessions.folder import SessionFolder
from meshbook.sessions.listing import SavedSession
from meshbook.sessions.words import find_session
from meshbook.shape.members import Extent, Members, Region
from meshbook.system.os_errors import explain

DETACH_TIMEOUT_S = 5.0
"""The longest wait for hosts to acknowledge sent messages before we detach."""

ATTACH_TIMEOUT_S = 10.0
"""The longest wait for hosts to answer a new controller."""


class DrivenSessions:
    """The sessions that this process drives. `_driven` is the only instance, so "which host is this" has one answer."""

    def __init__(self) -> None:
        self.front_end = ProcessFrontEnd()
        self._guard = ForkLock()
        self._first: Controller | None = None
        """The controller of the session that new meshes join."""
        self._beside: list[Controller] = []
        """The controllers of sessions that were attached while there was one already."""
        self._this_host: HostMesh | None = None

    @property
    def controllers(self) -> list[Controller]:
        return [*([self._first] if self._first is not None else []), *self._beside]

    def first(self) -> Controller:
        """The controller that spawns use, made when there is none. Raises: SpawnError."""
        with self._guard.lock:
            if self._first is None:
                try:
                    self._first = new_controller(self.front_end)
                except OSError as error:
                    raise SpawnError(f"this process cannot make what its meshes need: {explain(error)}.") from error
                _open_router(self._first)
                receive_visits(self._first, leave_one)
                atexit.register(shutdown)
            return self._first

    def start_hosts(self, sizes: Mapping[str, int], launcher: Launcher, *, serves_all: bool = False) -> HostMesh:
        controller = self.first()
        extent = Extent.of(sizes)
        hosts = launch_hosts(controller, launcher, math.prod(extent.shape), serves_all)
        return HostMesh(controller, hosts, Region.of(extent))

    def this_host(self) -> HostMesh:
        with self._guard.lock:
            if self._this_host is None:
                self._this_host = self.start_hosts({}, LocalLauncher(), serves_all=True)
            else:
                self._this_host.replace_lost()
            return self._this_host

    def attach(self, saved: SavedSession, timeout_s: float) -> Attachment:
        with self._guard.lock:
            attachment = attach_session(saved, timeout_s, self.front_end, _open_router)
            controller = attachment.controller
            receive_visits(controller, leave_one)
            atexit.register(shutdown)
            if self._first is not None:
                self._beside.append(controller)
                return attachment
            self._first = controller
            serving = {id for id, host in controller.folder.state.hosts.items() if host.serves_all}
            for host in controller.hosts:
                if host.id in serving and not host.lost:
                    self._this_host = HostMesh(controller, [host])
            return attachment

    def take_all(self) -> list[Controller]:
        """Return all controllers and forget them: from now on this process has none."""
        with self._guard.lock:
            taken = self.controllers
            self.forget()
            for controller in taken:
                routers.remove(controller.folder.id)
                forget_session(controller.folder.id)
            return taken

    def take_one(self, controller: Controller) -> bool:
        """Forget one controller; return whether this process had it."""
        with self._guard.lock:
            if controller not in self.controllers:
                return False
            if controller is self._first:
                self._first = self._this_host = None
            else:
                self._beside.remove(controller)
            routers.remove(controller.folder.id)
            forget_session(controller.folder.id)
            return True

    def forget(self) -> None:
        self._first = self._this_host = None
        self._beside.clear()


_driven = DrivenSessions()
at_fork(in_child=_driven.forget)  # a fork of this process, as a DataLoader worker, must not speak for it
set_front_end = _driven.front_end.use


def this_host() -> HostMesh:  # a function, no bound method: programs send it to ranks
    """The machine this runs on, as a host without axes. Its agent is started once and serves all meshes."""
    return _driven.this_host()


def start_hosts(sizes: Mapping[str, int], launcher: Launcher) -> HostMesh:
    """Start host agents by ``launcher``, arranged by named axes; returns before they have dialled in.

    Raises: SpawnError if the launcher cannot start them.
    """
    return _driven.start_hosts(sizes, launcher)


class Healable(Protocol):
    """A `ProcMesh`, a `meshbook.distributed.Mesh`, or a slice of either."""

    @property
    def last_repair(self) -> Repaired | None: ...

    def heal(self, setup: Sequence[str] = ()) -> Repaired: ...


THealable = TypeVar("THealable", bound=Healable)


def heal_mesh(mesh: THealable, setup: Sequence[str] = ()) -> THealable:
    """Repair a mesh as `ProcMesh.heal` does, and return the ``mesh`` that was given: its handles stay good.

    One line reports the repair, on stderr, or on stdout in a notebook; ``mesh.last_repair`` has it as well. Tensors on
    the mesh are restored as far as living ranks hold them.
    mesh: a `ProcMesh`, a `meshbook.distributed.Mesh`, or a slice of either, whose whole mesh is repaired.
    Raises: DeviceMeshError if it cannot be repaired, such as CrashLoopError, SpawnError and MeshStoppedError;
    UsageError for anything else than a mesh.
    """
    if not all(hasattr(type(mesh), name) for name in ("heal", "last_repair")):
        raise UsageError(
            f"heal_mesh takes a ProcMesh, a meshbook.distributed.Mesh or a slice of one, which this process drives; "
            f"it was given {mesh!r}"
        )
    tell_person(str(mesh.heal(setup)))
    return mesh


def current_procs() -> ProcMesh:
    """The processes that the notebook calls current, with their axes there. Raises: UsageError where there are none."""
    return _driven.front_end.current()


def metrics(mesh: ProcMesh | None = None) -> MetricsTable:
    """Return the table of the scalars that `meshbook.log` has recorded.

    mesh: the mesh whose ranks logged them; without it the current mesh, and this process itself.
    """
    if mesh is not None:
        return MetricsTable([states.metrics(mesh)])
    try:
        return MetricsTable([states.metrics(current_procs()), own])
    except MeshError:
        return MetricsTable([own])


def procs_of_sizes(sizes: dict[str, int]) -> ProcMesh:
    """Processes of the notebook along axes of these sizes; in a script new ones on this machine. Raises: SpawnError."""
    of_sizes = _driven.front_end.of_sizes
    return this_host().spawn_procs(sizes) if of_sizes is None else of_sizes(sizes)


def prewarm() -> None:
    """Start this host's agent, and have its template import torch, so that the first spawn finds them warm.

    Raises: SpawnError if the agent does not come up.
    """
    this_host().expect_torch()


def shutdown(timeout_s: float = 5.0) -> None:
    """Stop every mesh and host of this process; no process is left behind. The next spawn starts afresh. Idempotent.

    Runs at exit. Meshes that were detached live on, and meshes that were taken over from another notebook wait again.
    """
    _end_client_actors(_driven.controllers)
    for controller in _driven.take_all():
        waiting, lease_s = controller.waits_again
        living = [procs for known in controller.known_meshes() if (procs := ProcMesh(controller, known)).alive]
        if waiting.isdisjoint(procs.id for procs in living):
            controller.close(timeout_s)
            continue
        for procs in living:
            if procs.id not in waiting:
                procs.stop()
        controller.leave(lease_s, timeout_s)


def attach(session: str | SavedSession, *, timeout_s: float = ATTACH_TIMEOUT_S) -> Attachment:
    """Drive a session that another process has left, or died in: its meshes with their state, its open calls.

    session: one of `sessions`, its id, or the name of one of its meshes. Hosts that do not answer within ``timeout_s``
    count as lost. When this process has no meshes of its own yet, later spawns join the session.
    Raises: SessionInUse if a living process drives it, AttachError if it has ended or cannot be reached.
    """
    return _driven.attach(find_session(session), timeout_s)


def detach(lease_s: float | None = None, *, timeout_s: float = DETACH_TIMEOUT_S) -> list[str]:
    """Leave all meshes of this process to the next controller, and let them live on; returns their sessions' ids.

    Calls go on; their prints and values are kept meanwhile, within bounds. lease_s: how long the meshes wait for
    `attach` before they end; 10 minutes by default. A session without meshes is stopped.
    """
    left = []
    _end_client_actors(_driven.controllers)
    for controller in _driven.take_all():
        if controller.folder.state.meshes:
            left.append(controller.folder.id)
            controller.leave(default_lease_s() if lease_s is None else lease_s, timeout_s)
        else:
            controller.close(timeout_s)
    return left


def leave_one(controller: Controller) -> None:
    """Leave one session to the process that asks for it, as `detach` leaves all."""
    _end_client_actors([controller])
    if _driven.take_one(controller):
        controller.leave(default_lease_s(), DETACH_TIMEOUT_S)


def remember(key: str, value: bytes) -> None:
    """Keep ``value`` with the session of this process, for later controllers. Raises: UsageError for an odd key."""
    _driven.first().folder.remember(key, value)


def recall(key: str) -> bytes | None:
    """Return the value remembered under ``key`` in the session of this process; None where there is no session."""
    return _driven.first().folder.recall(key) if _driven.controllers else None


def own_meshes() -> list[ProcMesh]:
    """The meshes that this process drives and has not stopped, whole, in the order in which they were made.

    One whose maker waits for its processes is not among them before these are there: nobody would hold calls for it.
    """
    return [
        procs
        for controller in _driven.controllers
        for known in controller.known_meshes()
        if (procs := ProcMesh(controller, known)).alive
        and (known.arrival is not None or known.phase is not MeshPhase.STARTING)
    ]


def controller_of(session: str) -> Controller | None:
    """The controller of a session that this process drives."""
    return next((each for each in _driven.controllers if each.folder.id == session), None)


def own_sessions() -> list[SessionFolder]:
    """The sessions that this process drives, whose folders are its own."""
    return [controller.folder for controller in _driven.controllers]


def _open_router(controller: Controller) -> None:
    """References of the session speak through its controller here. Called before any host speaks."""
    services: Callable[..., ProcMesh] = functools.partial(_spawn_beside, controller)
    router = ControllerRouter(controller, services, _driven.front_end.note_unhandled)
    routers.add(controller.folder.id, router)


def client_proc() -> ProcRef:
    """This process, as a mesh without axes: others may spawn actors in it."""
    router = router_for(_driven.first().folder.id)
    assert isinstance(router, ControllerRouter)
    _ = router.client  # which makes room for actors
    return this_proc()


def sent_hosts(session: str, hosts: Sequence[str], members: Members, env: Mapping[str, str], python: str) -> HostMesh:
    """Hosts that this process drives, by a reference to them. Raises: UsageError."""
    if (controller := controller_of(session)) is None:
        raise UsageError(f"this is a reference to hosts of session {session}, which this process does not drive.")
    known = {host.id: host for host in controller.hosts}
    if gone := [id for id in hosts if id not in known]:
        raise HostsEndedError(f"the hosts {', '.join(gone)} were shut down.")
    return HostMesh(controller, [known[id] for id in hosts], members, env, python).as_reference()


def _end_client_actors(controllers: Iterable[Controller]) -> None:
    """Actors of this process end while there still are meshes that they may call."""
    for controller in controllers:
        router = router_for(controller.folder.id)
        if isinstance(router, ControllerRouter):
            router.end_client()


def _spawn_beside(
    controller: Controller, place: Place, per_host: Mapping[str, int], options: Mapping[str, Any]
) -> ProcMesh:
    """Start processes on the host of a rank that asks for them, or on hosts that it was sent."""
    if (sent := options.get("on")) is not None:
        hosts: HostMesh = sent
        return hosts.spawn_procs(per_host, **{name: value for name, value in options.items() if name != "on"})
    known = controller.find_mesh(place.mesh)
    if known is None:
        return this_host().spawn_procs(per_host, **options)
    python = known.recipe.command_of(place.rank).python
    hosts = HostMesh(controller, [known.host_of(place.rank)], python=python).running_python_anew()
    return hosts.spawn_procs(per_host, **options)


routers.set_own(lambda: router_for(_driven.first().folder.id))
