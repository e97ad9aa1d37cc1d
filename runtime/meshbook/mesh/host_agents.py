"""The agents of hosts: started by a launcher, or found again by the next controller of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from meshbook.concurrency.interrupts import held_back
from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.errors import SpawnError
from meshbook.launchers import registry
from meshbook.launchers.base import Launcher
from meshbook.sessions.folder import SavedHost, SavedLauncher
from meshbook.system.interfaces import in_endpoint, loopback_address
from meshbook.system.os_errors import check_descriptors, explain
from meshbook.wire.ticket import Ticket
from meshbook.wire.unix_transport import control_endpoint

FILES_PER_HOST = 3
"""Connections of a host, in the controller's process."""


def launch_hosts(controller: Controller, launcher: Launcher, count: int, serves_all: bool) -> list[HostState]:
    """Start agents that dial in; one that is lost is started again in the same way. Raises: SpawnError.

    An interrupt leaves none: it waits until all that was started is known.
    """
    hosts: list[HostState] = []
    try:
        with held_back():
            _launch(controller, launcher, count, serves_all, hosts)
    except BaseException:
        if hosts:
            with contextlib.suppress(OSError):  # what is wrong is told already
                controller.stop_hosts(hosts, 0.0)
        raise
    return hosts


def _launch(controller: Controller, launcher: Launcher, count: int, serves_all: bool, hosts: list[HostState]) -> None:
    """Fill ``hosts``. Raises: SpawnError; then there are none."""
    tcp, unix = f"tcp://{in_endpoint(loopback_address())}:*", control_endpoint(controller.folder.path)
    transport = launcher.transport
    try:
        check_descriptors(count * FILES_PER_HOST)
    except OSError as error:
        raise SpawnError(f"{count} hosts need {count * FILES_PER_HOST} open files here: {explain(error)}.") from error
    try:
        endpoint = controller.endpoint({"tcp": tcp, "unix": unix}.get(transport, f"{transport}:*"))
    except OSError as error:
        raise SpawnError(f"hosts have nowhere to dial in: {explain(error)}.") from error
    tickets = [_ticket(controller, endpoint, f"{launcher.name}-{controller.next_id()}") for _ in range(count)]
    saved = {}
    try:
        started = launcher.launch(tickets)
    except BaseException as error:
        controller.revoke(ticket.host_id for ticket in tickets)
        if isinstance(error, OSError):
            raise SpawnError(f"the host agent could not be started: {explain(error)}.") from error
        raise
    for index, (ticket, launched) in enumerate(zip(tickets, started, strict=True)):
        one = launcher.for_host(index)
        host = controller.expect_host(ticket.host_id, launched, launcher.shares_environment, one.saved.host)
        _know_launcher(controller, host, one, serves_all)
        host.endpoint = endpoint if transport.startswith("tcp://") else ""
        hosts.append(host)
        saved[ticket.host_id] = SavedHost(
            ticket.public_key, launched.pid, launched.started, launcher.shares_environment, serves_all,
            one.saved, one.saved.host,
        )  # fmt: skip
    controller.folder.save_hosts(saved)


class _Starter:
    """Starts hosts like the one for which there is ``launcher``; see `HostStarter`."""

    def __init__(self, controller: Controller, launcher: Launcher, serves_all: bool) -> None:
        self._controller, self._launcher, self._serves_all = controller, launcher, serves_all

    @property
    def fixed(self) -> str:
        return self._launcher.fixed

    @property
    def place_is_gone(self) -> bool:
        return self._launcher.place_is_gone

    def another(self) -> HostState:
        return launch_hosts(self._controller, self._launcher, 1, self._serves_all)[0]

    def more(self, count: int, beside: Sequence[HostState]) -> list[HostState]:
        launcher = self._launcher.for_more([host.launched for host in beside])
        return launch_hosts(self._controller, launcher, count, self._serves_all)


def _know_launcher(controller: Controller, host: HostState, launcher: Launcher, serves_all: bool) -> None:
    """Have ``launcher`` start the hosts that replace a host, or come beside it."""
    host.starter, host.launcher = _Starter(controller, launcher, serves_all), launcher.saved


def replace_hosts(
    hosts: Sequence[HostState], started: dict[HostState, HostState], controller: Controller, launcher: Launcher | None
) -> None:
    """Start a host in the place of each that is lost; they may not have dialled in yet. Raises: SpawnError, UsageError.

    hosts: all of a mesh. started: gets each that is lost with the one in its place, also when this raises.
    launcher: starts them all; by default each comes back as it came, those together whose allocation has gone.
    """
    started.update({host: host.present() for host in hosts if host.lost and not host.present().lost})
    lost = [host for host in hosts if host.present().lost]
    together: dict[SavedLauncher, list[HostState]] = {}
    if launcher is not None and lost:
        _give_places(lost, launch_hosts(controller, launcher, len(lost), False), started)
        return
    for host in lost:
        last = host.present()
        if last.starter is None:
            raise SpawnError(f"host {last.name} is lost ({last.lost}), and nobody here knows how to start it again.")
        if last.starter.place_is_gone:
            together.setdefault(last.launcher.asked, []).append(host)
        else:
            _give_places([host], [last.starter.another()], started)
    for alike in together.values():
        starter, beside = alike[0].present().starter, [host.present() for host in hosts if not host.present().lost]
        assert starter is not None
        _give_places(alike, starter.more(len(alike), beside), started)


def _give_places(lost: list[HostState], others: list[HostState], started: dict[HostState, HostState]) -> None:
    for host, other in zip(lost, others, strict=True):
        host.give_place_to(other)
        started[host] = other


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


# ---- those of a former controller -----------------------------------------------------------------------------------


def find_hosts(controller: Controller) -> dict[str, HostState]:
    """Expect the hosts of the session's former controller, by their ids."""
    state, hosts = controller.folder.state, {}
    for id, launched, launcher in registry.find(state.hosts, controller.folder.logs):
        saved = state.hosts[id]
        hosts[id] = controller.expect_host(id, launched, saved.shares_environment, saved.name, is_found=True)
        _know_launcher(controller, hosts[id], launcher, saved.serves_all)
    return {id: hosts[id] for id in state.hosts}
