"""Every error of the runtime, in one tree.

    MeshError
    ├── ShapeError              an axis, rank or layout that the mesh does not have
    │   ├── UnknownAxisError
    │   ├── RankError
    │   └── LayoutError         a view that no (offset, sizes, strides) can describe
    ├── UsageError              a command or an argument that makes no sense as given; a ValueError too
    │   └── NotOwnerError       a reference to hosts, which whoever has started them shuts down; a RuntimeError too
    ├── SpawnError              hosts or workers that did not come up
    │   ├── HostsEndedError     hosts that were shut down; a RuntimeError too
    │   ├── DeviceError         fewer devices than ranks
    │   └── CrashLoopError      a rank that ends again and again
    ├── MeshStoppedError        a call on a mesh that was stopped
    │   └── MeshDetachedError   a call on a mesh that lives on without this process
    ├── AttachError             a session that cannot be attached
    │   └── SessionInUse        another process drives it
    ├── CallError               a call that has no complete answer; carries ``partial``
    │   ├── CallFailed          ranks raised
    │   ├── CallTimeout         ranks were silent at the deadline
    │   ├── CallInterrupted     the person pressed interrupt
    │   └── WorkerLost          workers ended while the call was open
    ├── MailboxClosed           a message to an actor or a port that is not there (any more)
    ├── GroupAborted            a collective of groups that the controller has aborted; raised on the ranks
    ├── RanksDisagree           ranks that entered different operations; what their call fails with
    ├── HostLost                a host agent went silent or ended
    ├── SerializationError      a value that cannot travel; names the attribute path
    ├── MessageTooLarge         a message of which a part is larger than any link carries
    ├── LoadError               a value that arrived and cannot be built there; names the missing module
    └── ProtocolError           two processes disagree about the wire
        ├── LocalProtocolError  our own side asked for something impossible
        └── PeerProtocolError   the other side sent something impossible

The arguments of an error are its fields, so that each survives pickling.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshbook.errors.advice import advice
from meshbook.errors.deaths import RankDeath, describe_deaths, next_steps
from meshbook.formatting import did_you_mean, format_bytes, format_ranks, format_sizes, name_ranks

Partial: TypeAlias = Mapping[int, Any]
"""Rank to result, of those that succeeded."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class MeshError(Exception):
    """Base of all errors that meshbook raises."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message alone, since the frames in between are ours, not the user's."""
        return [f"{type(self).__name__}: {self}"]


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


class UsageError(MeshError, ValueError):
    """A command or an argument that makes no sense as given; the message shows what would."""


class SpawnError(MeshError):
    """Hosts or workers did not come up."""


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
    """A session that cannot be attached; the message says why and what to do."""


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


class Failure(NamedTuple):
    """One rank's exception, as it can be shown where the exception's class does not exist."""

    rank: int
    host: str
    ename: str
    evalue: str
    traceback: tuple[str, ...]
    """The lines that IPython made of it on the rank, with ANSI colours."""
    where: str
    """The innermost line of the user's own code: ``cell 7, line 3``."""
    exception: BaseException | bytes | None = None
    """The exception, or its pickle, where it could travel; `load` returns it."""
    unmade: bool = False
    """Whether it is what the constructor of an actor has raised."""

    def load(self) -> BaseException | None:
        """The exception itself; None where it could not travel. Unpickles, so its class must exist here."""
        if isinstance(self.exception, bytes):
            loaded = pickle.loads(self.exception)
            return loaded if isinstance(loaded, BaseException) else None
        return self.exception

    def same_cause(self, other: Failure) -> bool:
        """Whether both would read the same to a person: class, message and place."""
        return (self.ename, self.evalue, self.where) == (other.ename, other.evalue, other.where)


def group_failures(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Put failures with an equal cause together, each group and the groups ordered by rank."""
    groups: list[list[Failure]] = []
    for failure in sorted(failures, key=lambda failure: failure.rank):
        for group in groups:
            if group[0].same_cause(failure):
                group.append(failure)
                break
        else:
            groups.append([failure])
    return groups


def _headline(group: Sequence[Failure], place: str = "") -> str:
    """``ranks 0-3 raised ValueError: bad shard``, for failures of one cause."""
    first = group[0]
    if first.ename == RanksDisagree.__name__:
        return first.evalue
    return f"{name_ranks(failure.rank for failure in group)} raised {first.ename}{place}: {first.evalue}"


class CallError(MeshError):
    """A call without a complete answer. ``partial`` maps the ranks that succeeded to their results."""

    def __init__(self, *args: object, partial: Partial | None = None) -> None:
        super().__init__(*args)
        self.partial: Partial = {} if partial is None else partial
        self.freed: Mapping[int, str] = {}
        """Ranks that waited for others in vain and were freed, with what they waited in."""
        self.freed_s = 0.0
        """From the first failure until the last of them was free."""
        self.groups = ""
        """Why the process groups are not back; empty when nothing is wrong with them."""
        self.torn: Mapping[str, Iterable[int]] = {}
        """What operations that were given up may have left half done, ``x may be half reduced``, with the ranks."""

    def verdict(self) -> list[str]:
        """Lines on who was freed, and on the process groups where they are not back."""
        places: dict[str, list[int]] = {}
        for rank, place in self.freed.items():
            places.setdefault(place, []).append(rank)
        lines = [
            f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} waiting in {place}"
            for place, ranks in sorted(places.items(), key=lambda item: min(item[1]))
        ]
        if lines:
            lines[-1] += f"; freed after {self.freed_s:.2g} s, all {'other ' if self.torn else ''}variables kept"
        lines += [f"{text} on {name_ranks(ranks)}" for text, ranks in self.torn.items()]
        return lines + ([self.groups] if self.groups else [])

    def __reduce__(self) -> tuple[object, ...]:
        told = {"freed": dict(self.freed), "freed_s": self.freed_s, "groups": self.groups, "torn": dict(self.torn)}
        return (type(self), self.args, {"partial": dict(self.partial), **told})


def without_colours(text: str) -> str:
    """A text without the ANSI sequences that IPython colours it by."""
    return _ANSI.sub("", text)


class RemoteTraceback(Exception):
    """The tracebacks of ranks: what Python, which does not know our rendering, shows as the cause of their error."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(self.failures)

    def __str__(self) -> str:
        lines = []
        for group in group_failures(self.failures):
            lines += [f"\n{name_ranks(failure.rank for failure in group)}:", *group[0].traceback]
        return without_colours("\n".join(lines))


class CallFailed(CallError):
    """One or more ranks raised. Equal causes are shown once."""

    def __init__(self, failures: Iterable[Failure], partial: Partial | None = None) -> None:
        self.failures = tuple(failures)
        super().__init__(self.failures, partial=partial)
        self.__cause__ = RemoteTraceback(self.failures)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that raised, in order."""
        return tuple(sorted(failure.rank for failure in self.failures))

    def __str__(self) -> str:
        lines = [
            _headline(group) + (f" ({group[0].where})" if group[0].where else "")
            for group in group_failures(self.failures)
        ]
        return "\n".join([*lines, *(f"  {line}" for line in self.verdict())])

    def _render_traceback_(self) -> list[str]:
        lines: list[str] = []
        for group in group_failures(self.failures):
            first = group[0]
            if list(first.traceback) == [f"{first.ename}: {first.evalue}"]:  # an error of ours, without frames
                place = f" ({first.where})" if first.where else ""
                lines += [_headline(group, place)]
            else:
                lines += [_headline(group), *first.traceback]
        if self.partial:
            lines += [f"  {name_ranks(self.partial)} finished; their results are kept (error.partial, _mesh)"]
        return lines + [f"  {line}" for line in self.verdict()]


class CallTimeout(CallError, TimeoutError):
    """Some ranks had not answered at the deadline; the call goes on there."""

    def __init__(self, what: str, timeout_s: float, silent: Iterable[int], partial: Partial | None = None):
        self.what, self.timeout_s, self.silent = what, timeout_s, tuple(sorted(silent))
        super().__init__(what, timeout_s, self.silent, partial=partial)

    def __str__(self) -> str:
        return (
            f"{self.what}: no answer from {name_ranks(self.silent)} within {self.timeout_s:g} s. "
            f"They are still at it: wait again, see where they are ({advice().stacks_call}), "
            "or press interrupt (mesh.interrupt())."
        )


class CallInterrupted(CallError, KeyboardInterrupt):
    """The person pressed interrupt; says who obeyed and who did not within the grace time.

    stuck: rank to where it is and why it did not stop. stage: 1, or more when the person insisted.
    skipping: ranks that had not begun, and never will, to what they are busy with instead (may be empty).
    """

    def __init__(
        self,
        obeyed: Iterable[int],
        stuck: Mapping[int, str],
        stage: int = 1,
        skipping: Mapping[int, str] | None = None,
        partial: Partial | None = None,
    ) -> None:
        self.obeyed, self.stuck = tuple(sorted(obeyed)), dict(stuck)
        self.stage, self.skipping = stage, dict(skipping or {})
        super().__init__(self.obeyed, self.stuck, self.stage, self.skipping, partial=partial)

    def __str__(self) -> str:
        parts = [f"{name_ranks(self.obeyed)} stopped, all variables kept"] if self.obeyed else []
        if self.skipping:
            one = len(self.skipping) == 1
            parts.append(f"{name_ranks(self.skipping)} had not begun and skip{'s' if one else ''} it")
        lines = [f"interrupted: {'; '.join(parts)}" if parts else "interrupted"]
        still = "still does not" if self.stage > 1 else "did not"
        stills = "still do not" if self.stage > 1 else "did not"
        for place, ranks in _by_text(self.stuck):
            lines.append(f"  {name_ranks(ranks)} {still if len(ranks) == 1 else stills} stop: {place}")
        for place, ranks in _by_text(self.skipping):
            if place and not self.stuck.keys() & set(ranks):
                lines.append(f"  {name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} still in {place}")
        if self.stuck and self.stage == 1:
            lines.append(f"  insist: interrupt once more, or {advice().interrupt}")
        elif self.stuck:
            respawn = advice().respawn.format(ranks=format_ranks(self.stuck), list=sorted(self.stuck))
            lines.append(f"  replace: {respawn}    end the mesh: {advice().stop}    or wait: usable again once back")
        lines += [f"  {line}" for line in self.verdict()]
        return "\n".join(lines)


def _by_text(places: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Texts with the ranks that share them, by the first rank."""
    grouped: dict[str, list[int]] = {}
    for rank in sorted(places):
        grouped.setdefault(places[rank], []).append(rank)
    return list(grouped.items())


class WorkerLost(CallError):
    """Workers ended while calls on them were open. ``rank``, ``host``, ``cause``, ``log_tail`` are those of the first.

    others: the further ranks of the call that ended.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        cause: str,
        log_tail: str = "",
        others: Iterable[RankDeath] = (),
        *,
        partial: Partial | None = None,
    ) -> None:
        self.rank, self.host, self.cause, self.log_tail = rank, host, cause, log_tail
        self.others = tuple(RankDeath(*death) for death in others)
        super().__init__(rank, host, cause, log_tail, self.others, partial=partial)

    @classmethod
    def of(cls, errors: Iterable[WorkerLost], partial: Partial | None = None) -> WorkerLost:
        """One error for all of them; at least one."""
        first, *others = sorted(death for error in errors for death in error.deaths)
        return cls(*first, others, partial=partial)

    @property
    def deaths(self) -> tuple[RankDeath, ...]:
        """Every rank that ended, in order of ranks."""
        return tuple(sorted([RankDeath(self.rank, self.host, self.cause, self.log_tail), *self.others]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ended, in order."""
        return tuple(death.rank for death in self.deaths)

    def __str__(self) -> str:
        verdict = (f"  {line}" for line in self.verdict())
        return "\n".join([*describe_deaths(self.deaths), *verdict, *next_steps(self.ranks)])


class MailboxClosed(MeshError):
    """A message to an actor or a port that is not there, or not any more."""

    def __init__(self, rank: int, mailbox: int, why: str = "") -> None:
        super().__init__(rank, mailbox, why)
        self.rank, self.mailbox, self.why = rank, mailbox, why

    def __str__(self) -> str:
        why = self.why or "what it belonged to was stopped, or the process was started again since"
        return f"rank {self.rank} has no mailbox {self.mailbox}: {why}. Spawn it again, and use the new reference."


class LeftStopped(MeshError):
    """The person left the prompts of ranks that a call waits for; the call goes on."""

    def __init__(self, what: str, ranks: Iterable[int]) -> None:
        super().__init__(what, tuple(ranks))
        self.what, self.ranks = what, tuple(ranks)

    def __str__(self) -> str:
        stay = "stays" if len(self.ranks) == 1 else "stay"
        return (
            f"{name_ranks(self.ranks)} {stay} stopped in {self.what}, which goes on; .get() waits for it again.\n"
            f"  the prompt: {advice().prompt}"
        )


class GroupAborted(MeshError):
    """A rank's collective was given up, or not begun, since the process groups were aborted.

    reason: why, on its first line; what helps on the others, where running it again is not enough.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.torn = ""
        """What the operation may have left half done."""

    def __str__(self) -> str:
        why, _, advice = self.reason.partition("\n")
        why += f"; {self.torn}" if self.torn else ""
        advice = advice.strip() or "they are formed again when the cell has ended on all ranks: run it again"
        return f"the process groups were aborted: {why}\n  {advice}"


class RanksDisagree(MeshError):
    """Ranks entered different operations of a process group as one: the numbers that came of it mean nothing.

    It is the failure of each of these ranks, in the `CallFailed` of their call. ranks: those that disagree.
    """

    def __init__(self, ranks: Iterable[int], text: str) -> None:
        super().__init__(tuple(ranks), text)
        self.ranks, self.text = tuple(ranks), text

    def __str__(self) -> str:
        return self.text


def disagreeing(ranks: Iterable[int], text: str) -> list[Failure]:
    """The failures of ranks that disagree."""
    error = RanksDisagree(ranks, text)
    name = type(error).__name__
    return [Failure(rank, "", name, text, (f"{name}: {text}",), "", error) for rank in error.ranks]


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
            return f"a value that arrived in {self.where} cannot be built there: {self.reason}."
        if not self.reason:
            return (
                f'a value that arrived in {self.where} needs the module "{self.module}", which cannot be imported '
                f"there. Install it there; or, for a module of your own, {by_value}."
            )
        return (
            f'a value that arrived in {self.where} needs more than the module "{self.module}" has there '
            f"({self.reason}). Use the same version on both sides; or, for a module of your own, {by_value}."
        )


class ProtocolError(MeshError):
    """Two processes disagree about the wire."""


class LocalProtocolError(ProtocolError):
    """Our own side asked for something that the protocol or a state table does not allow."""


class PeerProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, BaseException)
]
__all__ += ["Failure", "RankDeath", "describe_deaths", "format_ranks", "group_failures", "next_steps"]
