"""Endpoints of a mesh of actors, and the adverbs by which they are called."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from meshbook.actor.classes import EndpointInfo
from meshbook.actor.decorators import Endpoint, P, R
from meshbook.actor.errors import NoEndpointError
from meshbook.actor.futures import ActorFuture, Stream, only_value
from meshbook.actor.identity import ActorIdentity, CalledView, argument_names, name_view
from meshbook.actor.ports import Port
from meshbook.actor.router import Address, Values
from meshbook.concurrency.future import Future, MappedFuture
from meshbook.errors import LayoutError, SerializationError, UsageError
from meshbook.formatting import format_sizes
from meshbook.shape.members import Region
from meshbook.shape.value_mesh import ValueMesh
from meshbook.shape.view import members_of
from meshbook.values.pickling import Pickled, dumps

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh


T = TypeVar("T")
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
        return self._call(to, name_view(to.members), args, kwargs, _same)

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
        stream: Stream[R] = Stream(len(self._members), self._group, self._info.name)
        stream.begin(self._group.call(to, self._info.name, pickled, on_reply=stream.on_reply, fail_fast=False))
        return stream

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it on every actor without waiting; what fails is told to the owner of the actors."""
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
        self._group.check_usable(self._info.name)
        return self._group.find(self._members, endpoint=self._info.name)

    def _call(
        self, to: Address, view: CalledView, args: Args, kwargs: Kwargs, make: Callable[[Values], T]
    ) -> ActorFuture[T]:
        group, name = self._group, self._info.name
        pickled = self._pack(view, args, kwargs)
        group.called = True
        return ActorFuture(group.call(to, name, pickled), make, group, name)

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
    """A method of the actors that no process but theirs can call, except by `as_endpoint`."""

    def __init__(self, mesh: ActorMesh[object], group: ActorIdentity, name: str) -> None:
        self.mesh, self.group, self.name = mesh, group, name

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("call", "call_one", "choose", "stream", "broadcast"):
            self()
        raise AttributeError(name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NoEndpointError(self.group.cls.name, self.name, self.group.cls.endpoints, is_method=True)


def _choose(to: Address) -> Address:
    """One of them, at random."""
    return msgspec.structs.replace(to, members=Region.build(random.choice(list(to.members.ranks())), []))


def _same(values: Values) -> Values:
    return values


def send(
    endpoint: Endpoint[..., R],
    args: Args,
    kwargs: Kwargs,
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] = "all",
) -> None:
    """Call an endpoint without waiting; every answer is sent to ``port``.

    selection: all actors, or one of them, chosen at random. What is raised goes to ``port`` as an exception; without
    a port it is told to the owner of the actors.
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
        """Call, and fold in the order in which the answers come. Raises, when asked: what the call raises."""
        parts = list(self._endpoint.stream(*args, **kwargs))
        return MappedFuture(_when_all_have_come(parts), lambda _: self._fold(parts))

    def _fold(self, parts: Sequence[Future[R]]) -> A:
        return functools.reduce(self._combine, (part.get(0) for part in parts), self._identity)


def _when_all_have_come(parts: Sequence[Future[R]]) -> Future[None]:
    """Done when all have an outcome, whichever."""

    def cancel() -> None:
        for part in parts:
            part.cancel()

    left = set(range(len(parts)))
    done: Future[None] = Future(on_cancel=cancel)

    def come(index: int) -> None:
        left.discard(index)
        if not left:
            done.set_result(None)

    for index, part in enumerate(parts):
        part.add_done_callback(lambda _, index=index: come(index))  # type: ignore[misc]
    return done
