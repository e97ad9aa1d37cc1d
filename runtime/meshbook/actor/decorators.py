"""What a class says of its endpoints: `endpoint`, `concurrent_endpoint`, and the base class `Actor`.

A decorated method stays a plain method of the object, callable as ``self.step()``. On a mesh of actors it is an
`Endpoint`, which is how type checkers and editors see it:

    class Trainer(Actor):
        @endpoint
        def step(self, batch: int) -> float: ...

    trainers = procs.spawn("trainers", Trainer)      # for a type checker: a Trainer
    trainers.step.call(3)                            # Future[ValueMesh[float]]
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.ports import Port
    from meshbook.shape.members import Extent, Index

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")


class Endpoint(Protocol[P, R]):
    """An endpoint of a mesh of actors. Messages of one sender arrive in the order in which they were sent."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call it on every actor; the values of all."""

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on the only actor. Raises: LayoutError if there are several."""

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it on one actor, chosen at random."""

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call it on every actor; futures of the values in the order in which they come."""

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call it on every actor without waiting; what fails is told to the owner of the actors."""

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on every actor, and leave the tensors that it returns on the ranks, as those of the local view."""


class EndpointMethod(Generic[P, R]):
    """What the decorators make of a method."""

    def __init__(self, method: Callable[..., object], *, concurrent: bool, explicit_response_port: bool) -> None:
        self.method, self.concurrent, self.explicit_response_port = method, concurrent, explicit_response_port
        self.__doc__, self.__name__ = method.__doc__, getattr(method, "__name__", "endpoint")
        self.__wrapped__ = method

    @overload
    def __get__(self, instance: None, owner: type) -> EndpointMethod[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Endpoint[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> object:
        return self if instance is None else self.method.__get__(instance, owner)


class _Decorator(Protocol):
    @overload
    def __call__(self, method: Callable[Concatenate[Self, P], Awaitable[R]]) -> EndpointMethod[P, R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Self, P], R]) -> EndpointMethod[P, R]: ...


class _PortDecorator(Protocol):
    def __call__(self, method: Callable[Concatenate[Self, Port[R], P], object]) -> EndpointMethod[P, R]: ...


if TYPE_CHECKING:
    from typing import Literal

    @overload
    def endpoint(method: Callable[Concatenate[Self, P], Awaitable[R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def endpoint(method: Callable[Concatenate[Self, P], R], /) -> EndpointMethod[P, R]: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Decorator: ...
    @overload
    def endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _PortDecorator: ...
    def endpoint(method: object = None, **options: object) -> object: ...
    @overload
    def concurrent_endpoint(method: Callable[Concatenate[Self, P], Awaitable[R]], /) -> EndpointMethod[P, R]: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[False] = False, instrument: bool = True
    ) -> _Decorator: ...
    @overload
    def concurrent_endpoint(
        *, propagate: object = None, explicit_response_port: Literal[True], instrument: bool = True
    ) -> _PortDecorator: ...
    def concurrent_endpoint(method: object = None, **options: object) -> object: ...

else:

    def endpoint(method=None, /, *, propagate=None, explicit_response_port=False, instrument=True):
        """Let a method be called from other processes; it may be ``async def``.

        explicit_response_port: its first argument is a `Port`, on which it, or whoever it gives that to, answers.
        propagate, instrument: accepted, since Monarch has them; without effect.
        """

        def decorate(method):
            return EndpointMethod(method, concurrent=False, explicit_response_port=explicit_response_port)

        return decorate if method is None else decorate(method)

    def concurrent_endpoint(method=None, /, *, propagate=None, explicit_response_port=False, instrument=True):
        """As `endpoint`, for an ``async def`` that does not keep the actor from taking other messages meanwhile."""

        def decorate(method):
            _check_concurrent(method)
            return EndpointMethod(method, concurrent=True, explicit_response_port=explicit_response_port)

        return decorate if method is None else decorate(method)


def _check_concurrent(method: object) -> None:
    """Raises: UsageError where the decorator is written."""
    name = getattr(method, "__qualname__", None) or getattr(method, "__name__", repr(method))
    if isinstance(method, EndpointMethod):
        raise UsageError(f"{name} has both decorators: @concurrent_endpoint does not wrap @endpoint, it replaces it.")
    if not inspect.iscoroutinefunction(method):
        raise UsageError(f"{name} must be declared `async def`: @concurrent_endpoint can only wrap async endpoints.")


class Actor:
    """Base of the classes that can be spawned. Each actor handles one message at a time, on a thread of its own.

    ``__supervise__(self, failure) -> bool`` is told of failures of meshes that it has spawned; True: it has dealt with
    it. ``__cleanup__(self, error)`` runs when the actor is stopped; either may be ``async``.
    """

    @property
    def logger(self) -> logging.Logger:
        """A logger with the name of the class."""
        return logging.getLogger(type(self).__qualname__)

    if TYPE_CHECKING:  # what the mesh has that `spawn` returns
        extent: Extent
        sizes: dict[str, int]
        name: str
        initialized: Future[None]

        def slice(self: Self, **axes: Index) -> Self: ...
        def split(self: Self, **axes: Sequence[str] | int) -> Self: ...
        def flatten(self: Self, name: str) -> Self: ...
        def rename(self: Self, **names: str) -> Self: ...
        def size(self, axes: str | Iterable[str] | None = None) -> int: ...
        def stop(self, reason: str = "stopped by client") -> Future[None]: ...
        def reload(self, cls: type | None = None, *, timeout: float | None = None) -> None: ...
        def __len__(self) -> int: ...
        async def __aenter__(self: Self) -> Self: ...
        async def __aexit__(self, *error: object) -> None: ...
