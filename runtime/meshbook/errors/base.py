"""The root of the errors, and all that are not about calls: mistakes, shapes, hosts and meshes, values that travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from meshbook.errors.advice import advice
from meshbook.errors.failures import Failure, FailureKind, RankDeath, describe_deaths
from meshbook.formatting import did_you_mean, format_bytes, format_sizes, name_ranks


class MeshError(Exception):
    """Base of all errors that meshbook raises."""

    failure_kind: ClassVar[FailureKind] = FailureKind.RAISED
    """The kind of the failure of a rank that raises it."""

    def _render_traceback_(self) -> list[str]:
        """Return the message alone for IPython: the frames in between are ours, not the user's."""
        return [f"{type(self).__name__}: {self}"]


def kind_of(error: BaseException) -> FailureKind:
    """Return the kind of the failure of a rank that raises ``error``."""
    if isinstance(error, MeshError):
        return error.failure_kind
    return FailureKind.INTERRUPTED if isinstance(error, KeyboardInterrupt) else FailureKind.RAISED


def failure_of(
    error: BaseException, rank: int, host: str, traceback: Iterable[str] | None = None, where: str = ""
) -> Failure:
    """Return the failure of a rank that raised ``error``; without a ``traceback`` the error's text stands for it."""
    name, text = type(error).__name__, str(error)
    lines = (f"{name}: {text}",) if traceback is None else tuple(traceback)
    return Failure(rank, host, name, text, lines, where, kind_of(error), exception=error)


DeviceMeshError = MeshError
"""Another name of the same class: programs with tensors catch it by this one."""


class UsageError(MeshError, ValueError):
    """A command or an argument that makes no sense as given; the message shows a valid one."""


class PeekRefused(UsageError):
    """A wait in a peek: an expression that a rank evaluates in the midst of its cell. what: the thing waited for."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what} is refused in a peek (--now), which has come in the midst of what the rank runs. "
            "Do it in a cell, or without --now: then it waits until the rank is idle."
        )


class SaveFailed(MeshError):
    """A save that was not written; the folder has the saves that it had. why: the reason, in words."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return f"nothing was saved: {self.why}"


class PromptRefused(MeshError, EOFError):
    """A question of a rank that no person can answer. asks: the function that asks. why: why nobody can answer."""

    def __init__(self, asks: str, why: str) -> None:
        super().__init__(asks, why)
        self.asks, self.why = asks, why

    def __str__(self) -> str:
        return f"{self.asks} is not available on ranks here: {self.why}. {advice().ask}"


class ScriptExit(MeshError, RuntimeError):
    """A program ended with an exit code other than 0, or with a text, which counts as 1. A RuntimeError too."""

    def __init__(self, script: str, value: object) -> None:
        super().__init__(script, value if isinstance(value, int) else str(value))
        self.script, self.value = self.args

    @property
    def code(self) -> int:
        """The exit code."""
        return self.value if isinstance(self.value, int) else 1

    def __str__(self) -> str:
        text = "" if isinstance(self.value, int) else f": {self.value}"
        return f"{self.script} ended with exit code {self.code}{text}"


class ProtocolError(MeshError):
    """Two processes disagree about the wire."""


class LocalProtocolError(ProtocolError):
    """Our own side asked for something that the protocol or a state table does not allow."""


class PeerProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class ShapeError(MeshError, ValueError):
    """An axis, a rank or a layout that the mesh does not have. A ValueError too."""


class UnknownAxisError(ShapeError, KeyError, TypeError):
    """A name that is no axis of the mesh.

    A KeyError too, since points are mappings of axis to coordinate; and a TypeError, as of an argument of this name.
    """

    def __init__(self, axis: str, sizes: Mapping[str, int]) -> None:
        super().__init__(axis, dict(sizes))
        self.axis, self.sizes = axis, dict(sizes)

    def __str__(self) -> str:
        near = did_you_mean(self.axis, self.sizes)
        return f'unknown axis "{self.axis}"; this mesh has {format_sizes(self.sizes)}.{near}'


class RankError(ShapeError, IndexError):
    """A rank or an index outside its axis; an IndexError too.

    known: the ranks of a view that does not have them all.
    """

    def __init__(self, index: object, axis: str, size: int, known: str = "") -> None:
        super().__init__(index, axis, size, known)
        self.index, self.axis, self.size, self.known = index, axis, size, known

    def __str__(self) -> str:
        if self.known:
            return f"{self.axis}={self.index} selects nothing; the ranks here are {self.known}"
        if self.size == 0:
            return f"{self.axis}={self.index} selects nothing: the mesh is empty."
        return f"{self.axis}={self.index} selects nothing; {self.axis} runs from 0 to {self.size - 1}."


class NegativeIndexError(ShapeError, OverflowError):
    """An index below 0, where they are counted from the start."""


class LayoutError(ShapeError):
    """A view that no (offset, sizes, strides) over the base ranks can describe, or sizes that do not fit."""


class RanksLeft(MeshError):
    """A reference names processes that are no ranks any more: they left when their mesh shrank."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """ranks: as they were numbered when the reference was made."""
        self.left = tuple(ranks)
        super().__init__(self.left)

    def __str__(self) -> str:
        return (
            f"{name_ranks(self.left)} (as numbered when this reference was made) left the mesh when it shrank, and "
            "what was there is gone. Use a reference to what has stayed."
        )


class SerializationError(MeshError, RuntimeError):
    """A value that cannot travel between processes. ``path`` leads to the part that is at fault."""

    def __init__(
        self,
        path: str,
        type_name: str,
        reason: str,
        advice: str = "Send what it is made from, and create it on the ranks.",
    ) -> None:
        super().__init__(path, type_name, reason, advice)
        self.path, self.type_name, self.reason, self.advice = path, type_name, reason, advice

    def __str__(self) -> str:
        return f"{self.path} is a {self.type_name}, which cannot be sent: {self.reason}. {self.advice}"


class MessageTooLarge(MeshError):
    """A message of which one part is larger than any link carries; nothing of it was sent."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(size_bytes, limit_bytes)
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.size_bytes)} in one piece are too much for a message, which takes "
            f"{format_bytes(self.limit_bytes)}. Send values by push, pull or results, which may be of any size."
        )


class LoadError(MeshError):
    """A value that arrived and cannot be built there.

    where: the receiving process, as a person knows it.
    module: the module that is missing there, or that lacks something; empty when no module is at fault.
    reason: empty when the whole module is missing.
    """

    def __init__(self, where: str, module: str, reason: str) -> None:
        super().__init__(where, module, reason)
        self.where, self.module, self.reason = where, module, reason

    def __str__(self) -> str:
        by_value = (
            f"import {self.module} where the value comes from, and call "
            f"cloudpickle.register_pickle_by_value({self.module}) there"
        )
        if not self.module:
            needs_groups = "process group has not been initialized" in self.reason
            hint = " It is bound to process groups: take what it wraps, as in model.module." if needs_groups else ""
            return f"a value that arrived in {self.where} cannot be built there: {self.reason.rstrip('.')}.{hint}"
        if not self.reason:
            return (
                f'a value that arrived in {self.where} needs the module "{self.module}", which cannot be imported '
                f"there. Install it there; or, for a module of your own, {by_value}."
            )
        return (
            f'a value that arrived in {self.where} needs more than the module "{self.module}" has there '
            f"({self.reason}). Use the same version on both sides; or, for a module of your own, {by_value}."
        )


class SpawnError(MeshError):
    """Hosts or workers did not come up."""

    failure_kind = FailureKind.NOT_FORMED


class HostsEndedError(SpawnError, RuntimeError):
    """Hosts that were shut down: nothing is started on them any more."""


class NotOwnerError(UsageError, RuntimeError):
    """A reference to hosts that others have started, who alone can shut them down."""


class DeviceError(SpawnError):
    """A host has fewer devices than the ranks that were asked for."""

    def __init__(self, wanted: int, found: int, host: str) -> None:
        super().__init__(wanted, found, host)
        self.wanted, self.found, self.host = wanted, found, host

    def __str__(self) -> str:
        fewer = f"Ask for at most {self.found}, or add" if self.found else "Add"
        return (
            f"{self.wanted} ranks were asked for on {self.host}, which has {self.found} CUDA "
            f"device{'' if self.found == 1 else 's'}. {fewer} {advice().cpu}."
        )


class CrashLoopError(SpawnError):
    """A rank ended so often within ``window_s`` that it is not started again unless somebody insists."""

    def __init__(self, rank: int, host: str, cause: str, log_tail: str, times: int, window_s: float) -> None:
        super().__init__(rank, host, cause, log_tail, times, window_s)
        self.rank, self.host, self.cause, self.log_tail = rank, host, cause, log_tail
        self.times, self.window_s = times, window_s

    def __str__(self) -> str:
        often = f"ended {self.times} times within {self.window_s:g} s and is not started again"
        last = describe_deaths([RankDeath(self.rank, self.host, self.cause, self.log_tail)])
        return "\n".join(
            [
                f"rank {self.rank} on {self.host} {often}",
                f"  the last time: {self.cause}",
                *last[1:],
                f"  all of its log: {advice().logs.format(ranks=self.rank)}    "
                f"try all the same: {advice().insist.format(ranks=self.rank, list=[self.rank])}    "
                f"go on without: {advice().shrink}",
            ]
        )


class MeshStoppedError(MeshError):
    """A call on a mesh that was stopped."""

    def __init__(self, mesh: str) -> None:
        super().__init__(mesh)
        self.mesh = mesh

    def __str__(self) -> str:
        return f'mesh "{self.mesh}" was stopped. Start another: {advice().spawn_call}.'


class MeshDetachedError(MeshStoppedError):
    """A call on a mesh that lives on without this process."""

    def __init__(self, mesh: str, session: str) -> None:
        super().__init__(mesh)
        self.args = (mesh, session)
        self.session = session

    def __str__(self) -> str:
        return f'mesh "{self.mesh}" was detached. Attach it again: meshbook.attach("{self.session}").'


class AttachError(MeshError):
    """A session that cannot be attached; the message gives the reason and the remedy."""


class SessionInUse(AttachError):
    """A session that another process drives."""

    def __init__(self, session: str, owner_pid: int) -> None:
        super().__init__(session, owner_pid)
        self.session, self.owner_pid = session, owner_pid

    def __str__(self) -> str:
        return (
            f"session {self.session} is driven by process {self.owner_pid}. "
            f"Detach it there ({advice().detach}) or end that process, then attach again."
        )


class HostLost(MeshError):
    """A host agent went silent or ended, and its workers with it."""

    def __init__(self, host: str, cause: str) -> None:
        super().__init__(host, cause)
        self.host, self.cause = host, cause

    def __str__(self) -> str:
        return f"host {self.host} is lost: {self.cause}. Its workers ended. Start them again: {advice().heal_call}."


class DebugError(MeshError):
    """The debugger of a rank could not be started, or is gone."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause

    def __str__(self) -> str:
        return f"rank {self.rank} is not under the debugger: {self.cause}."
