"""The failures and the ends of ranks as data, for people where their classes do not exist: equal causes once."""

from __future__ import annotations

import enum
import pickle
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshbook.errors.advice import advice, name_cells
from meshbook.formatting import format_ranks, group_ranks, name_ranks


class FailureKind(enum.Enum):
    """The kind of a failure, for code that has to tell failures apart; texts and names of classes are for people."""

    RAISED = "raised"
    """The rank's code raised it, or ours for it."""
    INTERRUPTED = "interrupted"
    """The person stopped the rank, or it never began the call."""
    EXITED = "exited"
    """The cell ended itself early, as with ``sys.exit()``, and meant to."""
    LOST = "lost"
    """The rank's process ended."""
    FREED = "freed"
    """The rank's collective was given up."""
    DISAGREES = "disagrees"
    """The rank entered another operation than others."""
    NOT_FORMED = "not formed"
    """The rank could not form the process groups with the others."""
    CLOSED = "closed"
    """The mailbox of the call is not there any more."""
    REFUSED = "refused"
    """The actor keeps the class that it has."""
    ABORTED = "aborted"
    """The actor ended itself as failed."""
    NOT_STARTED = "not started"
    """The rank's process did not start."""


class Failure(NamedTuple):
    """The exception of a rank, as it can be shown where the exception's class does not exist."""

    rank: int
    host: str
    ename: str
    evalue: str
    traceback: tuple[str, ...]
    """The lines that IPython made of it on the rank, with ANSI colours."""
    where: str
    """The innermost line of the user's own code: ``cell 7, line 3``."""
    kind: FailureKind = FailureKind.RAISED
    unmade: bool = False
    """Whether the constructor of an actor raised it."""
    exception: BaseException | bytes | None = None
    """The exception, or its pickle, where it could travel; `load` returns it."""

    def __repr__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"<Failure: rank {self.rank} raised {self.ename}: {self.evalue}{where}>"

    def load(self) -> BaseException | None:
        """The exception itself; None where it could not travel. Unpickles, so its class must exist here."""
        if isinstance(self.exception, bytes):
            loaded = pickle.loads(self.exception)
            return loaded if isinstance(loaded, BaseException) else None
        return self.exception

    @property
    def cause(self) -> tuple[str, str, str]:
        """Class, message and place, which are equal for failures that would read the same to a person."""
        return self.ename, self.evalue, self.where


def group_failures(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Put failures with an equal cause together, each group and the groups ordered by rank."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        groups.setdefault(failure.cause, []).append(failure)
    return list(groups.values())


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def without_colours(text: str) -> str:
    """A text without the ANSI sequences that IPython colours it by."""
    return _ANSI.sub("", text)


class RemoteTraceback(Exception):
    """The tracebacks of ranks, which Python, without our rendering, shows as the cause of their error."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = tuple(failures)
        super().__init__(self.failures)

    def __str__(self) -> str:
        lines = []
        for group in group_failures(self.failures):
            lines += [f"\n{name_ranks(failure.rank for failure in group)}:", *group[0].traceback]
        return without_colours("\n".join(lines))


class RankDeath(NamedTuple):
    """The end of one rank."""

    rank: int
    host: str
    cause: str
    log_tail: str = ""

    def as_failure(self) -> Failure:
        """Return the end as a failure of the rank; the last lines of its log stand for the traceback."""
        lines = tuple(self.log_tail.splitlines())
        return Failure(self.rank, self.host, "WorkerLost", self.cause, lines, "", FailureKind.LOST)


def describe_deaths(deaths: Iterable[RankDeath]) -> list[str]:
    """``ranks 0-3 on a ended: killed by SIGKILL``, and the last lines of the first rank that wrote any."""
    by_rank = {death.rank: death for death in sorted(deaths)}
    lines: list[str] = []
    for cause, ranks in group_ranks((rank, death.cause) for rank, death in by_rank.items()).items():
        group = [by_rank[rank] for rank in ranks]
        lines.append(f"{name_ranks(ranks)} on {_name_hosts(group)} ended: {cause}")
        spoke = [death for death in group if death.log_tail]
        if spoke:
            lines.append("  its last lines:" if len(ranks) == 1 else f"  the last lines of rank {spoke[0].rank}:")
            lines += [f"    {line}" for line in name_cells(spoke[0].log_tail).splitlines()]
    return lines


def next_steps(lost: Collection[int], survivors: Collection[int] | None = None) -> str:
    """Return a line on the ranks that are left and on the commands that help.

    survivors: the ranks of the mesh that live; None where that is not known, nor whether it is the current mesh.
    """
    say = advice()
    log = f"{'its log' if len(lost) == 1 else 'their logs'}: {say.logs.format(ranks=format_ranks(lost))}"
    if survivors is not None and not survivors:
        return f"  repair: {say.heal}    {log}"
    steps = f"repair: {say.heal_call if survivors is None else say.heal}    go on without: {say.shrink}    {log}"
    if survivors is None:
        return f"  the other ranks keep their state    {steps}"
    return f"  {name_ranks(survivors)} {'keeps its' if len(survivors) == 1 else 'keep their'} state    {steps}"


def _name_hosts(deaths: Sequence[RankDeath]) -> str:
    hosts = list(dict.fromkeys(death.host for death in deaths))
    return " and ".join(hosts) if len(hosts) < 3 else f"{len(hosts)} hosts"
