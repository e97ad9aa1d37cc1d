"""The ranks of a mesh that are stopped at a prompt, as the controller knows them.

Ranks tell of each prompt unasked (`meshbook.wire.messages.Prompted`); what they told to a former controller is asked
for (`meshbook.mesh.states.stopped`). While any rank is stopped, the deadlines of the mesh stand still:
`clock`, and on the ranks `meshbook.groups.group_state.GroupState.clock`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from meshbook.wire.messages import AtPrompt

LEFT_MAX_CHARS = 200_000
"""What ranks have written at prompts and nobody has looked at yet; older text goes first."""


class Stop:
    """A rank at a prompt, from a line of code until it goes on."""

    def __init__(self, rank: int, at: AtPrompt, output: int) -> None:
        self.rank, self.at, self.output = rank, at, output
        self.seen = False
        """Whether a person was told."""

    @property
    def words(self) -> str:
        """``stopped at cell 7, line 5``"""
        return f"post-mortem of {self.at.why}, at {self.at.place}" if self.at.why else f"stopped at {self.at.place}"


class StoppedRanks:
    """Written under the turn; read, and waited for, by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.stops: dict[int, Stop] = {}
        """By rank."""
        self._numbers: dict[int, int] = {}
        self._texts: dict[int, str] = {}
        self._held_since: float | None = None
        self._held_s = 0.0
        self.stepping: set[int] = set()
        """Ranks that somebody at their prompt moves from line to line: a new stop of theirs is no news."""
        self.left: set[int] = set()
        """Ranks whose prompts were left by a person (``detach``): they wait until it is opened again."""

    def take(self, rank: int, at: AtPrompt, output: int) -> Stop | None:
        """What a rank told. Returns: the stop, if it is a new one."""
        with self._changed:
            if at.number <= self._numbers.get(rank, 0):
                return None
            self._numbers[rank] = at.number
            is_news = at.place and rank not in self.stops and rank not in self.stepping
            before = "" if is_news else self._texts.get(rank, "")  # nobody has read it, and nobody will
            self._texts[rank] = (before + at.text)[-LEFT_MAX_CHARS:]
            new = None
            if not at.place:
                self.stops.pop(rank, None)
                self.left.discard(rank)
            elif (stop := self.stops.get(rank)) is not None:
                stop.at = at
            else:
                new = self.stops[rank] = Stop(rank, at, output)
                new.seen = rank in self.stepping
            self._changed_now()
            return new

    def lose(self, rank: int) -> None:
        """The rank has ended, or is another's from now on."""
        with self._changed:
            self.stops.pop(rank, None)
            self._numbers.pop(rank, None)
            self._texts.pop(rank, None)
            self.left.discard(rank)
            self.stepping.discard(rank)
            self._changed_now()

    def clear(self) -> None:
        """Forget all stops."""
        for rank in list(self._numbers):
            self.lose(rank)

    def _changed_now(self) -> None:
        now = time.monotonic()
        if self.stops and self._held_since is None:
            self._held_since = now
        elif not self.stops and self._held_since is not None:
            self._held_s += now - self._held_since
            self._held_since = None
        self._changed.notify_all()

    def __bool__(self) -> bool:
        """Whether any rank is stopped."""
        return bool(self.stops)

    def of(self, ranks: Collection[int]) -> dict[int, Stop]:
        """Those of ``ranks`` that are stopped."""
        if not self.stops:
            return {}
        wanted = frozenset(ranks)
        return {rank: stop for rank, stop in sorted(self.stops.items()) if rank in wanted}

    def number(self, rank: int) -> int:
        """Of the last prompt that the rank told of."""
        return self._numbers.get(rank, 0)

    def take_text(self, rank: int) -> str:
        """What the rank has written at its prompts since the last time."""
        with self._changed:
            return self._texts.pop(rank, "")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition()``, looked at whenever something changes. Raises: KeyboardInterrupt."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wake(self) -> None:
        """Have those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def clock(self) -> float:
        """Seconds for deadlines: monotonic, and still while a rank is stopped."""
        now = time.monotonic() if self._held_since is None else self._held_since
        return now - self._held_s
