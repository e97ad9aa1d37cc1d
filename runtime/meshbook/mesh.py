"""Where meshes come from: hosts, and the process-wide controller behind them."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Mapping

from meshbook.controller import Controller, OutputSource
from meshbook.errors import HostLost, SpawnError, UsageError
from meshbook.known_host import KnownHost
from meshbook.known_mesh import KnownMesh, Recipe
from meshbook.launcher import Launcher, LocalLauncher, Ticket
from meshbook.limits import explain
from meshbook.proc_mesh import ProcMesh
from meshbook.shape import Extent, Region

HOST_TIMEOUT_S = 60.0
"""How long a host agent may take to dial in."""

SPAWN_TIMEOUT_S = 120.0
"""How long workers may take to answer, imports of ``preload`` included."""

LEASE_S = 5.0
"""How long agents and workers outlive a controller that has gone silent."""

_EPOCH = 1
_lock = threading.RLock()
_controller: Controller | None = None
_this_host: HostMesh | None = None
_output_source: OutputSource | None = None


class HostMesh:
    """Hosts, each with an agent that can start processes."""

    def __init__(self, controller: Controller, hosts: list[KnownHost], extent: Extent) -> None:
        self._controller, self._hosts, self.extent = controller, hosts, extent

    @property
    def sizes(self) -> dict[str, int]:
        """Axis to size, in order; none for one host that has no axis."""
        return self.extent.sizes

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        name: str = "procs",
        device: str | None = None,
        preload: tuple[str, ...] = (),
        group: bool = True,
        owns_hosts: bool = False,
    ) -> ProcMesh:
        """Start ``per_host`` processes on every host and wait until each has answered.

        The mesh has the axes of the hosts, then those of ``per_host``.
        device: ``cpu`` or ``cuda``; by default CUDA where there are devices, one per rank.
        preload: modules to import once, before forking.
        group: form the default process group and prove it with a collective.
        owns_hosts: the hosts are this mesh's alone, and end with it.
        Raises: SpawnError, DeviceError if there are fewer devices than ranks.
        """
        per_host = {"procs": 1} if per_host is None else dict(per_host)
        extent = Extent.of({**self.extent.sizes, **per_host})
        if len(extent.sizes) != len(self.extent.sizes) + len(per_host):
            raise UsageError(f"the hosts have the axes {list(self.extent.sizes)} already; name the others otherwise.")
        if device not in (None, "cpu", "cuda"):
            raise UsageError(f'device must be "cpu" or "cuda", not "{device}".')
        self._await_hosts()
        placement = [host for host in self._hosts for _ in range(math.prod(per_host.values()))]
        mesh = KnownMesh(self._controller.next_id(), name, extent, placement, Recipe.here(device, preload))
        mesh.owns_hosts = owns_hosts
        procs = ProcMesh(self._controller, mesh, Region.of(extent.sizes))
        try:
            self._controller.recruit(mesh, range(len(extent))).get(SPAWN_TIMEOUT_S)
            (procs.form_group() if group else procs.prepare_group()).get(SPAWN_TIMEOUT_S)
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
        return procs

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the host agents, and with them every mesh on these hosts."""
        self._controller.stop_hosts(self._hosts, timeout_s)

    def _await_hosts(self) -> None:
        for host in self._hosts:
            try:
                host.ready.get(HOST_TIMEOUT_S)
            except HostLost as error:
                raise SpawnError(f"host {error.host} did not start: {error.cause}") from None
            except TimeoutError:
                raise SpawnError(f"host {host.name} did not dial in within {HOST_TIMEOUT_S:g} s.") from None
            if host.lost:
                raise SpawnError(f"host {host.name} is lost: {host.lost}. Start it again: meshbook.mesh.shutdown()")


def this_host() -> HostMesh:
    """The machine this runs on, as a host without axes. Its agent is started once and serves all meshes."""
    global _this_host
    with _lock:
        if _this_host is None or _this_host._hosts[0].lost:
            _this_host = start_hosts({}, LocalLauncher())
        return _this_host


def start_hosts(sizes: Mapping[str, int], launcher: Launcher) -> HostMesh:
    """Start host agents by ``launcher``, arranged by named axes; returns before they have dialled in.

    Raises: SpawnError if the launcher cannot start them.
    """
    controller = _the_controller()
    extent = Extent.of(sizes)
    address = "tcp://127.0.0.1:*" if launcher.transport == "tcp" else f"ipc://{controller.folder.sockets}/control"
    endpoint = controller.endpoint(address)
    tickets = [
        _ticket(controller, endpoint, f"{launcher.name}-{controller.next_id()}")
        for _ in range(math.prod(extent.sizes.values()))
    ]
    hosts = []
    try:
        started = launcher.launch(tickets)
    except OSError as error:
        raise SpawnError(f"the host agent could not be started: {explain(error)}.") from error
    for ticket, launched in zip(tickets, started, strict=True):
        hosts.append(controller.expect_host(ticket, launched, launcher.shares_environment))
    return HostMesh(controller, hosts, extent)


def _ticket(controller: Controller, endpoint: str, host_id: str) -> Ticket:
    public, secret = controller.accept(host_id)
    return Ticket(
        host_id=host_id,
        endpoint=endpoint,
        controller_key=controller.public_key,
        public_key=public,
        secret_key=secret,
        log_dir=str(controller.folder.logs),
        epoch=_EPOCH,
        lease_s=LEASE_S,
    )


def set_output_source(source: OutputSource | None) -> None:
    """Ask ``source`` where the prints of calls belong that have no listener of their own; our stdout by default.

    source: called with the ProcMesh on the caller's thread; returns an OutputTarget, or None for our stdout.
    """
    global _output_source
    _output_source = source
    if _controller is not None:
        _controller.output_source = source


def prewarm() -> None:
    """Start this host's agent and its template in the background, so that the first spawn finds them warm."""
    this_host()


def shutdown(timeout_s: float = 5.0) -> None:
    """Stop every mesh and host of this process; no process is left behind. The next spawn starts afresh. Idempotent."""
    global _controller, _this_host
    with _lock:
        controller, _controller, _this_host = _controller, None, None
    if controller is not None:
        controller.close(timeout_s)


def _the_controller() -> Controller:
    global _controller
    with _lock:
        if _controller is None:
            try:
                _controller = Controller()
            except OSError as error:
                raise SpawnError(f"this process cannot make what its meshes need: {explain(error)}.") from error
            _controller.output_source = _output_source
            atexit.register(shutdown)
        return _controller


def _forget_in_child() -> None:
    """A fork of this process (a DataLoader worker, say) must not speak for its parent."""
    global _controller, _this_host, _lock
    _controller = _this_host = None
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_in_child)

__all__ = ["HostMesh", "prewarm", "set_output_source", "shutdown", "start_hosts", "this_host"]
