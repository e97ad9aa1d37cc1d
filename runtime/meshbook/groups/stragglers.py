"""The ranks that hold the others up, and a sentence that says so, from the ranks' reports of groups. Pure.

    ranks 0,1 wait in all_reduce, operation 41 of "0"        they wait for the members that have issued fewer: rank 3
    rank 2 waits in recv from rank 3                         it waits for rank 3
    rank 3 waits in nothing                                  so it is the odd one

From each waiting rank we follow the ranks that it waits for, up to ranks that wait in nothing. Where there are none,
all wait for each other: in different operations under the same number, or in a circle.

This is a look at one moment, and no proof that it will stay so (`meshbook.groups.deadlock` has those).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshbook.formatting import group_ranks, name_ranks
from meshbook.groups.agreements import find_disagreements
from meshbook.groups.deadlock import WaitGraph, place_of
from meshbook.groups.progress import Collectives, Waiting

WRAP = ",\n  "
SHOWN = 3
"""Places, and odd ranks, that one sentence tells of."""


class RankProgress(NamedTuple):
    """The progress of one rank at one moment."""

    doing: str
    """The end of a sentence: ``is in time.sleep (train.py:41)``, ``does not answer: native code holds the GIL``."""
    collectives: Collectives | None
    """The answer of the rank; None where it did not answer."""


class Verdict(NamedTuple):
    """The ranks that wait, and the ranks that they wait for."""

    odd: tuple[int, ...]
    """The ranks that hold the others up; where all wait for each other, the fewer ones."""
    waiting: tuple[int, ...]
    """The others that wait."""
    since_s: float
    """The time that all of these have waited by now."""
    circular: bool
    """Whether they wait for each other: none of them can go on."""
    text: str


def find_stragglers(poll: Mapping[int, RankProgress]) -> Verdict | None:
    """The verdict, where some rank waits for another."""
    return _Moment(poll).judge()


class _Moment:
    def __init__(self, poll: Mapping[int, RankProgress]) -> None:
        self._poll = poll
        self._waits: dict[int, Waiting] = {
            rank: waits[0]
            for rank, look in poll.items()
            if (told := look.collectives) is not None and not told.aborted and (waits := told.waiting or told.under_way)
        }
        self._told = {rank: look.collectives for rank, look in poll.items() if look.collectives is not None}
        self._graph = WaitGraph(self._told)
        self._blockers: dict[int, set[int]] = {}
        """The ranks that each rank waits for."""
        self._many_groups = len({waiting.group for waiting in self._waits.values()}) > 1

    def judge(self) -> Verdict | None:
        if (mismatch := self._find_mismatch() or self._find_disagreement()) is not None:
            return mismatch
        graph, waits = self._graph, self._waits
        blockers = {rank: {*graph.awaited(rank, each)} & self._poll.keys() for rank, each in waits.items()}
        self._blockers = blockers
        odd: set[int] = set()
        held: set[int] = set()
        for rank in self._waits:
            if ends := _ends_of(rank, blockers):
                odd |= ends
                held.add(rank)
        if odd:
            text = f"{self._describe_waits(held)};\n  {self._describe_odd(odd, held)}"
            return Verdict(tuple(sorted(odd)), tuple(sorted(held)), self._since(held), False, text)
        held = {rank for rank, awaited in blockers.items() if awaited}
        if not held or not all(look.collectives.waiting for r in held if (look := self._poll[r]).collectives):
            return None  # who has operations under way may go on without them
        fewest = min(self._by_place(held).values(), key=len)
        text = f"{name_ranks(held)} wait for each other:\n  {self._describe_waits(held, WRAP)}"
        return Verdict(tuple(fewest), tuple(sorted(held - set(fewest))), self._since(held), True, text)

    # ---- operations that do not match -----------------------------------------------------------------------------

    def _find_mismatch(self) -> Verdict | None:
        """Different operations under the same number of a group."""
        waits = [(rank, waiting) for rank, waiting in self._waits.items() if waiting.peer is None]
        entered = group_ranks((rank, (waiting.group, waiting.number)) for rank, waiting in waits)
        differing = [key for key, ranks in entered.items() if len({self._waits[rank].operation for rank in ranks}) > 1]
        if not differing:
            return None
        group, number = max(differing, key=lambda key: len(entered[key]))
        operations = group_ranks((rank, self._waits[rank].operation) for rank in entered[group, number])
        *few, most = sorted(operations.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        odd = {rank for ranks in few for rank in ranks}
        of_group = f' of group "{group}"' if self._many_groups else ""
        text = (
            f"{self._are_in(odd)} as operation {number}{of_group}, where {self._are_in(most)}: "
            "they wait for each other"
        )  # fmt: skip
        return Verdict(tuple(sorted(odd)), tuple(sorted(most)), self._since(odd | set(most)), True, text)

    def _find_disagreement(self) -> Verdict | None:
        """The same operation under the same number, of another shape, say; where somebody waits for it, or later."""
        for found in find_disagreements(self._told):
            if held := {rank for rank in found.ranks if rank in self._waits}:
                return Verdict(tuple(sorted(held)), found.ranks, self._since(held), True, found.text)
        return None

    # ---- words --------------------------------------------------------------------------------------------------

    def _are_in(self, ranks: Iterable[int]) -> str:
        """``rank 3 is in barrier (cell 7, line 9)``"""
        return " and ".join(
            f"{name_ranks(each)} {'is' if len(each) == 1 else 'are'} in {place}"
            for place, each in list(self._by_place(ranks).items())[:SHOWN]
        )

    def _by_place(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        places = group_ranks((rank, place_of(self._waits[rank])) for rank in sorted(ranks))
        return dict(sorted(places.items(), key=lambda item: -len(item[1])))

    def _describe_waits(self, ranks: Iterable[int], comma: str = ", ") -> str:
        """``ranks 0-2 wait in all_reduce (cell 7, line 5), operation 41``"""
        parts = []
        by_place = self._by_place(ranks)
        for place, each in list(by_place.items())[:SHOWN]:
            numbers = {self._waits[rank].number for rank in each}
            what = "" if self._waits[each[0]].peer is not None else f", operation {'/'.join(map(str, sorted(numbers)))}"
            group = f' of group "{self._waits[each[0]].group}"' if self._many_groups and what else ""
            parts.append(f"{name_ranks(each)} wait{'s' if len(each) == 1 else ''} in {place}{what}{group}")
        more = len(by_place) - SHOWN
        return comma.join(parts) + (f"{comma}others in {more} more place{'s' if more > 1 else ''}" if more > 0 else "")

    def _describe_odd(self, odd: set[int], held: set[int]) -> str:
        """``rank 3 has issued 40 and is in time.sleep (train.py:41)``"""
        texts = group_ranks((rank, f"{self._told_of(rank, held)}{self._poll[rank].doing}") for rank in sorted(odd))
        shown = [f"{name_ranks(ranks)} {text}" for text, ranks in list(texts.items())[:SHOWN]]
        rest = [rank for ranks in list(texts.values())[SHOWN:] for rank in ranks]
        return WRAP.join(shown + ([f"{name_ranks(rest)} do something else"] if rest else []))

    def _told_of(self, rank: int, held: set[int]) -> str:
        """Return how far the rank is in the group in which most wait for it."""
        numbers: dict[str, int] = {}
        for each in held:
            waiting = self._waits[each]
            if waiting.peer is None and rank in self._blockers[each]:
                numbers[waiting.group] = numbers.get(waiting.group, 0) + 1
        if not numbers or rank not in self._told:
            return ""
        return f"has issued {self._graph.issued(rank, max(numbers, key=lambda name: numbers[name]))} and "

    def _since(self, ranks: Iterable[int]) -> float:
        return min(self._waits[rank].since_s for rank in ranks)


def _ends_of(rank: int, blockers: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that ``rank`` waits for in the end: they wait in nothing themselves."""
    ends: set[int] = set()
    seen, left = {rank}, list(blockers[rank])
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in blockers:
            left += blockers[each] - seen
        else:
            ends.add(each)
    return ends
