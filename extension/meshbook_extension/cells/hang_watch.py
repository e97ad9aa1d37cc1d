"""Looks after the cells that run: one that is held up says by whom, without being asked.

A thread of its own asks the ranks how far they are, first `FIRST_S` after the cell began, then less and less often. It
lives while cells run. What makes a sign is decided in `meshbook_extension.cells.hang_signs`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from meshbook.formatting import format_ranks, name_ranks
from meshbook.stacks.mesh_stacks import RankTold, predicate
from meshbook_extension.cells.hang_signs import HELD, SLOW, Ended, HangDetector, Sign
from meshbook_extension.output.labels import format_seconds

if TYPE_CHECKING:
    from meshbook_extension.cells.running import RunningCell

FIRST_S = 2.0
EVERY_S, SLOWER, SELDOM_S = 1.5, 1.25, 15.0
"""The time between two looks grows from one to the other."""
ANSWER_S = 0.3
READ_S = 1.0


class _WatchedCell:
    """A cell, and when to look at it."""

    def __init__(self, cell: RunningCell, now: float, stop: str) -> None:
        self.cell, self.signs, self.stop = cell, HangDetector(), stop
        self.pause_s, self.due = EVERY_S, now + FIRST_S
        self._ended_at: dict[int, float] = {}
        self.told_suspects = False

    def note_ended(self, now: float) -> Ended | None:
        """The ranks that have ended by now."""
        done = dict(self.cell.output.done)
        for rank in done:
            self._ended_at.setdefault(rank, now)
        longest_s = max((one.duration_s for one in done.values()), default=0.0)
        return Ended(len(done), longest_s, max(self._ended_at.values())) if done else None

    @property
    def over(self) -> bool:
        """It has ended, failed or was interrupted: others tell of that."""
        cell = self.cell
        return cell.run.future.done() or cell.output.hide_interrupts or bool(cell.failures) or self.signs.spent


class HangWatch:
    """The cells of a session that run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[_WatchedCell] = []
        self._thread: threading.Thread | None = None

    def add(self, cell: RunningCell, stop: str = "interrupt") -> None:
        """Look after a cell until it ends. stop: what ends it."""
        with self._changed:
            self._watched.append(_WatchedCell(cell, time.monotonic(), stop))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="meshbook.watch", daemon=True)
                self._thread.start()
        cell.run.future.add_done_callback(lambda _future: self._wake())

    def close(self) -> None:
        """Look after nothing any more."""
        with self._changed:
            self._watched.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(5)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (watched := self._next()) is not None:
            try:
                self._look_at(watched)
            except Exception:  # the mesh was stopped, detached, changed: the cell says so, and this is a service only
                watched.due = float("inf")

    def _next(self) -> _WatchedCell | None:
        """Wait until a cell is due; None when there is none left, and then the thread is to end."""
        with self._changed:
            while True:
                self._watched = [each for each in self._watched if not each.over and each.due < float("inf")]
                if not self._watched:
                    self._thread = None
                    return None
                first = min(self._watched, key=lambda each: each.due)
                left_s = first.due - time.monotonic()
                if left_s <= 0:
                    first.due = time.monotonic() + first.pause_s
                    first.pause_s = min(first.pause_s * SLOWER, SELDOM_S)
                    return first
                self._changed.wait(left_s)

    def _look_at(self, watched: _WatchedCell) -> None:
        cell = watched.cell
        mesh = cell.procs.base()
        if mesh.lost or not mesh.alive:
            return
        if mesh.suspects and not watched.told_suspects:
            watched.told_suspects = True
            hosts = "; ".join(f"host {name} is {why}" for name, why in mesh.suspects.items())
            cell.output.note(f"{hosts}\n  its ranks keep their state and go on when it answers    stop: {watched.stop}")
        told = mesh.ask_for(RankTold, "progress", timeout_s=ANSWER_S)
        now = time.monotonic()
        running = set(cell.waiting)
        sign = watched.signs.look(now, told, running, watched.note_ended(now))
        if sign is not None and (text := self._describe(sign, watched, told)) and not watched.over:
            watched.signs.given(sign)
            cell.output.note(text)

    def _describe(self, sign: Sign, watched: _WatchedCell, told: dict[int, RankTold]) -> str:
        """What the person reads; nothing if a closer look does not confirm it."""
        cell, stop = watched.cell, f"stop: {watched.stop}"
        if sign.kind == SLOW:
            (odd,) = sign.odd
            place = told[odd].where
            return (
                f"rank {odd} holds the others up: they wait {sign.share:.0%} of the time, since it takes about "
                f"{sign.times:.0f}x as long for its part\n  it is {place} just now    look: %mesh stacks    {stop}"
            )
        stacks = cell.procs.base().stacks(timeout_s=READ_S)
        if sign.kind == HELD:
            verdict = stacks.verdict
            if verdict is None or verdict.odd != sign.odd:
                return ""
            since = format_seconds(verdict.since_s)
            return f"{verdict.text}\n  for {since} now    look: %mesh stacks    {stop}"
        ended = set(cell.ranks) - set(sign.odd)
        doing = {predicate(stacks[rank]) for rank in sign.odd}
        one = len(sign.odd) == 1
        what = f": it {doing.pop()}" if one else ""
        return (
            f"{name_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended {cell.what}; "
            f"{name_ranks(sign.odd)} still run{'s' if one else ''} it{what}\n"
            f"  look: %mesh stacks rank={format_ranks(sign.odd)}    {stop}"
        )
