"""Endpoints of a mesh of actors, the adverbs by which they are called, and the futures that calls give back.

The errors of these futures speak of actors (`translate`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from meshbook.actor.classes import Endpoint, EndpointInfo, P, R
from meshbook.actor.context import context
from meshbook.actor.errors import (
    ActorError,
    ActorLostError,
    ActorNotMadeError,
    ActorStoppedError,
    NoEndpointError,
    ProcsStoppedError,
    SupervisionError,
    why_stopped,
)
from meshbook.actor.identity import ActorIdentity, CalledView, argument_names, name_view
from meshbook.actor.ports import Port
from meshbook.actor.router import Address, Answers, Values
from meshbook.concurrency.future import Future, MappedFuture
from meshbook.errors import (
    CallFailed,
    Failure,
    FailureKind,
    LayoutError,
    MailboxClosed,
    MeshDetachedError,
    MeshStoppedError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from meshbook.formatting import format_sizes
from meshbook.shape.members import Region, members_of
from meshbook.shape.value_mesh import ValueMesh
from meshbook.values.pickling import Pickled, dumps

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh


T = TypeVar("T")


def translate(error: BaseException, actor: str, endpoint: str) -> BaseException:
    """Return the error of a call to a mailbox as one of actors. actor: their name."""
    if isinstance(error, SupervisionError):
        return error
    if isinstance(error, WorkerLost):
        return ActorLostError.of_worker(error, actor)
    if isinstance(error, MeshStoppedError) and not isinstance(error, MeshDetachedError):
        return ProcsStoppedError(error.mesh)
    if isinstance(error, CallFailed) and not isinstance(error, ActorError):
        closed = [failure for failure in error.failures if failure.kind is FailureKind.CLOSED]
        if closed and len(closed) == len(error.failures):
            errors = [failure.load() for failure in closed]
            whys = [error.why if isinstance(error, MailboxClosed) else None for error in errors]
            restarted = () if any(why != "" for why in whys) else sorted(failure.rank for failure in closed)
            plain = why_stopped(actor)  # behind that stands the reason of an actor that has ended itself
            reason = next((why.removeprefix(f"{plain}: ") for why in whys if why and why != plain), "")
            return ActorStoppedError(actor, reason, ended_with=restarted)  # started again: they never had the actor
        kind = ActorNotMadeError if any(failure.unmade for failure in error.failures) else ActorError
        told = kind(error.failures, f"{actor}.{endpoint}", partial=error.partial)
        told.freed, told.freed_s, told.groups = error.freed, error.freed_s, error.groups
        told.torn = error.torn
        return told
    return error


class ActorFuture(MappedFuture[Values, T], Generic[T]):
    """The outcome of a call, made of its `RequestFuture` by ``make``, on the thread that asks for it."""

    def __init__(self, source: Answers, make: Callable[[Values], T], actor: str, endpoint: str) -> None:
        """actor, endpoint: the names of the actors and of the endpoint, for errors."""
        super().__init__(source, make)
        self._call, self._names = source, (actor, endpoint)

    def get(self, timeout: float | None = None) -> T:
        """Wait for all actors that were called.

        timeout: seconds. Raises: ActorError, SupervisionError; CallTimeout, which names the silent
        ranks; CallInterrupted if the person interrupts, and then the endpoint is interrupted where it runs.
        """
        try:
            if timeout is not None or not self._call.name_in_chain:  # as the notebook's calls
                return super().get(timeout)
            with context().waiting_for(self._call.name_in_chain):
                return super().get()
        except (CallFailed, WorkerLost, MeshStoppedError) as error:
            told = translate(error, *self._names)
            raise told from told.__cause__

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with context().waiting_for(self._call.name_in_chain if timeout is None else 0):
            error = super().exception(timeout)
        return None if error is None else translate(error, *self._names)

    def __await__(self) -> Generator[object, None, T]:
        """Wait without blocking the running asyncio loop; an interrupt reaches the actors, as with `get`."""
        try:
            with context().waiting_for(self._call.name_in_chain):
                return (yield from super().__await__())
        except (CallFailed, WorkerLost, MeshStoppedError) as error:
            told = translate(error, *self._names)
            raise told from told.__cause__
        except BaseException as error:
            from asyncio import CancelledError  # only here: who awaits has it, controllers start faster without

            if isinstance(error, CancelledError) and context().interrupted:
                self.cancel()  # who has called us does not want it any more
            raise


class Stream(Generic[T]):
    """Futures of the answers of a call, in the order in which they come: one for each actor."""

    def __init__(self, count: int, actor: str, endpoint: str) -> None:
        self.names = (actor, endpoint)
        self._lock = threading.Lock()
        self._parts: list[_Part[T]] = [_Part(self) for _ in range(count)]
        self._come = 0
        self._given = 0
        self.source: Answers | None = None

    def begin(self, source: Answers) -> None:
        """The call has been made."""
        self.source = source
        source.add_done_callback(self._on_end)

    def on_reply(self, rank: int, ok: bool, duration_s: float, failure: Failure | None, waited_s: float) -> None:
        """Complete the next part. Runs on the thread that serves the sockets."""
        with self._lock:
            part = self._parts[self._come]
            self._come += 1
        part.rank, part.failure = rank, None if ok else failure
        part.set_result(None)  # type: ignore[arg-type]  # a wake-up only

    def _on_end(self, source: Future[Values]) -> None:
        """Complete the parts that no rank will answer, since the mesh was stopped, say."""
        with self._lock:
            left, self._come = self._parts[self._come :], len(self._parts)
        for part in left:
            part.error = source.exception(0) or RuntimeError("the call has ended without an answer")
            part.set_result(None)  # type: ignore[arg-type]

    def value_of(self, part: _Part[T]) -> T:
        """Return the value of `_Part.get`. Raises: as `ActorFuture.get`."""
        assert self.source is not None
        if part.error is not None:
            raise translate(part.error, *self.names)
        call = self.source.call
        if part.failure is not None:
            lost = next((lost for lost in call.lost if lost.rank == part.rank), None)
            raise translate(lost or CallFailed([part.failure]), *self.names)
        value: T = call.results[part.rank]
        return value

    def __iter__(self) -> Iterator[Future[T]]:
        return self

    def __next__(self) -> Future[T]:
        if self._given == len(self._parts):
            raise StopIteration
        self._given += 1
        return self._parts[self._given - 1]

    def __len__(self) -> int:
        return len(self._parts)


class _Part(Future[T], Generic[T]):
    """The future of one of several answers."""

    def __init__(self, stream: Stream[T]) -> None:
        super().__init__(on_cancel=lambda: stream.source is not None and stream.source.cancel())
        self._stream = stream
        self.rank = -1
        self.failure: Failure | None = None
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        if (source := self._stream.source) is not None:
            source.serve(self.done, timeout)
        if self._final:
            return True
        return super().wait(None if until is None else max(0.0, until - time.monotonic()))

    def get(self, timeout: float | None = None) -> T:
        """Wait for it. An interrupt reaches all actors that have not answered."""
        try:
            super().get(timeout)
        except KeyboardInterrupt as pressed:
            if self._stream.source is None:
                raise
            raise self._stream.source.on_interrupt(pressed) from None
        return self._stream.value_of(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.get(timeout)
        except TimeoutError:
            if not self.done():
                raise
        except Exception as error:
            return error
        return None


def only_value(values: ValueMesh[T]) -> T:
    """The value of the one member."""
    return values.values()[0]


A = TypeVar("A")
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = Mapping[str, object]


class ActorEndpoint(Generic[P, R]):
    """An endpoint of a mesh of actors; see `meshbook.actor.Endpoint` for the adverbs."""

    def __init__(self, mesh: ActorMesh[object], group: ActorIdentity, info: EndpointInfo) -> None:
        self._mesh, self._group, self._members, self._info = mesh, group, members_of(mesh), info
        self._what = f"{group.name}.{info.name}"
        self.__name__, self.__doc__ = info.name, info.doc or None
        self.__signature__ = info.signature or inspect.Signature()

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call it on every actor; the values of all."""
        to = self._find()
        return self._call(to, name_view(to.members), args, kwargs, lambda values: values)

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on the only actor. Raises: LayoutError if there are several."""
        if len(self._members) != 1:
            raise LayoutError(
                f"call_one calls one actor, and {self._group.name} has {format_sizes(self._members.sizes)} here. "
                f"Slice it first ({self._example()}), or use call or choose."
            )
        to = self._find()
        return self._call(to, name_view(to.members), args, kwargs, only_value)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on one actor, chosen at random."""
        to = self._find()
        return self._call(_choose(to), to.members, args, kwargs, only_value)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call it on every actor; futures of the values in the order in which they come."""
        to = self._find()
        pickled = self._pack(name_view(to.members), args, kwargs)
        stream: Stream[R] = Stream(len(self._members), self._group.name, self._info.name)
        stream.begin(self._group.call(to, self._info.name, pickled, on_reply=stream.on_reply, fail_fast=False))
        return stream

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it on every actor without waiting; failures are told to the owner of the actors."""
        self.post(args, kwargs, None, one=False)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on every actor, and leave the tensors that it returns on the ranks, as those of the local view."""
        self._info.check(self._group.name, args, kwargs)
        results = importlib.import_module("meshbook.tensors.handles.monarch_names")  # which stands above us
        made: R = results.rref(self._mesh, self._info.name, args, kwargs)
        return made

    def post(self, args: Args, kwargs: Kwargs, port: Port[R] | None, one: bool) -> None:
        """Call it on every actor, or on a random one, and have the answers sent to ``port``."""
        to = self._find()
        view = to.members if one else name_view(to.members)
        pickled = self._pack(view, args, kwargs, port)
        self._group.call(_choose(to) if one else to, self._info.name, pickled, reply=False)

    def _find(self) -> Address:
        self._group.check_usable()
        return self._group.find(self._members)

    def _call(
        self, to: Address, view: CalledView, args: Args, kwargs: Kwargs, make: Callable[[Values], T]
    ) -> ActorFuture[T]:
        group, name = self._group, self._info.name
        pickled = self._pack(view, args, kwargs)
        group.called = True
        return ActorFuture(group.call(to, name, pickled), make, group.name, name)

    def _pack(self, view: CalledView, args: Args, kwargs: Kwargs, port: Port[R] | None = None) -> Pickled:
        self._info.check(self._group.name, args, kwargs)
        payload = ((view, port, *args), kwargs)
        try:
            return self._group.pack(payload, what=self._what)
        except SerializationError:  # once more, to say which argument it was
            return dumps(payload, what=self._what, roots=argument_names(args, kwargs))

    def _example(self) -> str:
        axes = ", ".join(f"{axis}=0" for axis, size in self._members.sizes.items() if size > 1)
        return f"{self._group.name}.slice({axes})"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        name = self._what
        raise UsageError(f"{name} is an endpoint of actors: {name}.call(...), .call_one, .broadcast, .choose, .stream")

    def __repr__(self) -> str:
        signature = self._info.signature or "(...)"
        return f"<endpoint {self._what}{signature} of {format_sizes(self._members.sizes)}>"


class NotAnEndpoint:
    """A method of the actors that other processes can call by `as_endpoint` only."""

    def __init__(self, mesh: ActorMesh[object], group: ActorIdentity, name: str) -> None:
        self.mesh, self.group, self.name = mesh, group, name

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("call", "call_one", "choose", "stream", "broadcast"):
            self()
        raise AttributeError(name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NoEndpointError(self.group.cls.name, self.name, self.group.cls.endpoints, is_method=True)


def _choose(to: Address) -> Address:
    """Return the address of a random member."""
    return msgspec.structs.replace(to, members=Region.build(random.choice(list(to.members.ranks())), []))


def send(
    endpoint: Endpoint[..., R],
    args: Args,
    kwargs: Kwargs,
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Call an endpoint without waiting; every answer is sent to ``port``.

    selection: all actors, or one of them, chosen at random. An error goes to ``port`` as an exception; without a port
    it is told to the owner of the actors.
    """
    if not isinstance(endpoint, ActorEndpoint):
        raise UsageError(f"send takes an endpoint of actors, as in send(actors.step, (), {{}}); got {endpoint!r}.")
    if selection not in ("all", "choose"):
        raise UsageError(f'selection must be "all" or "choose", not {selection!r}.')
    endpoint.post(args, kwargs, port, selection == "choose")


def as_endpoint(
    method: Callable[P, R], *, propagate: object = None, explicit_response_port: bool = False
) -> Endpoint[P, R]:
    """Call a method of actors that is not decorated: ``as_endpoint(actors.reset).call()``."""
    found: object = method
    if isinstance(found, ActorEndpoint):
        return found
    if not isinstance(found, NotAnEndpoint):
        raise UsageError(
            f"as_endpoint takes a method of a mesh of actors, as in as_endpoint(actors.reset); got {found!r}."
        )
    info = EndpointInfo(found.name, wants_port=explicit_response_port)
    return ActorEndpoint(found.mesh, found.group, info)


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on all actors and folds the answers: ``combine(combine(identity, first), second) ...``."""

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint, self._identity, self._combine = endpoint, identity, combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call, and fold in the order in which the answers come. Raises, when asked: the errors of the call."""
        stream = self._endpoint.stream(*args, **kwargs)
        assert isinstance(stream, Stream) and stream.source is not None
        parts = list(stream)

        def fold(_: Values) -> A:
            return functools.reduce(self._combine, (part.get(0) for part in parts), self._identity)

        return ActorFuture(stream.source, fold, *stream.names)
