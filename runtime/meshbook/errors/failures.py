"""The exceptions that ranks raised, as data: told where their classes do not exist, and equal causes once."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from typing import NamedTuple

from meshbook.formatting import name_ranks


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

    def __repr__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"<Failure: rank {self.rank} raised {self.ename}: {self.evalue}{where}>"

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


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


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
