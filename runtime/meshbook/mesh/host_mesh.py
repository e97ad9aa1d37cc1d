"""Where meshes come from: hosts, and the process-wide controller behind them."""

from __future__ import annotations

import atexit
import functools
import math
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshbook.actor.identity import forget_session
from meshbook.actor.router import Place, Router, add_road, remove_road, router_for, set_own_road
from meshbook.agent.lease import default_lease_s
from meshbook.calls.call import OpenCall
from meshbook.concurrency.forks import at_fork
from meshbook.controller.controller import Controller, OutputSource
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, WorkerSpec
from meshbook.errors import CallFailed, LeftStopped, SpawnError, UsageError
from meshbook.formatting import format_sizes
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.mesh.actor_router import ControllerRouter
from meshbook.mesh.actor_services import ControllerServices
from meshbook.mesh.attach import Attachment, attach_session, find_session, new_controller
from meshbook.mesh.console import ConsolePromptHandler, PromptHandler
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.repair import Repaired
from meshbook.sessions.folder import SavedHost, SessionFolder
from meshbook.sessions.listing import SavedSession, sessions
from meshbook.shape.members import Extent, Members, Region
from meshbook.shape.view import MeshView
from meshbook.system.os_errors import explain
from meshbook.system.processes import in_endpoint, loopback_address
from meshbook.values.pickling import dumps
from meshbook.wire.ticket import Ticket

NAME_MAX_CHARS = 60
"""Of a mesh's name: in UTF-8, with the mesh's number, it is the name of a folder."""

HOST_TIMEOUT_S = 60.0
"""How long a host agent may take to dial in."""

SPAWN_TIMEOUT_S = 120.0
"""How long workers may take to answer, imports of ``preload`` included."""

DETACH_TIMEOUT_S = 5.0
"""How long hosts may take to acknowledge what they were sent before we go."""

ATTACH_TIMEOUT_S = 10.0
"""How long hosts may take to answer a new controller."""

_lock = threading.RLock()
_controller: Controller | None = None
_attached: list[Controller] = []
"""Of sessions that were attached while this process had one already."""
_this_host: HostMesh | None = None
_output_source: OutputSource | None = None
_prompt_handler: PromptHandler = ConsolePromptHandler()


class HostMesh(MeshView):
    """Hosts, each with an agent that can start processes; or a view of some of them, which costs nothing.

    One host may have no axis.
    """

    def __init__(self, controller: Controller, hosts: list[HostState], members: Members) -> None:
        """hosts: all of them, of which ``members`` are these."""
        super().__init__(members)
        self._controller, self._hosts = controller, hosts

    def _part(self, members: Members) -> HostMesh:
        return HostMesh(self._controller, self._hosts, members)

    def __repr__(self) -> str:
        return f"HostMesh({format_sizes(self.sizes)})"

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], object] | None = None,
        *,
        name: str | None = None,
        device: str | None = None,
        preload: Sequence[str] = (),
        group: bool = True,
        owns_hosts: bool = False,
    ) -> ProcMesh:
        """Start ``per_host`` processes on every host and wait until each has answered.

        The mesh has the axes of the hosts, then those of ``per_host``.
        name: of the mesh, and of the folder of its logs; ``procs`` by default.
        device: ``cpu`` or ``cuda``; by default CUDA where there are devices, one per rank.
        preload: modules to import once, before forking.
        group: form the default process group and prove it with a collective.
        owns_hosts: the hosts are this mesh's alone, and end with it.
        bootstrap: called first in every process; may be ``async``.
        Raises: SpawnError, also when ``bootstrap`` raises; DeviceError if there are fewer devices than ranks;
        SerializationError if ``bootstrap`` cannot travel.
        """
        per_host = {"procs": 1} if per_host is None else _checked_sizes(per_host)
        extent = Extent.of({**self.extent, **per_host})
        if len(extent) != len(self.extent) + len(per_host):
            raise UsageError(f"the hosts have the axes {self.extent.labels} already; name the others otherwise.")
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f'device must be "cpu" or "cuda", not "{device}".')
        if bootstrap is not None:
            _check_bootstrap(bootstrap)
        name = "procs" if name is None else _checked_name(name)
        recipe = WorkerSpec.here(device, _checked_modules(preload))
        hosts = self._await_hosts()
        placement = [host for host in hosts for _ in range(math.prod(per_host.values()))]
        mesh = MeshState(self._controller.next_id(), name, extent, placement, recipe)
        mesh.owns_hosts, mesh.grouped, mesh.host_axes = owns_hosts, group, self.extent.names
        procs = ProcMesh(self._controller, mesh, Region.of(extent))
        try:
            self._controller.recruit(mesh).done.get(SPAWN_TIMEOUT_S)
            (procs.form_group() if group else procs.prepare_group()).get(SPAWN_TIMEOUT_S)
            if bootstrap is not None:
                _run_bootstrap(procs, bootstrap)
        except BaseException as error:
            self._controller.stop_mesh(mesh, 0.0)
            if owns_hosts:
                self.stop()
            if isinstance(error, (SpawnError, KeyboardInterrupt)):
                raise
            if isinstance(error, TimeoutError):
                raise SpawnError(
                    f"not every worker answered within {SPAWN_TIMEOUT_S:g} s; see {self._controller.folder.logs}"
                ) from error
            raise SpawnError(f"the workers started, but their process group did not form: {error}") from error
        mesh.joined = not mesh.lost
        self._controller.save_mesh(mesh)
        return procs

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the host agents, and with them every mesh on these hosts."""
        self._controller.stop_hosts(self._present(), timeout_s)

    def _present(self) -> list[HostState]:
        """The hosts, or those that have taken the places of lost ones."""
        return [self._hosts[rank].present() for rank in self.ranks]

    def _await_hosts(self) -> list[HostState]:
        hosts = self._present()
        for host in hosts:
            host.wait_ready(HOST_TIMEOUT_S)
            if host.lost:
                raise SpawnError(f"host {host.name} is lost: {host.lost}. Start it again: meshbook.mesh.shutdown()")
        return hosts


def _check_bootstrap(bootstrap: object) -> None:
    """Refuse what cannot run on ranks before there are any. Raises: UsageError, SerializationError."""
    if not callable(bootstrap):
        raise UsageError(f"bootstrap must be a function without arguments; got {bootstrap!r}.")
    dumps(bootstrap, what="bootstrap")


def _run_bootstrap(procs: ProcMesh, bootstrap: Callable[[], object]) -> None:
    """Raises: SpawnError, TimeoutError."""
    try:
        procs.execute(bootstrap).get(SPAWN_TIMEOUT_S)
    except CallFailed as error:
        raise SpawnError(f"the workers started, but their bootstrap failed: {error}") from error


def _checked_sizes(per_host: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(per_host, Mapping):
        raise UsageError(f'per_host maps axes to sizes, as in {{"gpus": 4}}; it is {per_host!r}.')
    return dict(per_host)


def _checked_name(name: object) -> str:
    """Hosts name folders by it, and people read it. Raises: UsageError."""
    if not isinstance(name, str) or not name or not name.isprintable() or "/" in name or len(name) > NAME_MAX_CHARS:
        raise UsageError(
            f'a mesh is named by a text of 1 to {NAME_MAX_CHARS} printable characters without "/", not by '
            f"{reprlib.repr(name)}; None, the default, names it for you."
        )
    return name


def _checked_modules(preload: Sequence[str]) -> tuple[str, ...]:
    modules = () if isinstance(preload, str) else tuple(preload)
    if isinstance(preload, str) or not all(
        isinstance(module, str) and all(part.isidentifier() for part in module.split(".")) for module in modules
    ):
        raise UsageError(f'preload lists names of modules, as in preload=("json", "my.module"); it is {preload!r}.')
    return modules


def this_host() -> HostMesh:
    """The machine this runs on, as a host without axes. Its agent is started once and serves all meshes."""
    global _this_host
    with _lock:
        if _this_host is None:
            _this_host = _start_hosts({}, LocalLauncher(), serves_all=True)
        else:
            _this_host._hosts[0].replace()  # where it was lost
        return _this_host


def start_hosts(sizes: Mapping[str, int], launcher: Launcher) -> HostMesh:
    """Start host agents by ``launcher``, arranged by named axes; returns before they have dialled in.

    Raises: SpawnError if the launcher cannot start them.
    """
    return _start_hosts(sizes, launcher)


def _start_hosts(sizes: Mapping[str, int], launcher: Launcher, *, serves_all: bool = False) -> HostMesh:
    controller = _the_controller()
    extent = Extent.of(sizes)
    hosts = _launch(controller, launcher, math.prod(extent.shape), serves_all)
    return HostMesh(controller, hosts, Region.of(extent))


def _launch(controller: Controller, launcher: Launcher, count: int, serves_all: bool) -> list[HostState]:
    tcp, ipc = f"tcp://{in_endpoint(loopback_address())}:*", f"ipc://{controller.folder.path}/control"
    address = tcp if launcher.transport == "tcp" else ipc
    endpoint = controller.endpoint(address)
    tickets = [_ticket(controller, endpoint, f"{launcher.name}-{controller.next_id()}") for _ in range(count)]
    hosts, saved = [], {}
    try:
        started = launcher.launch(tickets)
    except OSError as error:
        raise SpawnError(f"the host agent could not be started: {explain(error)}.") from error
    for ticket, launched in zip(tickets, started, strict=True):
        host = controller.expect_host(ticket, launched, launcher.shares_environment)
        host.launch_another = lambda: _launch(controller, launcher, 1, serves_all)[0]
        hosts.append(host)
        saved[ticket.host_id] = SavedHost(
            ticket.public_key, launched.pid, launched.started, launcher.shares_environment, serves_all
        )
    controller.save_hosts(saved)
    return hosts


def _ticket(controller: Controller, endpoint: str, host_id: str) -> Ticket:
    public, secret = controller.accept(host_id)
    state = controller.folder.state
    return Ticket(
        host_id=host_id,
        endpoint=endpoint,
        controller_key=state.public_key,
        public_key=public,
        secret_key=secret,
        log_dir=str(controller.folder.logs),
        epoch=controller.epoch,
        lease_s=state.lease_s,
        session=str(controller.folder.path),
    )


def heal_mesh(mesh: ProcMesh, setup: Sequence[str] = ()) -> Repaired:
    """Start the ranks of ``mesh`` that ended again, and form its process groups with all ranks; see `ProcMesh.heal`."""
    return mesh.heal(setup)


def set_output_source(source: OutputSource | None) -> None:
    """Ask ``source`` where the prints of calls belong that have no listener of their own; our stdout by default.

    source: called with the ProcMesh on the caller's thread; returns an OutputTarget, or None for our stdout.
    """
    global _output_source
    _output_source = source
    for controller in _controllers():
        controller.output_source = source


def set_prompt_handler(prompt_handler: PromptHandler | None) -> None:
    """Have ``prompt_handler`` answer ranks that stop at breakpoints; without one: the terminal, where there is one."""
    global _prompt_handler
    _prompt_handler = prompt_handler or ConsolePromptHandler()


def _attend(controller: Controller, mesh: MeshState, call: OpenCall) -> None:
    procs = ProcMesh(controller, mesh, call.members)
    if _prompt_handler.attend(procs, call.future.done):
        raise LeftStopped(call.what, mesh.stopped_ranks.of(procs.ranks))


def prewarm() -> None:
    """Start this host's agent and its template in the background, so that the first spawn finds them warm."""
    this_host()


def shutdown(timeout_s: float = 5.0) -> None:
    """Stop every mesh and host of this process; no process is left behind. The next spawn starts afresh. Idempotent.

    Runs at exit. Meshes that were detached live on.
    """
    for controller in _take_controllers():
        controller.close(timeout_s)


def attach(session: str | SavedSession, *, timeout_s: float = ATTACH_TIMEOUT_S) -> Attachment:
    """Drive a session that another process has left, or died in: its meshes with their state, its open calls.

    session: one of `sessions`, its id, or the name of one of its meshes. Hosts that do not answer within ``timeout_s``
    count as lost. When this process has no meshes of its own yet, later spawns join the session.
    Raises: SessionInUse if a living process drives it, AttachError if it has ended or cannot be reached.
    """
    global _controller, _this_host
    saved = find_session(session)
    with _lock:
        attachment = attach_session(saved, timeout_s, _prepare)
        controller = attachment.controller
        atexit.register(shutdown)
        if _controller is not None:
            _attached.append(controller)
            return attachment
        _controller = controller
        for host in controller.hosts:
            host.launch_another = functools.partial(_launch_like, controller, host)
        serving = {id for id, host in controller.folder.state.hosts.items() if host.serves_all}
        for host in controller.hosts:
            if host.id in serving and not host.lost:
                _this_host = HostMesh(controller, [host], Region.of({}))
        return attachment


def _launch_like(controller: Controller, host: HostState) -> HostState:
    """A host in the place of one that a former controller started; so far local ones are the only kind."""
    known = controller.folder.state.hosts.get(host.id)
    shares_memory = any(other.shares_memory for other in controller.hosts if not other.lost)
    launcher = LocalLauncher(separate_hosts=not (shares_memory or (known is not None and known.serves_all)))
    return _launch(controller, launcher, 1, known is not None and known.serves_all)[0]


def detach(lease_s: float | None = None, *, timeout_s: float = DETACH_TIMEOUT_S) -> list[str]:
    """Leave all meshes of this process to the next controller, and let them live on; returns their sessions' ids.

    Calls go on; what they print and return meanwhile is kept, within bounds. lease_s: how long the meshes wait for
    `attach` before they end; 10 minutes by default. A session without meshes is stopped.
    """
    left = []
    for controller in _take_controllers():
        if controller.folder.state.meshes:
            left.append(controller.folder.id)
            controller.leave(default_lease_s() if lease_s is None else lease_s, timeout_s)
        else:
            controller.close(timeout_s)
    return left


def remember(key: str, value: bytes) -> None:
    """Keep ``value`` with the session of this process, for later controllers. Raises: UsageError for an odd key."""
    _the_controller().folder.remember(key, value)


def recall(key: str) -> bytes | None:
    """What was remembered under ``key`` in the session of this process."""
    return None if _controller is None else _controller.folder.recall(key)


def own_meshes() -> list[ProcMesh]:
    """The meshes that this process drives and has not stopped, whole, in the order in which they were made."""
    return [
        procs
        for controller in _controllers()
        for known in controller.known_meshes()
        if (procs := ProcMesh(controller, known, Region.of(known.extent))).alive
    ]


def own_sessions() -> list[SessionFolder]:
    """The sessions that this process drives, whose folders are its own."""
    return [controller.folder for controller in _controllers()]


def _controllers() -> list[Controller]:
    return [*([_controller] if _controller is not None else []), *_attached]


def _take_controllers() -> list[Controller]:
    """All of them; from now on this process has none."""
    global _controller, _this_host
    with _lock:
        taken = _controllers()
        _controller = _this_host = None
        _attached.clear()
        for controller in taken:
            remove_road(controller.folder.id)
            forget_session(controller.folder.id)
        return taken


def _the_controller() -> Controller:
    global _controller
    with _lock:
        if _controller is None:
            try:
                _controller = new_controller()
            except OSError as error:
                raise SpawnError(f"this process cannot make what its meshes need: {explain(error)}.") from error
            _prepare(_controller)
            atexit.register(shutdown)
        return _controller


def _prepare(controller: Controller) -> None:
    controller.output_source = _output_source
    add_road(
        controller.folder.id,
        ControllerRouter(controller, ControllerServices(functools.partial(_spawn_beside, controller))),
    )
    controller.refusal = lambda: _prompt_handler.refusal()
    controller.prompt_for_call = functools.partial(_attend, controller)


def _spawn_beside(
    controller: Controller, place: Place, per_host: Mapping[str, int], options: Mapping[str, Any]
) -> ProcMesh:
    """Start processes on the host of a rank that asks for them."""
    known = controller.find_mesh(place.mesh)
    if known is None:
        return this_host().spawn_procs(per_host, **options)
    return HostMesh(controller, [known.host_of(place.rank)], Region.of({})).spawn_procs(per_host, **options)


def _own_road() -> Router:
    return router_for(_the_controller().folder.id)


set_own_road(_own_road)


def _forget_in_child() -> None:
    """A fork of this process (a DataLoader worker, say) must not speak for its parent."""
    global _controller, _this_host, _lock
    _controller = _this_host = None
    _attached.clear()
    _lock = threading.RLock()


at_fork(in_child=_forget_in_child)

__all__ = [
    "Attachment",
    "HostMesh",
    "SavedSession",
    "attach",
    "detach",
    "heal_mesh",
    "prewarm",
    "recall",
    "remember",
    "sessions",
    "set_output_source",
    "set_prompt_handler",
    "shutdown",
    "start_hosts",
    "this_host",
]
