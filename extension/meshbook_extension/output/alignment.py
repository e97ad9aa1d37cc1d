"""The alignment of ranks' lines: sequences that arrive bit by bit are laid side by side, and equal lines become one.

Each rank has a queue. Its first entry may be shown, together with all equal ones that stand first in the queues of
other ranks. It goes when every rank that still runs has it there, or when one of its lines has waited long enough.

    rank 0   "rank 0"  same  end        "rank 0" and "rank 1" go alone, since nobody else has them; then "same" stands
    rank 1   "rank 1"  same             first in both queues and goes as one; "end" waits for rank 1

A line that another rank has further back in its queue waits for that one, and makes the entries before it there go too:
so equal lines meet behind any number of lines that differ. Where lines wait for each other in a circle (ranks printed
them in different orders) the one that most ranks have in front goes first.

Nothing overtakes within a rank, with one exception. Two lines of which nobody knows which came first (C code wrote them
to stdout and stderr, which are two pipes) may change places for the sake of a merger; they have the same `era`.

Results wait for each other: they go when no rank runs any more, and later output of a rank waits behind its result.
Pure: no clock, no thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Set
from typing import NamedTuple, TypeAlias

import msgspec

_Key: TypeAlias = tuple[str, Hashable, bool]
"""The stream, a value that is equal for equal lines, and whether the text continues a line that was begun."""


PATIENT_CIRCLES = 64
"""The most circles that one call breaks one by one; lines that form more are too unlike to be worth the time."""


class Entry(msgspec.Struct, eq=False):
    """A line or a display of one rank that is not shown yet."""

    lane: deque[Entry]
    key: _Key
    """Entries with equal keys look the same."""
    number: int
    era: int
    due: float
    text: str
    display: object
    is_result: bool


class Row(NamedTuple):
    """A row of equal entries, which are shown as one."""

    key: _Key
    entries: dict[int, Entry]
    """The entries by rank, in the order of ranks."""


class _Queue:
    """The queue of one rank's entries, in a lane per stream."""

    def __init__(self) -> None:
        self.lanes: dict[str, deque[Entry]] = defaultdict(deque)
        self.front: tuple[Entry, ...] = ()
        """Yield the entries that may go: the first, then entries that may as well have come before it."""
        self.through = -1
        """The number up to which entries go, since entries of other ranks wait for one of them."""
        self.era = self.count = 0

    def look(self) -> None:
        """Find the entries that stand in `front` again."""
        first = [lane[0] for lane in self.lanes.values() if lane]
        if len(first) > 1:
            first.sort(key=lambda entry: entry.number)
            first = [entry for entry in first if entry.era == first[0].era]
        self.front = tuple(first)


class Alignment:
    """The queues of all ranks."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = defaultdict(_Queue)
        self._holders: dict[_Key, dict[int, int]] = {}
        """The ranks that have each key, and how often."""
        self._front: dict[_Key, set[int]] = {}
        """The ranks that have each key in front."""
        self._changed: set[int] = set()
        """Ranks with another first entry in a lane than they had when `front` was found."""
        self._results = 0
        self._drawn: set[_Key] = set()
        """The keys for which `_draw` has let the entries before them go."""

    def add(
        self, rank: int, stream: str, key: _Key, due: float, text: str, display: object = None, is_result: bool = False
    ) -> None:
        """Put an entry at the end of the rank's queue; at ``due`` it has waited long enough for other ranks."""
        queue = self._queues[rank]
        lane = queue.lanes[stream]
        lane.append(Entry(lane, key, queue.count, queue.era, due, text, display, is_result))
        queue.count += 1
        self._results += is_result
        if len(lane) == 1:
            self._changed.add(rank)
        holders = self._holders.setdefault(key, {})
        holders[rank] = holders.get(rank, 0) + 1
        self._drawn.discard(key)

    def bar(self, rank: int) -> None:
        """Note that the rank prints its next entries after all that are there."""
        self._queues[rank].era += 1

    @property
    def is_empty(self) -> bool:
        """Whether no entry waits."""
        return not self._holders

    def due_at(self, running: Collection[int]) -> float | None:
        """Return when the next entry has waited long enough, apart from entries that wait for ranks to end."""
        self._look_again()
        heads = (queue.front[0] for queue in self._queues.values() if queue.front)
        return min((head.due for head in heads if not (head.is_result and running)), default=None)

    def take(self, now: float, running: Set[int], *, results: bool = False) -> list[Row]:
        """Return the rows to show, in order: those due by ``now``, and those in front of all running ranks.

        results: those too for which ranks that run may yet have equals.
        """
        rows = self._take(now, frozenset() if results else running, hold=True)
        if self._results and (results or not running):  # all that stood before them is gone, so all are in front
            rows += self._take(now, frozenset(), hold=False)
        return rows

    # ---- private ------------------------------------------------------------------------------------------------

    def _take(self, now: float, running: Set[int], *, hold: bool) -> list[Row]:
        """Do the work of `take`; ``hold`` keeps back results and the entries behind them."""
        rows: list[Row] = []
        self._look_again()
        candidates = {queue.front[0].key for queue in self._queues.values() if queue.front}
        circles = 0
        while True:
            ready = [key for key in candidates if self._may_go(key, now, running, hold)]
            if not ready and circles < PATIENT_CIRCLES and (candidates := self._draw(now, hold)):
                continue
            if not ready:
                circles += 1
                # those that must go wait for each other: the one that most ranks have in front goes first
                waiting = set(self._overdue(now, hold))
                ready = sorted(waiting, key=lambda key: (-len(self._front[key]), self._place(key)))
                ready = ready[: 1 if circles <= PATIENT_CIRCLES else None]
            if not ready:
                return rows
            for key in sorted(ready, key=self._place):
                rows.append(self._pop(key))
            candidates = self._look_again()

    def _look_again(self) -> set[_Key]:
        """Bring `front` up to date; returns the keys that came to stand there."""
        keys: set[_Key] = set()
        fronts = self._front
        for rank in self._changed:
            queue = self._queues[rank]
            for entry in queue.front:
                if (ranks := fronts.get(entry.key)) is not None:
                    ranks.discard(rank)
                    if not ranks:
                        del fronts[entry.key]
            queue.look()
            for entry in queue.front:
                fronts.setdefault(entry.key, set()).add(rank)
                keys.add(entry.key)
        self._changed.clear()
        return keys

    def _may_go(self, key: _Key, now: float, running: Set[int], hold: bool) -> bool:
        """Whether the entries with this key that stand in front may be shown, and no rank has one further back."""
        ranks = self._front.get(key)
        if not ranks or len(ranks) < len(self._holders[key]):
            return False
        everywhere = len(ranks) >= len(running) and ranks.issuperset(running)
        for rank in ranks:
            queue = self._queues[rank]
            first = queue.front[0]
            if first.key == key and not (first.is_result and hold) and (everywhere or _must_go(queue, now)):
                return True
        return False

    def _overdue(self, now: float, hold: bool) -> Iterator[_Key]:
        """Yield the keys of first entries that must be shown, whichever ranks have them."""
        for queue in self._queues.values():
            if queue.front and _must_go(queue, now) and not (queue.front[0].is_result and hold):
                yield queue.front[0].key

    def _draw(self, now: float, hold: bool) -> set[_Key]:
        """Let the entries go that stand before one that others wait for; returns the keys that may go now."""
        keys: set[_Key] = set()
        for key in self._overdue(now, hold):
            if key in self._drawn:
                continue
            self._drawn.add(key)
            for rank in self._holders[key].keys() - self._front[key]:
                queue = self._queues[rank]
                number = next(entry.number for lane in queue.lanes.values() for entry in lane if entry.key == key)
                if number > queue.through:
                    queue.through = number
                    keys.add(queue.front[0].key)
        return keys

    def _place(self, key: _Key) -> tuple[int, int]:
        """Return the key's place among those shown together, by its first rank: cells read the same at each run."""
        rank = min(self._front[key])
        return rank, self._entry(rank, key).number

    def _entry(self, rank: int, key: _Key) -> Entry:
        """Return the entry with this key that the rank has in front."""
        front = self._queues[rank].front
        return front[0] if front[0].key == key else next(entry for entry in front if entry.key == key)

    def _pop(self, key: _Key) -> Row:
        """Take the entries with this key out of the fronts."""
        entries: dict[int, Entry] = {}
        holders = self._holders[key]
        ranks = self._front.pop(key)
        for rank in sorted(ranks):
            entry = self._entry(rank, key)
            entry.lane.popleft()
            entries[rank] = entry
            self._results -= entry.is_result
            if holders[rank] > 1:
                holders[rank] -= 1
            else:
                del holders[rank]
        self._changed |= ranks
        self._drawn.discard(key)
        if not holders:
            del self._holders[key]
        return Row(key, entries)


def _must_go(queue: _Queue, now: float) -> bool:
    first = queue.front[0]
    return first.due <= now or first.number <= queue.through
