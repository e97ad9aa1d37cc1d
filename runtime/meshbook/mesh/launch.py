"""Host agents for a controller: launched, told how to dial in, and started again in the places of lost ones."""

from __future__ import annotations

from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.errors import SpawnError
from meshbook.launchers.base import Launcher
from meshbook.launchers.local import LocalLauncher
from meshbook.sessions.folder import SavedHost
from meshbook.system.os_errors import explain
from meshbook.system.processes import in_endpoint, loopback_address
from meshbook.wire.ticket import Ticket


def launch_hosts(controller: Controller, launcher: Launcher, count: int, serves_all: bool) -> list[HostState]:
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
        host.launch_another = lambda: launch_hosts(controller, launcher, 1, serves_all)[0]
        hosts.append(host)
        saved[ticket.host_id] = SavedHost(
            ticket.public_key, launched.pid, launched.started, launcher.shares_environment, serves_all
        )
    controller.record.save_hosts(saved)
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


def launch_like(controller: Controller, host: HostState) -> HostState:
    """A host in the place of one that a former controller started; so far local ones are the only kind."""
    known = controller.folder.state.hosts.get(host.id)
    shares_memory = any(other.shares_memory for other in controller.hosts if not other.lost)
    launcher = LocalLauncher(separate_hosts=not (shares_memory or (known is not None and known.serves_all)))
    return launch_hosts(controller, launcher, 1, known is not None and known.serves_all)[0]
