"""The router of the process that drives meshes: its references, and its answers to ranks.

Processes that an actor has started end with it: one that is stopped sees to that itself
(`meshbook.actor.context.Belongings`), one that is killed cannot.
"""

from __future__ import annotations

import functools
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from meshbook.actor.actor_mesh import ActorMesh, ProcRef
from meshbook.actor.context import context
from meshbook.actor.errors import ProcsNotStartedError
from meshbook.actor.identity import groups_on
from meshbook.actor.ports import Port
from meshbook.actor.router import ROOT, SUPERVISOR, Address, Answers, Place, TActor, find_now
from meshbook.actor.supervision import SUPERVISE, FaultJoiner, MeshFailure, failures_of
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import CONTROLLER_MESH, LoadArgs, Outcome, ReplyTo, refusal
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.errors import Failure, FailureKind, MeshError, MeshStoppedError, RanksLeft, WorkerLost
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import output_target
from meshbook.mesh.settings import get_runtime_config
from meshbook.shape.members import AS_NOW, Members, MeshView, ranks_now
from meshbook.wire import messages as wire
from meshbook.workspace.modules import find_module

if TYPE_CHECKING:
    from meshbook.mesh.client_actors import ClientActors

SINGLE = "controllers"
"""The name of the mesh of one process in which the actors of `get_or_spawn` live."""


class _Owned(NamedTuple):
    """rank, generation: the owner's process, as its mesh numbered ranks then."""

    rank: int
    generation: int
    procs: ProcMesh


class _UnbornProcs(NamedTuple):
    """Processes that have not come, as the mesh of a `MeshFailure`."""

    name: str
    was_called: bool
    """Whether a call, or a wait for them, has told somebody."""

    def remember_fault(self, failure: MeshFailure) -> None:
        """Do nothing: processes that have not come fail every call."""


class ControllerRouter:
    """The router of a session that this process drives. It also answers the questions of ranks.

    The questions of ranks come to the mailbox `ROOT` of rank 0 of mesh 0: for processes beside them, for actors of
    which there is one, and for modules that lie beside the notebook. Work is done on side threads, since it waits for
    hosts and runs the user's code.
    """

    def __init__(
        self,
        controller: Controller,
        spawn_procs: Callable[[Place, Mapping[str, int], Mapping[str, Any]], ProcMesh],
        note_unhandled: Callable[[MeshFailure], object],
    ) -> None:
        """spawn_procs: starts processes on the host of a place. note_unhandled: see `FaultJoiner`."""
        self.mailboxes, self.new_mailbox = controller.mailboxes, controller.next_id
        self.session = controller.folder.id
        self.place = Place(0, 0)
        self.host = ""
        self._controller, self._spawn_procs = controller, spawn_procs
        self._faults = FaultJoiner(note_unhandled)
        self._lock = threading.Lock()
        self._procs: ProcMesh | None = None
        self._singles: dict[str, ActorMesh[object]] = {}
        self._owning = threading.Lock()
        """A second lock: `_lock` is held while processes start, and deaths are told on the thread that starts them."""
        self._owned: dict[int, list[_Owned]] = {}
        """The resources that actors have started, by the id of their mesh."""
        self._not_started: dict[int, ProcsNotStartedError] = {}
        """The reason why the processes of a mesh did not start after users already held the mesh, by its id."""
        self._client: ClientActors | None = None
        controller.mailboxes.open(ROOT, self._on_question)
        controller.mailboxes.open(SUPERVISOR, self._on_fault)
        controller.when_worker_lost(self._on_lost)

    @property
    def client(self) -> ClientActors:
        """The actors of this process; the first question makes room for them."""
        with self._owning:
            if self._client is None:
                from meshbook.mesh.client_actors import ClientActors  # asyncio, which few programs need so early

                controller = self._controller
                self._client = ClientActors(controller.mailboxes, controller.next_id, controller.give_up_mail)
            return self._client

    def end_client(self) -> None:
        """End the actors of this process."""
        if self._client is not None:
            self._client.end()

    @property
    def supervisor(self) -> Port[MeshFailure]:
        return context().supervisor or self._root_supervisor

    @property
    def _root_supervisor(self) -> Port[MeshFailure]:
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
        self._owner_lost(mesh, lost.ranks)
        if mesh.arrival is not None and not mesh.arrival.is_over:
            return  # `on_not_started` tells of it
        for group in groups_on(self.session, mesh.id):
            if lost.rank in ranks_now(mesh.moves, group.generation, group.members.ranks()):
                actors: ActorMesh[object] = ActorMesh(group, group.members)
                failure = MeshFailure(actors, group.name, failures_of(lost))
                if group.owner is None or group.owner == self._root_supervisor:
                    self._faults.take(failure)
                else:  # an actor of this process
                    run_in_background(functools.partial(self._tell, group.owner, failure))

    def _tell(self, owner: Port[MeshFailure], failure: MeshFailure) -> None:
        try:
            owner.post(SUPERVISE, failure)
        except MeshError:  # it has ended
            self._faults.take(failure)

    def call(self, request: CallRequest) -> Answers:
        if request.mesh == CONTROLLER_MESH:
            return self.client.call(request)
        mesh = self._find(request.mesh, request.generation)
        shown = request.reply and (mesh.shown_by or self._controller.front_end.output_source)
        output = output_target(ProcMesh(self._controller, mesh)) if shown else None
        return self._controller.call(mesh, request, output)

    def await_procs(self, mesh: int) -> None:
        if (known := self._controller.find_mesh(mesh)) is not None:
            known.await_arrival()

    def on_not_started(self, procs: ProcMesh, error: ProcsNotStartedError, cause: BaseException | None) -> None:
        """Processes that people have already did not come: who watches is told of each, and later calls fail so."""
        self._not_started[procs.id] = error
        mesh = procs._mesh
        failures = (failures_of(cause) if cause is not None else []) or [
            Failure(rank, mesh.host_of(rank).name, "", error.why, (), "") for rank in procs.ranks
        ]
        told = [each._replace(ename=type(error).__name__, kind=FailureKind.NOT_STARTED) for each in failures]
        unborn = _UnbornProcs(procs.name, mesh.arrival is not None and mesh.arrival.is_asked)
        self._faults.take(MeshFailure(unborn, procs.name, told))

    def find(self, mesh: int, members: Members, generation: int, *, partly: bool = False) -> Address:
        moves = () if mesh == CONTROLLER_MESH else self._find(mesh).moves
        return find_now(moves, members, generation, partly=partly)

    def procs(self, session: str, mesh: int, name: str, members: Members, generation: int) -> MeshView:
        if mesh == CONTROLLER_MESH:
            return ProcRef(session, mesh, name, members, generation)
        known = self._find(mesh)
        try:
            return ProcMesh(self._controller, known, find_now(known.moves, members, generation).members)
        except RanksLeft:  # its use says so
            return ProcMesh(self._controller, known, members, generation)

    def _find(self, mesh: int, generation: int = AS_NOW) -> MeshState:
        """generation: in which its ranks are meant. Raises: MeshStoppedError; LayoutError if they have moved since."""
        if (known := self._controller.find_mesh(mesh)) is None:
            if (error := self._not_started.get(mesh)) is not None:
                raise error
            raise MeshStoppedError(f"number {mesh}")
        if generation not in (AS_NOW, known.generation):
            raise stale_view(known)
        return known

    # ---- what ranks ask for --------------------------------------------------------------------------------------

    def get_or_spawn(
        self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future[TActor]:
        """The one actor of this name; made now if there is none, or not any more."""
        with self._lock:
            if self._procs is None or not self._procs.alive or self._procs.lost:
                self._singles.clear()  # they ended with the process
                if self._procs is not None:
                    self._procs.stop()
                self._procs = self._spawn_procs(Place(0, 0), {}, {"name": SINGLE, "device": "cpu", "group": False})
            found = self._singles.get(name)
            if found is not None and not found.is_stopped:
                return Future.completed(cast(TActor, found))
            made = self._procs.spawn(name, cls, *args, **kwargs)
            self._singles[name] = cast("ActorMesh[object]", made)
            return Future.completed(made)

    def _on_question(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """Answer a question that a rank asks."""

        def work() -> None:
            try:
                reply(Outcome(wire.OK, self._answer(call, load_args), has_value=True))
            except Exception as error:
                reply(refusal(error, 0, socket.gethostname()))

        run_in_background(work)

    def _answer(self, call: wire.Call, load_args: LoadArgs) -> object:
        args, kwargs = load_args()
        if call.endpoint == "get_or_spawn":
            return self.get_or_spawn(*args).get()
        if call.endpoint == "find_module":
            return find_module(*args)
        if call.endpoint == "settings":
            return get_runtime_config()
        if call.endpoint == "stop_procs":
            try:
                return args[0].stop().get()
            except MeshStoppedError:
                return None
        per_host, owned = args
        place = Place(call.origin.mesh, call.origin.rank) if call.origin is not None else Place(0, 0)
        procs = self._spawn_procs(place, per_host, kwargs)
        if owned:
            self._own(place, procs)
        return procs

    # ---- processes that actors have started ---------------------------------------------------------------------

    def _own(self, owner: Place, procs: ProcMesh) -> None:
        """An actor in the process ``owner`` has started them."""
        known = self._controller.find_mesh(owner.mesh)
        if known is None:  # it has ended meanwhile
            _stop(procs)
            return
        with self._owning:
            before = self._owned.get(owner.mesh)
            alive = [one for one in before or () if one.procs.alive]
            self._owned[owner.mesh] = [*alive, _Owned(owner.rank, known.generation, procs)]
        if before is None:
            known.stopped.add_done_callback(lambda _: self._owner_lost(known))
        if owner.rank in known.lost:
            self._owner_lost(known, [owner.rank])

    def _owner_lost(self, mesh: MeshState, ranks: Collection[int] | None = None) -> None:
        """End the actors started by processes of ``mesh`` that have ended, all by default. Returns at once."""
        with self._owning:
            owned = self._owned.pop(mesh.id, [])
            ends = [
                one for one in owned if ranks is None or ranks_now(mesh.moves, one.generation, [one.rank])[0] in ranks
            ]
            if left := [one for one in owned if one not in ends]:
                self._owned[mesh.id] = left
        for one in ends:
            run_in_background(functools.partial(_stop, one.procs))


def _stop(procs: ProcMesh) -> None:
    try:
        procs.stop()
    except (MeshError, TimeoutError):
        traceback.print_exc()
