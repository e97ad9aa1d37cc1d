"""Monarch's functions over endpoints: `send`, `as_endpoint`, and `Accumulator`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from meshbook.actor.actor_endpoint import ActorEndpoint, NotAnEndpoint
from meshbook.actor.endpoints import Endpoint
from meshbook.actor.ports import Port
from meshbook.errors import UsageError
from meshbook.future import Future
from meshbook.joined_futures import MappedFuture
from meshbook.value_mesh import ValueMesh

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


def send(
    endpoint: Endpoint[Any, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
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
    method: Callable[P, R], *, propagate: Any = None, explicit_response_port: bool = False
) -> Endpoint[P, R]:
    """Call a method of actors that is not decorated: ``as_endpoint(actors.reset).call()``."""
    found: Any = method
    if isinstance(found, ActorEndpoint):
        return found
    if not isinstance(found, NotAnEndpoint):
        raise UsageError(
            f"as_endpoint takes a method of a mesh of actors, as in as_endpoint(actors.reset); got {found!r}."
        )
    return found.as_endpoint(explicit_response_port)


class Accumulator(Generic[P, R, A]):
    """Calls an endpoint on all actors and folds the answers: ``combine(combine(identity, first), second) ...``."""

    def __init__(self, endpoint: Endpoint[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint, self._identity, self._combine = endpoint, identity, combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> Future[A]:
        """Call, and fold in the order of the ranks. Raises, when asked: what the call raises."""

        def fold(values: ValueMesh[R]) -> A:
            return functools.reduce(self._combine, values.values(), self._identity)

        return MappedFuture(self._endpoint.call(*args, **kwargs), fold)
