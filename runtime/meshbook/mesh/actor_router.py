"""The router of the process that drives meshes."""

from __future__ import annotations

import traceback

from meshbook.actor.actor_mesh import ActorMesh
from meshbook.actor.identity import groups_on
from meshbook.actor.ports import Port
from meshbook.actor.router import ROOT, SUPERVISOR, Address, Answers, Place, TActor, find_now
from meshbook.actor.supervision import FaultJoiner, MeshFailure, failures_of
from meshbook.calls.mailboxes import LoadArgs, Mailboxes, ReplyTo
from meshbook.calls.request import CallRequest
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.errors import MeshError, MeshStoppedError, RanksLeft, WorkerLost
from meshbook.mesh.actor_services import ControllerServices
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.generations import AS_NOW, ranks_now
from meshbook.shape.members import Members, Region
from meshbook.wire import messages as wire


class ControllerRouter:
    """One per session that this process drives."""

    def __init__(self, controller: Controller, root: ControllerServices) -> None:
        self._controller, self._root = controller, root
        controller.mailboxes.open(ROOT, root.handle)
        self._faults = FaultJoiner()
        controller.mailboxes.open(SUPERVISOR, self._on_fault)
        controller.when_worker_lost(self._on_lost)

    @property
    def mailboxes(self) -> Mailboxes:
        return self._controller.mailboxes

    @property
    def supervisor(self) -> Port[MeshFailure]:
        return Port(self.session, self.place, SUPERVISOR)

    def _on_fault(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """A rank tells of a failure that no actor has handled."""

        def take() -> None:
            try:
                (failure,), _ = load_args()
            except MeshError:
                traceback.print_exc()
            else:
                self._faults.take(failure)

        run_in_background(take)  # what loads does not belong on the thread that serves the sockets

    def _on_lost(self, mesh: MeshState, lost: WorkerLost) -> None:
        """A process has ended. Under the turn."""
        self._root.owner_lost(mesh, lost.ranks)
        for group in groups_on(self.session, mesh.id):
            if lost.rank in ranks_now(mesh.moves, group.generation, group.members.ranks()):
                actors: ActorMesh[object] = ActorMesh(group, group.members)
                self._faults.take(MeshFailure(actors, group.name, failures_of(lost)))

    @property
    def session(self) -> str:
        return self._controller.folder.id

    @property
    def place(self) -> Place:
        return Place(0, 0)

    def new_mailbox(self) -> int:
        return self._controller.next_id()

    def call(self, request: CallRequest) -> Answers:
        mesh = self._find(request.mesh, request.generation)
        source = self._controller.front_end.output_source if request.reply else None
        output = source(ProcMesh(self._controller, mesh, Region.of(mesh.extent))) if source else None
        return self._controller.call(mesh, request, output)

    def find(self, mesh: int, members: Members, generation: int, *, partly: bool = False) -> Address:
        return find_now(self._find(mesh).moves, members, generation, partly=partly)

    def get_or_spawn(
        self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future[TActor]:
        return Future.completed(self._root.get_or_spawn(name, cls, args, kwargs))

    def procs(self, session: str, mesh: int, name: str, members: Members, generation: int) -> ProcMesh:
        known = self._find(mesh)
        try:
            return ProcMesh(self._controller, known, find_now(known.moves, members, generation).members)
        except RanksLeft:  # its use says so
            return ProcMesh(self._controller, known, members, generation)

    def _find(self, mesh: int, generation: int = AS_NOW) -> MeshState:
        """generation: in which its ranks are meant. Raises: MeshStoppedError; LayoutError if they have moved since."""
        if (known := self._controller.find_mesh(mesh)) is None:
            raise MeshStoppedError(f"number {mesh}")
        if generation not in (AS_NOW, known.generation):
            raise stale_view(known)
        return known
