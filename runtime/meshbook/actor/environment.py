"""What an actor needs of its process, and what it makes of a message before the endpoint runs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from meshbook.actor.ports import Port
from meshbook.actor.supervision import MeshFailure
from meshbook.errors import Failure
from meshbook.shape.members import Members, Point, Region
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.actor.runner import ActorRunner


class ActorEnvironment(Protocol):
    """What an actor needs of its process."""

    def describe(self, error: BaseException) -> Failure:
        """A failure of what user code has raised."""

    def end_child(self, failure: Failure | None) -> None:
        """Where a message has been handled: end the process if user code has forked it meanwhile."""

    def output_of(self, output: int) -> contextlib.AbstractContextManager[object]:
        """What is printed inside belongs to ``output``, and has been sent at the end."""

    @property
    def rank(self) -> int:
        """The process's base rank in its mesh."""

    @property
    def mesh_name(self) -> str:
        """The name of its mesh."""

    def port_to(self, mailbox: int) -> Port[Any]:
        """Reaches a mailbox of this process from anywhere."""

    def tell_owner(self, host: ActorRunner, failure: MeshFailure) -> None:
        """Something failed for which nobody waits."""

    def actor_ended(self, host: ActorRunner, fault: BaseException | None) -> None:
        """The thread of an actor ends."""


@contextlib.contextmanager
def errors_to(port: Port[Any] | None) -> Generator[None, None, None]:
    """What is raised inside goes to the port, if the caller wants answers there."""
    try:
        yield
    except Exception as error:
        if port is None:
            raise
        port.exception(error)


def point_of(rank: int, call: wire.Call, view: str | Members) -> Point:
    """Where a rank stands in the view that was called; its labels suffice where the target is all of it."""
    if isinstance(view, str):
        view = Region(tuple(view.split(",")) if view else (), call.target[0])
    return view.point(rank)
