"""Errors of actors; they stand in the runtime's tree.

CallFailed   ── ActorError         an endpoint raised
MeshError    ── SupervisionError   actors that are not there any more (a RuntimeError too)
                ├── ActorLostError     their processes ended (a WorkerLost too)
                ├── ActorStoppedError  they were stopped
                ├── ProcsStoppedError  their mesh of processes was stopped (a MeshStoppedError too)
                └── ProcsNotStartedError  their processes have not come up (a SpawnError too)
UsageError   ── NoEndpointError    a name that is no endpoint (an AttributeError too)
             ── ArgumentsError     arguments that do not fit the endpoint's signature (a TypeError too)
             ── ReloadError        a class that cannot take the place of another in living actors
             ── MessageTooLargeError  arguments larger than the setting allows (a SupervisionError too)
             ── BufferKindError    memory that cannot be copied so (a TypeError too)
             ── BufferSizeError    memory that does not fit a buffer
MeshError    ── CircularCallError  a call to an actor that waits for it
             ── CallsTooDeepError  actors that call each other without end (a RecursionError too)
             ── ActorStuckError    an actor that was stopped and does not end
             ── BufferDroppedError a buffer that was dropped
             ── UnhandledFault     something failed for which nobody waited, and nobody handled it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshbook.errors import (
    CallFailed,
    Failure,
    FailureKind,
    MeshError,
    MeshStoppedError,
    SpawnError,
    UsageError,
    WorkerLost,
)
from meshbook.formatting import did_you_mean, format_bytes, name_ranks


class ActorError(CallFailed):
    """An endpoint raised. ``partial`` maps the ranks that succeeded to their results; equal causes are shown once."""

    def __init__(
        self, failures: Iterable[Failure], endpoint: str = "", partial: Mapping[int, object] | None = None
    ) -> None:
        super().__init__(failures, partial=partial)
        self.endpoint = endpoint
        self.args = (self.failures, endpoint)

    @property
    def exception(self) -> BaseException:
        """The exception of the first rank that raised; itself where that could not travel."""
        first = min(self.failures, key=lambda failure: failure.rank)
        try:
            return first.load() or self
        except Exception:  # its class does not exist here, or does not survive pickling
            return self

    def __str__(self) -> str:
        return f"Actor call {self.endpoint} failed: {super().__str__()}" if self.endpoint else super().__str__()


class SupervisionError(MeshError, RuntimeError):
    """Actors that are not there any more: their calls fail, now and later."""

    cause = "stopped"
    """The way in which they ended: ``killed by SIGKILL``."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose processes ended, in order; none where the actors were stopped."""
        return ()


class ActorNotMadeError(ActorError, SupervisionError):
    """A call to actors whose ``__init__`` raised, on some rank at least: there is nobody to call."""

    cause = "not made"


class ActorLostError(WorkerLost, SupervisionError):
    """Processes in which actors lived have ended."""

    @classmethod
    def of_worker(cls, lost: WorkerLost, actor: str) -> ActorLostError:
        """actor: the name of the actors whose processes they were."""
        error = cls(*lost.deaths[0], lost.deaths[1:], partial=lost.partial)
        error.actor = actor
        error.freed, error.freed_s, error.groups = lost.freed, lost.freed_s, lost.groups
        error.torn = lost.torn
        return error

    actor = ""

    def __str__(self) -> str:
        if not self.actor:
            return super().__str__()
        gone = (
            f'  the actors "{self.actor}" of {name_ranks(self.ranks)} ended with it; after a repair, spawn them again'
        )
        return f"{super().__str__()}\n{gone}"


class ProcsNotStartedError(SpawnError, SupervisionError):
    """Processes that did not come up, where `spawn_procs` had returned before."""

    cause = "not started"

    def __init__(self, mesh: str, why: str) -> None:
        super().__init__(mesh, why)
        self.mesh, self.why = mesh, why

    def __str__(self) -> str:
        return f'the processes "{self.mesh}" did not start: {self.why}'


class ActorsLeftError(SupervisionError):
    """A call to actors whose processes left when their mesh shrank."""

    def __init__(self, name: str, left: Iterable[int]) -> None:
        """left: their ranks, as they were numbered when the actors were made."""
        super().__init__(name, tuple(left))
        self.name, self.left = name, tuple(left)

    def __str__(self) -> str:
        return (
            f'the actors "{self.name}" of {name_ranks(self.left)} (as numbered when they were made) are no more: their '
            "processes left when the mesh shrank. Slice those that stayed, which keep their places here, or spawn "
            f'them all again: procs.spawn("{self.name}", ...)'
        )


class MessageTooLargeError(UsageError, SupervisionError):
    """A call whose arguments are larger than the setting ``codec_max_frame_length``; the actors live on."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(what, size_bytes, limit_bytes)
        self.what, self.size_bytes, self.limit_bytes = what, size_bytes, limit_bytes

    def __str__(self) -> str:
        return (
            f"arguments of {self.what} have {format_bytes(self.size_bytes)}, and the setting codec_max_frame_length "
            f"allows {format_bytes(self.limit_bytes)}. Raise that, or send parts, or an RDMABuffer."
        )


class NoEndpointError(UsageError, AttributeError):
    """A name that is no endpoint of the actors."""

    def __init__(self, cls: str, name: str, endpoints: Iterable[str], is_method: bool = False) -> None:
        self.cls, self.attribute, self.endpoints, self.is_method = cls, name, tuple(endpoints), is_method
        super().__init__(cls, name, self.endpoints, is_method)

    def __str__(self) -> str:
        if self.is_method:
            return (
                f"{self.cls}.{self.attribute} is a method, but no endpoint: decorate it with @endpoint, "
                f"or call it as as_endpoint(actors.{self.attribute}).call()"
            )
        known = ", ".join(self.endpoints) or "none"
        near = did_you_mean(self.attribute, self.endpoints)
        return f"{self.cls} has no endpoint {self.attribute}; it has: {known}.{near}"


class ArgumentsError(UsageError, TypeError):
    """Arguments that do not fit the signature of an endpoint."""


class ReloadError(UsageError):
    """A class that cannot take the place of another in living actors."""

    failure_kind = FailureKind.REFUSED


class ActorStoppedError(SupervisionError):
    """A call to actors that were stopped, or that ended with processes which were replaced.

    ended_with: the ranks of these processes, in order.
    """

    def __init__(self, name: str, reason: str = "", ended_with: Iterable[int] = ()) -> None:
        super().__init__(name, reason, tuple(ended_with))
        self.name, self.reason, self.ended_with = name, reason, tuple(ended_with)

    def __str__(self) -> str:
        again = f'Spawn them again: procs.spawn("{self.name}", ...)'
        if self.ended_with:
            was = "was" if len(self.ended_with) == 1 else "were"
            ranks = name_ranks(self.ended_with)
            return f'the actors "{self.name}" ended with {ranks}, which {was} started again. {again}'
        why = f" ({self.reason})" if self.reason else ""
        return f'the actors "{self.name}" were stopped{why}. {again}'


def why_stopped(actor: str, reason: str = "") -> str:
    """Return the reason with which the mailbox of an actor is closed: `meshbook.errors.calls.MailboxClosed.why`."""
    return f'the actors "{actor}" were stopped' + (f": {reason}" if reason else "")


class ProcsStoppedError(SupervisionError, MeshStoppedError):
    """A call to actors whose mesh of processes was stopped."""


class CircularCallError(MeshError):
    """A call to an actor that waits for this very call, and so would never take it."""

    def __init__(self, actor: str, waits_in: str, endpoint: str) -> None:
        super().__init__(actor, waits_in, endpoint)
        self.actor, self.waits_in, self.endpoint = actor, waits_in, endpoint

    def __str__(self) -> str:
        return (
            f"{self.actor}.{self.waits_in} waits for this call of {self.actor}.{self.endpoint}, and an actor takes one "
            f"message at a time: both would wait for ever. Do not wait there, or make {self.waits_in} a "
            "@concurrent_endpoint."
        )


class CallsTooDeepError(MeshError, RecursionError):
    """Actors call each other without end."""

    def __init__(self, what: str, depth: int) -> None:
        super().__init__(what, depth)
        self.what, self.depth = what, depth

    def __str__(self) -> str:
        return f"{self.what} is the last of {self.depth} calls of actors that wait for each other: endless recursion?"


class ActorStuckError(MeshError):
    """An actor that was stopped, and interrupted, and does not end. place: where it is, may be empty."""

    def __init__(self, actor: str, rank: int, place: str) -> None:
        super().__init__(actor, rank, place)
        self.actor, self.rank, self.place = actor, rank, place

    def __str__(self) -> str:
        where = f": it is at {self.place}" if self.place else ""
        return (
            f'the actor "{self.actor}" of rank {self.rank} takes no more calls, but does not end{where}, and has not '
            "heeded an interrupt. It ends with its process: procs.stop(), or procs.respawn(rank)."
        )


_CIRCLES = (CircularCallError, CallsTooDeepError)


def cause_of(error: BaseException) -> BaseException:
    """Return the error itself; of calls that go in circles the first error, not those made of it on the way."""
    if isinstance(error, ActorError) and isinstance(inner := error.exception, _CIRCLES):
        return inner
    return error


class UnhandledFault(MeshError):
    """Something failed for which nobody waited; told at the next use of the actors, once. They can be used again."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return self.report


class BufferKindError(UsageError, TypeError):
    """Memory that a buffer cannot be made of, or that one cannot be copied from or to."""


class BufferSizeError(UsageError):
    """Memory that is too small, or too large, for a buffer."""


class BufferDroppedError(MeshError):
    """A buffer whose owner has let go of it, or was asked to."""

    def __init__(self, buffer: str) -> None:
        super().__init__(buffer)
        self.buffer = buffer

    def __str__(self) -> str:
        return f"{self.buffer} was dropped. Make a new one of memory that is to be read or written, and pass that on."
