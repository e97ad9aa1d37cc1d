"""Meshes of actors, and meshes of processes as their ranks know them: views that can be sliced, spawned on and sent.

`ActorMesh` is one actor per point, or a view of some of them. `ProcMesh.spawn` returns it, and messages carry it. A
reference is small: session, mesh, mailbox, members, and the names and parameters of the endpoints; not the class. It
works in every process of the session.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

from meshbook.actor.classes import RELOAD, check_construction, describe_class, newest_class, refusal
from meshbook.actor.context import EndsWithBlock, context
from meshbook.actor.endpoint import ActorEndpoint, ActorFuture, NotAnEndpoint, only_value
from meshbook.actor.errors import ActorError, ActorLostError, NoEndpointError, SupervisionError
from meshbook.actor.identity import ActorIdentity, argument_names, forget_group, keep_group, name_view
from meshbook.actor.ports import Port, one_member
from meshbook.actor.router import (
    ACTORS,
    READY,
    ROOT,
    STOP,
    WATCH,
    Address,
    Router,
    TActor,
    Values,
    current_router,
    router_for,
)
from meshbook.actor.supervision import INIT, SUPERVISE, MeshFailure, failures_of
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import CONTROLLER_MESH
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future
from meshbook.errors import (
    Failure,
    FailureKind,
    MeshError,
    MeshStoppedError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from meshbook.formatting import format_sizes
from meshbook.shape.members import Members, MeshView, Region, members_of
from meshbook.source.location import sources_of
from meshbook.values.pickling import dumps

TActor_co = TypeVar("TActor_co", covariant=True)


class ActorMesh(EndsWithBlock, MeshView, Generic[TActor_co]):
    """A mesh of actors, arranged as their processes are; views cost nothing. Its attributes are the endpoints."""

    def __init__(self, group: ActorIdentity, members: Members) -> None:
        super().__init__(members)
        self._group = group

    @property
    def name(self) -> str:
        return self._group.name

    @property
    def initialized(self) -> Future[None]:
        """A future that completes when all actors have been made. Raises, when asked: ActorError of ``__init__``."""
        group = self._group
        if group.initialized is None:  # a reference that was sent here
            source = group.call(
                group.find(group.members, partly=True), READY, dumps(((), {}), what="ready"), fail_fast=False
            )
            group.initialized = ActorFuture(source, _nothing, group.name, INIT)
        return group.initialized

    @property
    def is_stopped(self) -> bool:
        """Whether they were stopped from this process."""
        return self._group.stopped is not None

    def _part(self, members: Members) -> ActorMesh[TActor_co]:
        return ActorMesh(self._group, members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_group":
            raise AttributeError(name)
        group = self._group
        if (info := group.cls.endpoints.get(name)) is not None:
            return ActorEndpoint(self, group, info)
        if name in group.cls.methods:
            return NotAnEndpoint(self, group, name)
        if name == "reload":  # not an attribute of the class: an endpoint may be called so
            return self._reload
        raise NoEndpointError(group.cls.name, name, group.cls.endpoints)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), "reload", *self._group.cls.endpoints})

    def _reload(self, cls: type | None = None, *, timeout: float | None = None) -> None:
        """Give all actors of the mesh, those outside this view too, their class as it is now; they keep their state.

        Waits until they have handled all earlier messages. cls: by default the notebook's class of the same name.
        timeout: seconds. Raises: ReloadError where living actors cannot take it; as calls do.
        """
        group = self._group
        group.check_usable()
        cls = newest_class(group.cls.name) if cls is None else cls
        described = describe_class(cls, RESERVED)
        pickled = dumps(((sources_of(cls), cls), {}), what=cls.__qualname__)
        source = group.call(group.find(group.members, partly=True), RELOAD, pickled, fail_fast=False)
        try:
            ActorFuture(source, _nothing, group.name, "reload").get(timeout)
        except ActorError as error:
            raise refusal(error, group.name) from None
        group.cls = described

    def stop(self, reason: str = "stopped by client") -> Future[None]:
        """End all actors of the mesh, those outside this view too, after all earlier messages; `__cleanup__` runs.

        A call that takes longer than 3 s is interrupted, or dropped: its callers are told that the actors were stopped.
        Actors that they have spawned end after them. The processes live on. Done when the actors have ended.
        Idempotent.
        Raises, when asked: ActorError of an ActorStuckError where one takes no interrupt.
        """
        group = self._group
        if group.stopped is not None:
            return Future.completed(None)
        group.stopped = reason
        forget_group(group)
        pickled = dumps(((), {}), what="stop")
        to: Address | None = None
        while True:
            try:
                to = to or group.find(group.members, partly=True)
                source = group.call(to, STOP, pickled, fail_fast=False)
            except (SupervisionError, MeshStoppedError) as gone:
                if to is None or not isinstance(gone, ActorLostError):
                    return Future.completed(None)
                left = [rank for rank in to.members.ranks() if rank not in gone.ranks]
                if not left:
                    return Future.completed(None)
                to = msgspec.structs.replace(to, members=to.members.select(left))
            else:
                return ActorFuture(source, _nothing, group.name, "stop")

    @property
    def was_called(self) -> bool:
        """Whether this process has called the actors, and so learns of their end by that call."""
        return self._group.called

    def remember_fault(self, failure: MeshFailure) -> None:
        """Have the next use of these actors raise `UnhandledFault`."""
        self._group.faults.append(failure)

    def __reduce__(self) -> tuple[object, ...]:
        return ActorMesh, (self._group, self._members)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorMesh):
            return NotImplemented
        mine, theirs = self._group, other._group
        return (mine.session, mine.mailbox, self._members) == (theirs.session, theirs.mailbox, other._members)

    def __hash__(self) -> int:
        return hash((self._group.session, self._group.mailbox))

    def __repr__(self) -> str:
        group = self._group
        state = ", stopped" if group.stopped is not None else ""
        endpoints = ", ".join(group.cls.endpoints) or "no endpoints"
        where = f'"{group.mesh_name}", ' if group.mesh_name else ""
        return f'ActorMesh("{group.name}", {group.cls.name}, {where}{format_sizes(self.sizes)}{state}): {endpoints}'


RESERVED = frozenset(name for name in dir(ActorMesh) if not name.startswith("__"))
"""Names that endpoints cannot have: every mesh of actors has attributes of these names."""


def spawn_actors(  # the pieces of a ProcMesh, which stands above this module
    router: Router,
    mesh: int,
    mesh_name: str,
    members: Members,
    name: str,
    cls: type[TActor],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    generation: int,
) -> TActor:
    """Have an actor made in every process of ``members``; does not wait for it.

    generation: in which these are numbered so.
    Raises: RanksLeft, UsageError if ``cls`` is no class of actors, ArgumentsError, SerializationError.
    """
    described = describe_class(cls, RESERVED)
    check_construction(cls, name, args, kwargs)
    if not isinstance(name, str) or not name:
        raise UsageError(f'actors need a name, as in spawn("counters", {cls.__name__}); got {name!r}.')
    to = router.find(mesh, members, generation)
    members, generation = to.members, to.generation
    group = ActorIdentity(router.session, mesh, mesh_name, router.new_mailbox(), name, described, members, generation)
    actors: ActorMesh[TActor] = ActorMesh(group, members)
    owner, creator = router.supervisor, context().actor_instance
    payload = ((name_view(members), actors, owner, creator, sources_of(cls), cls, *args), kwargs)
    try:
        pickled = group.pack(payload, what=cls.__qualname__)
    except SerializationError:  # once more, to say which argument it was
        pickled = dumps(payload, what=cls.__qualname__, roots={cls.__qualname__: cls, **argument_names(args, kwargs)})
    group.owner = owner
    request = CallRequest(
        f"{group.mailbox}:{router.session}:{name}", members, pickled, f"{cls.__qualname__}()", mesh, ACTORS,
        generation, fail_fast=False, on_reply=functools.partial(_on_made, actors, owner),
    )  # fmt: skip
    spawned = router.call(request)
    group.initialized = ActorFuture(spawned, _nothing, group.name, INIT)
    keep_group(group)
    if router.place.mesh and owner is not None:  # an actor: nobody else tells it
        watch(actors, owner)
    if (belongings := context().belongings) is not None:
        belongings.add(actors)
    return cast(TActor, actors)


def _on_made(
    actors: ActorMesh[object],
    owner: Port[MeshFailure] | None,
    rank: int,
    ok: bool,
    duration_s: float,
    failure: Failure | None,
    waited_s: float,
) -> None:
    """Tell the owner at once of an actor that could not be made. Runs on the thread that serves the sockets."""
    if ok or failure is None or failure.kind in _NO_FAULTS:
        return
    told = MeshFailure(actors, f"{actors.name}.{INIT}", [failure._replace(exception=None)])

    def tell() -> None:
        if owner is not None:
            with contextlib.suppress(MeshError):  # it has ended
                owner.post(SUPERVISE, told)
                return
        print(told.report(), flush=True)

    run_in_background(tell)


_NO_FAULTS = frozenset({FailureKind.LOST, FailureKind.INTERRUPTED, FailureKind.CLOSED})
"""Failures that are no fault of a constructor: the owner hears of ended processes anyway, and a stop is no fault."""


def watch(actors: ActorMesh[object], owner: Port[MeshFailure]) -> None:
    """Tell ``owner`` when processes of ``actors`` end, until the actors were stopped."""
    group = actors._group

    def on_end(done: Future[Values]) -> None:
        error = done.exception(0)
        if not isinstance(error, WorkerLost):
            return
        both = zip(to.then.ranks(), to.members.ranks(), strict=True)
        left = [then for then, now in both if now not in error.ranks]
        with contextlib.suppress(MeshError):  # the owner has ended, or the mesh of the actors
            failures = failures_of(error)
            owner.post(SUPERVISE, MeshFailure(ActorMesh(group, group.members), group.name, failures))
            if left:
                watch(actors.select(left), owner)

    to = group.find(members_of(actors), partly=True)
    group.call(to, WATCH, dumps(((), {}), what="watch")).add_done_callback(on_end)


def procs_of(actors: ActorMesh[Any]) -> MeshView:
    """The processes in which they live, as this process knows them."""
    group = actors._group
    router = router_for(group.session)
    return router.procs(group.session, group.mesh, group.mesh_name, members_of(actors), group.generation)


def _nothing(values: object) -> None:
    return None


class ProcRef(EndsWithBlock, MeshView):
    """A `ProcMesh` that was sent to a rank. Sent back to the process that drives the mesh, it is a ProcMesh again."""

    def __init__(self, session: str, mesh: int, name: str, members: Members, generation: int) -> None:
        """generation: in which ``members`` have their numbers (`meshbook.shape.members`)."""
        super().__init__(members)
        self.session, self.id, self.name, self._generation = session, mesh, name, generation
        self._stopped = False

    def _part(self, members: Members) -> ProcRef:
        return ProcRef(self.session, self.id, self.name, members, self._generation)

    def spawn(self, name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> TActor:
        """Make an actor in every process, as `ProcMesh.spawn` does; the actor that runs now is their owner."""
        router = router_for(self.session)
        return spawn_actors(router, self.id, self.name, self._members, name, cls, args, kwargs, self._generation)

    @property
    def initialized(self) -> Future[bool]:
        """True: who has a reference to processes has it since they are there."""
        return Future.completed(True)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by this reference."""
        return self._stopped

    def stop(self, reason: str = "stopped by an actor") -> Future[None]:
        """End every process of the mesh, views included; done when none is left. Idempotent.

        Raises: UsageError where it is the program's own.
        """
        if self.id == CONTROLLER_MESH:
            raise UsageError("this is the process of the program itself; meshbook.shutdown() ends what it has started.")
        self._stopped = True
        return ask_controller("stop_procs", (self,), {}, "procs")

    def __reduce__(self) -> tuple[object, ...]:
        return find_procs, (self.session, self.id, self.name, self._members, self._generation)

    def __repr__(self) -> str:
        if self.id == CONTROLLER_MESH:
            return "ProcMesh(the process of the program)"
        return f'ProcMesh("{self.name}", {format_sizes(self.sizes)}), as a rank knows it'


def find_procs(session: str, mesh: int, name: str, members: Members, generation: int) -> MeshView:
    """The mesh of processes that a reference means."""
    return router_for(session).procs(session, mesh, name, members, generation)


def ask_controller(
    endpoint: str, args: tuple[object, ...], kwargs: Mapping[str, object], name: str
) -> ActorFuture[Any]:
    """Ask the process that drives the meshes (`meshbook.mesh.actor_router`) for something, from a rank."""
    what = f"{name}.{endpoint}"
    pickled = dumps((args, dict(kwargs)), what=what)
    source = current_router().call(CallRequest(endpoint, one_member(0), pickled, what, mailbox=ROOT))
    return ActorFuture(source, only_value, name, endpoint)


def this_proc() -> ProcRef:
    """The process in which this runs, as a mesh without axes: that of a rank, or that of the program."""
    router = current_router()
    place = router.place
    return ProcRef(router.session, place.mesh, "", Region.build(place.rank, []), place.generation)
