"""The stacks of a mesh as a value: equal ones once, the odd ranks first, and in words who holds the others up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshbook.calls.rank_state import State
from meshbook.groups.progress import Collectives
from meshbook.groups.stragglers import RankProgress, Verdict, find_stragglers
from meshbook.stacks.frames import ThreadStack
from meshbook.stacks.text import describe_groups

PATIENCE_S = 0.5
"""A wait that is shorter is no reason to speak of odd ranks."""


class RankStack(NamedTuple):
    """The stacks of one rank, and its state."""

    rank: int
    state: State
    """``idle``, ``busy``, ``waiting`` (in a collective), ``pdb``, ``stopped``, ``silent`` or ``dead``."""
    doing: str
    """``all_reduce (cell 7, line 5)`` where it waits, ``in time.sleep (train.py:41)``; why it does not answer."""
    busy_s: float
    """How long its call runs, or for a rank that waits how long it does; 0 where it is not known."""
    threads: tuple[ThreadStack, ...]
    """The main thread first; empty for a rank that is idle, dead, or cannot be read."""
    collectives: Collectives | None = None
    read_by: str = ""
    """How the stacks were read from outside: ``signal``, ``py-spy``; empty where the rank told them itself."""
    problem: str = ""
    """Why there are none, and what helps."""

    @property
    def main(self) -> ThreadStack | None:
        """Return the stack of the main thread."""
        return next((thread for thread in self.threads if thread.is_main), None)


class MeshStacks:
    """What `ProcMesh.stacks` returns: a sequence of `RankStack`, and a text to print."""

    def __init__(self, ranks: Sequence[RankStack], others: Sequence[RankStack] = ()) -> None:
        """others: ranks of the mesh that were not asked for, but may be what these wait for."""
        self.ranks = tuple(ranks)
        self.verdict = self._judge([*ranks, *others])
        """Who holds the others up; None where nobody has waited for `PATIENCE_S`."""

    def __iter__(self) -> Iterator[RankStack]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> RankStack:
        """By base rank. Raises: KeyError."""
        for one in self.ranks:
            if one.rank == rank:
                return one
        raise KeyError(rank)

    def _judge(self, ranks: Sequence[RankStack]) -> Verdict | None:
        verdict = find_stragglers({one.rank: RankProgress(predicate(one), one.collectives) for one in ranks})
        return verdict if verdict is not None and verdict.since_s >= PATIENCE_S else None

    def text(self, *, all_frames: bool = False) -> str:
        """The verdict, then equal stacks once. all_frames: library and runtime frames too, which are folded else."""
        lines = []
        if self.verdict is not None:
            lines += [self.verdict.text, ""]
        odd = self.verdict.odd if self.verdict is not None else ()
        return "\n".join([*lines, *describe_groups(self.ranks, odd, all_frames)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def predicate(one: RankStack) -> str:
    """What a rank does, as a sentence goes on."""
    if one.state == "idle":
        return "is idle: it runs no cell"
    if one.state == "pdb":
        return f"is stopped in pdb ({one.doing})"
    if one.state in ("silent", "dead"):
        place = f" ({found})" if one.state == "silent" and (found := users_place(one)) else ""
        return f"does not answer: {one.doing}{place}"
    return f"waits in {one.doing}" if one.state == "waiting" else f"is {one.doing}"


def users_place(one: RankStack) -> str:
    """``cell 7, line 5``: the innermost line of the user's own code, where it is known."""
    main = one.main
    return main.users[0].place if main is not None and main.users else ""
