"""The errors of calls without a complete answer, and of collectives that ranks have given up or disagree about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from meshbook.errors.advice import advice
from meshbook.errors.base import MeshError, failure_of
from meshbook.errors.failures import (
    Failure,
    FailureKind,
    RankDeath,
    RemoteTraceback,
    describe_deaths,
    group_failures,
    next_steps,
)
from meshbook.formatting import format_ranks, group_ranks, name_ranks

GRADIENTS = "gradients of backward()"
"""The begin of a text on torn tensors where they are a bucket of DDP, or something else that backward() reduces."""


class GroupAborted(MeshError):
    """A rank's collective was given up, or not begun, since the process groups were aborted.

    reason: the cause, on its first line; the remedy on the others, where running it again is not enough.
    """

    failure_kind = FailureKind.FREED

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.torn = ""
        """A text on the tensors that the operation may have left half done."""

    def __str__(self) -> str:
        why, _, advice = self.reason.partition("\n")
        why += f"; {self.torn}" if self.torn else ""
        advice = advice.strip() or "they are formed again when the cell has ended on all ranks: run it again"
        return f"the process groups were aborted: {why}\n  {advice}"


class RanksDisagree(MeshError):
    """Ranks entered different operations of a process group as one: the numbers that came of it mean nothing.

    It is the failure of each of these ranks, in the `CallFailed` of their call. ranks: the ranks that disagree.
    """

    failure_kind = FailureKind.DISAGREES

    def __init__(self, ranks: Iterable[int], text: str) -> None:
        super().__init__(tuple(ranks), text)
        self.ranks, self.text = tuple(ranks), text

    def __str__(self) -> str:
        return self.text


def disagreeing(ranks: Iterable[int], text: str) -> list[Failure]:
    """Return the failures of ranks that disagree."""
    error = RanksDisagree(ranks, text)
    return [failure_of(error, rank, "") for rank in error.ranks]


Partial: TypeAlias = Mapping[int, Any]
"""The result of each rank that succeeded."""


class CallError(MeshError):
    """A call without a complete answer. ``partial`` maps the ranks that succeeded to their results."""

    def __init__(self, *args: object, partial: Partial | None = None) -> None:
        super().__init__(*args)
        self.partial: Partial = {} if partial is None else partial
        self.freed: Mapping[int, str] = {}
        """The ranks that waited for others in vain and were freed, each with its operation."""
        self.freed_s = 0.0
        """The time from the first failure until the last of them was free."""
        self.groups = ""
        """The reason why the process groups are not back; empty when nothing is wrong with them."""
        self.torn: Mapping[str, Iterable[int]] = {}
        """Texts on tensors that operations may have left half done, ``x may be half reduced``, with the ranks."""

    def verdict(self) -> list[str]:
        """Lines on who was freed, and on the process groups where they are not back."""
        lines = [
            f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} waiting in {place}"
            for place, ranks in group_ranks(sorted(self.freed.items())).items()
        ]
        if lines:
            lines[-1] += f"; freed after {self.freed_s:.2g} s, all {'other ' if self.torn else ''}variables kept"
        lines += [f"{text} on {name_ranks(ranks)}" for text, ranks in self.torn.items()]
        return lines + ([self.groups] if self.groups else [])

    def __reduce__(self) -> tuple[type[CallError], tuple[object, ...], dict[str, object]]:
        told = {"freed": dict(self.freed), "freed_s": self.freed_s, "groups": self.groups, "torn": dict(self.torn)}
        return (type(self), self.args, {"partial": dict(self.partial), **told})


class CallFailed(CallError):
    """Ranks raised. Equal causes are shown once."""

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
                lines += [_headline(group).partition("\n")[0], *first.traceback]
        finished = [f"  {self._describe_partial()}"] if self.partial else []
        return [*lines, *finished, *(f"  {line}" for line in self.verdict())]

    def _describe_partial(self) -> str:
        return f"{name_ranks(self.partial)} finished; their results are kept (error.partial, _mesh)"


class ItemFailed(CallFailed):
    """A function failed on an item of `ProcMesh.map`. ``partial`` has the results so far, by the numbers of items.

    index: the number of the item, from 0. item: its repr, in short.
    """

    def __init__(self, index: int, item: str, failures: Iterable[Failure], partial: Partial | None = None) -> None:
        super().__init__(failures, partial)
        self.index, self.item = index, item
        self.args = (index, item, self.failures)

    def __str__(self) -> str:
        return f"item {self.index} ({self.item}): {super().__str__()}"

    def _render_traceback_(self) -> list[str]:
        return [f"item {self.index} ({self.item}):", *super()._render_traceback_()]

    def _describe_partial(self) -> str:
        return f"{len(self.partial)} items are done; their results: error.partial"


def _headline(group: Sequence[Failure], place: str = "") -> str:
    """``ranks 0-3 raised ValueError: bad shard``, for failures of one cause."""
    first = group[0]
    if first.kind is FailureKind.DISAGREES:
        return first.evalue
    return f"{name_ranks(failure.rank for failure in group)} raised {first.ename}{place}: {first.evalue}"


class CallTimeout(CallError, TimeoutError):
    """Ranks had not answered at the deadline; the call goes on there."""

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
    skipping: ranks that had not begun, and never will, to the work that they are busy with instead (may be empty).
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
        for place, ranks in group_ranks(sorted(self.stuck.items())).items():
            lines.append(f"  {name_ranks(ranks)} {still if len(ranks) == 1 else stills} stop: {place}")
        for place, ranks in group_ranks(sorted(self.skipping.items())).items():
            if place and not self.stuck.keys() & set(ranks):
                lines.append(f"  {name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} still in {place}")
        if self.stuck and self.stage == 1:
            lines.append(f"  insist: interrupt once more, or {advice().interrupt}")
        elif self.stuck:
            respawn = advice().respawn.format(ranks=format_ranks(self.stuck), list=sorted(self.stuck))
            lines.append(f"  replace: {respawn}    end the mesh: {advice().stop}    or wait: usable again once back")
        lines += [f"  {line}" for line in self.verdict()]
        return "\n".join(lines)


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
        self.is_last = False
        """Whether no rank of the mesh was left."""
        super().__init__(rank, host, cause, log_tail, self.others, partial=partial)

    @classmethod
    def of(cls, errors: Iterable[WorkerLost], partial: Partial | None = None) -> WorkerLost:
        """Return an error for all of these; there is at least one."""
        errors = tuple(errors)
        first, *others = sorted(death for error in errors for death in error.deaths)
        made = cls(*first, others, partial=partial)
        made.is_last = any(error.is_last for error in errors)
        return made

    @property
    def deaths(self) -> tuple[RankDeath, ...]:
        """Every rank that ended, in order of ranks."""
        return tuple(sorted([RankDeath(self.rank, self.host, self.cause, self.log_tail), *self.others]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ended, in order."""
        return tuple(death.rank for death in self.deaths)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The ends as failures of their ranks, with the last lines of their logs."""
        return tuple(death.as_failure() for death in self.deaths)

    def __str__(self) -> str:
        verdict = (f"  {line}" for line in self.verdict())
        steps = next_steps(self.ranks, () if self.is_last else None)
        return "\n".join([*describe_deaths(self.deaths), *verdict, steps])

    def __reduce__(self) -> tuple[type[CallError], tuple[object, ...], dict[str, object]]:
        kind, arguments, told = super().__reduce__()
        return kind, arguments, {**told, "is_last": self.is_last}


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


class MailboxClosed(MeshError):
    """A message to an actor or a port that is not there, or not any more."""

    failure_kind = FailureKind.CLOSED

    def __init__(self, rank: int, mailbox: int, why: str = "") -> None:
        super().__init__(rank, mailbox, why)
        self.rank, self.mailbox, self.why = rank, mailbox, why

    def __str__(self) -> str:
        why = self.why or "what it belonged to was stopped, or the process was started again since"
        return f"rank {self.rank} has no mailbox {self.mailbox}: {why}. Spawn it again, and use the new reference."
