"""Driving a session that another controller has begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshbook.agent.lease import default_lease_s
from meshbook.calls.call_future import ResumedCall
from meshbook.controller.controller import Controller, FrontEnd
from meshbook.controller.queries import ask_rank
from meshbook.controller.reattach import Reattach
from meshbook.errors import AttachError, SessionInUse
from meshbook.errors.advice import advice
from meshbook.mesh.host_agents import find_hosts
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.sessions.folder import SessionFolder, living_owner, read_state
from meshbook.sessions.listing import SavedSession, may_live, sweep
from meshbook.system.os_errors import check_system, raise_file_limit
from meshbook.wire.transport import new_keys

OWN_TIMEOUT_S = 2.0
"""The longest wait for a process that holds a session only to look at it."""

KNOCK_S = 0.03
"""The interval at which we announce ourselves to the agents until they answer."""

LEARN_S = 1.0
"""The longest wait for ranks to learn this front end's advice before the next call is sent."""


@dataclass
class Attachment:
    """A session that this process drives now: its meshes, and the calls that were under way."""

    session: str
    controller: Controller
    meshes: list[ProcMesh] = field(default_factory=list)
    calls: list[ResumedCall] = field(default_factory=list)
    """The calls that still run or wait, and those whose answers were not collected, oldest first."""
    lost_hosts: list[str] = field(default_factory=list)
    """The lost hosts, a line each."""
    took_s: float = 0.0

    def __iter__(self) -> Iterator[ProcMesh]:
        return iter(self.meshes)

    def mesh(self, name: str) -> ProcMesh:
        """The mesh of that name. Raises: AttachError."""
        for mesh in self.meshes:
            if mesh.name == name:
                return mesh
        raise AttachError(f'session {self.session} has no mesh "{name}".')

    def calls_of(self, mesh: ProcMesh) -> list[ResumedCall]:
        """The calls that were under way on ``mesh``."""
        return [call for call in self.calls if call.mesh_id == mesh.id]

    def recall(self, key: str) -> bytes | None:
        """Return the value that this or an earlier process remembered under ``key``."""
        return self.controller.folder.recall(key)


def new_controller(front_end: FrontEnd) -> Controller:
    """Begin a session. Raises: SpawnError, UsageError, OSError."""
    check_system()
    raise_file_limit()
    sweep()
    folder = SessionFolder.create(*new_keys(), default_lease_s())
    try:
        return Controller(folder, front_end)
    except BaseException:
        folder.close()
        raise


def attach_session(
    session: SavedSession, timeout_s: float, front_end: FrontEnd, prepare: Callable[[Controller], None]
) -> Attachment:
    """Take a session over; returns when every host has told of its meshes, or is given up at the timeout.

    prepare: called with the controller before any host speaks. Raises: SessionInUse, AttachError.
    """
    started = time.monotonic()
    folder = _own(session)
    try:
        if any(host.launcher.engine == "workers" for host in folder.state.hosts.values()):
            raise AttachError(f"session {session.id} is of an older Meshbook, whose hosts no one can find any more.")
        controller = Controller(folder, front_end)
    except BaseException:
        folder.leave()
        raise
    try:
        prepare(controller)
        controller.readmit()
        for address, endpoint in list(folder.state.endpoints.items()):
            try:
                controller.bind_again(address, endpoint)  # where the agents dial
            except OSError as error:
                raise AttachError(
                    f"cannot listen at {endpoint} again: {error.strerror}. Its hosts dial that address, so end the "
                    "process that has taken it, then attach again."
                ) from None
        reattach = _knock(controller, started + timeout_s)
    except BaseException:
        controller.leave(folder.state.lease_s, 0.0)
        raise
    attachment = Attachment(session.id, controller)
    for mesh in reattach.meshes.values():
        ranks = range(mesh.extent.nelements)
        controller.questions.gather(mesh, ranks, ask_rank("meet_controller", *advice()), object, LEARN_S)
        attachment.meshes.append(ProcMesh(controller, mesh))
    attachment.calls += reattach.calls
    attachment.lost_hosts = [f"{host.name}: {host.lost}" for host in controller.hosts if host.lost]
    attachment.took_s = time.monotonic() - started
    if not attachment.meshes:
        controller.close(timeout_s=5.0)
        why = "; ".join(attachment.lost_hosts) or "its hosts know of no mesh"
        raise AttachError(f"session {session.id} has no mesh any more: {why}. Start another: {advice().spawn}.")
    return attachment


def _own(session: SavedSession) -> SessionFolder:
    """Become its owner; of several that try, one does."""
    path = Path(session.path)
    deadline = time.monotonic() + OWN_TIMEOUT_S
    while True:
        owner = living_owner(path)
        if owner is not None:
            raise SessionInUse(session.id, owner)
        state = read_state(path)
        if state is None or not may_live(state.hosts.values()):
            raise AttachError(f"session {session.id} has ended. Start another: {advice().spawn}.")
        folder = SessionFolder.take_over(path)
        if folder is not None:
            return folder
        if time.monotonic() > deadline:
            raise AttachError(f"session {session.id} is held by a process that does not say who it is; try again.")
        time.sleep(0.01)  # another process looks at it, or has won and is about to sign


def _knock(controller: Controller, deadline: float) -> Reattach:
    """Find the agents, and wait for their reports."""
    hosts = find_hosts(controller)
    reattach = controller.adopt(hosts)

    def knock() -> None:
        for host in reattach.silent:
            if reason := host.lost or host.launched.failure():
                reattach.give_up(host, reason)
            elif time.monotonic() > deadline:
                reattach.give_up(host, "it did not answer its new controller")
            elif host.hello is None:
                host.beat()

    if not hosts:
        return reattach
    while not reattach.done.done():
        controller.ask(knock)
        try:
            reattach.done.get(KNOCK_S)
        except TimeoutError:
            continue
    return reattach
