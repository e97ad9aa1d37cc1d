"""The watch over running cells: a cell that is held up says by which rank, without being asked.

`WatchedCell` asks the ranks how far they are, first `FIRST_S` after the cell began, then less and less often.
`HangDetector`, which is pure, decides from looks some seconds apart what is a sign:

    held      ranks have waited for `HELD_S` without a break for one that does not come; or all wait for each other
    slow      ranks spend most of their time waiting, and one hardly any: it has more to do, or does it slower
    alone     most have ended long ago, the rest runs on

Cells whose ranks keep pace give no sign, however long they run. Each sign is given once, and few in all. Where ranks
are held up for longer, the stack of the rank that holds them up follows: a command would wait behind the cell.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from meshbook.concurrency.background import run_in_background
from meshbook.formatting import format_ranks, name_ranks
from meshbook.groups.deadlock import RankProgress, find_stragglers
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask
from meshbook.stacks.mesh_stacks import MeshStacks, RankTold, predicate
from meshbook_extension.cells.output import OwnDisplay
from meshbook_extension.cells.running import RunningCell
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import format_seconds
from meshbook_extension.output.publisher import Scheduled

HELD_S = 5.0
CIRCLE_S = 2.0
"""The same time where ranks wait for each other, which no patience helps."""
ALONE_S, ALONE_TIMES = 8.0, 3
"""A rank is alone if the others have ended this long ago, and in less than a third of the time."""
WINDOW_S = 6.0
"""The shortest time over which shares of waiting are taken."""
WINDOW_STEPS = 3
"""The fewest operations over which shares of waiting are taken."""
WAITING_SHARE, WORKING_SHARE = 0.6, 0.2
MOST = 3
"""The most signs that one cell gives."""

HELD, SLOW, ALONE = "held", "slow", "alone"


class Sign(NamedTuple):
    """A sign of trouble that the person should know."""

    kind: str
    odd: tuple[int, ...]
    share: float = 0.0
    """The part of their time that the others wait, for `SLOW`."""
    times: float = 0.0
    """The factor by which the odd rank works longer than the others, for `SLOW`."""


class Ended(NamedTuple):
    """The ranks that have ended the cell."""

    ranks: int
    longest_s: float
    """The time that the slowest of them took."""
    last_at: float
    """The monotonic time at which the last one ended."""


class HangDetector:
    """The detector of signs in one cell."""

    def __init__(self) -> None:
        self._given: set[tuple[str, tuple[int, ...]]] = set()
        self._start: tuple[float, Mapping[int, RankTold]] | None = None
        """The time at which shares of waiting begin, and what the running ranks told then."""
        self._resumed = float("-inf")
        """The time at which a rank was last seen at a prompt."""

    @property
    def spent(self) -> bool:
        """Whether the cell has given all of its signs."""
        return len(self._given) >= MOST

    def given(self, sign: Sign) -> None:
        """Note that the person has read the sign."""
        self._given.add((sign.kind, sign.odd))

    def look(
        self, now: float, told: Mapping[int, RankTold], running: Collection[int], ended: Ended | None = None
    ) -> Sign | None:
        """Return a new sign, if there is one.

        now: monotonic. told: the answers of ranks. running, ended: the ranks of the cell.
        """
        if any(one.paused for one in told.values()):
            self._start, self._resumed = None, now
            return None
        if now - self._resumed < HELD_S:  # the others have waited for the person, not for a rank
            return None
        for sign in (_held(told, running), self._slow(now, told, running), _alone(now, told, running, ended)):
            if sign is not None and (sign.kind, sign.odd) not in self._given:
                return sign
        return None

    def _slow(self, now: float, told: Mapping[int, RankTold], running: Collection[int]) -> Sign | None:
        here = {rank: told[rank] for rank in running if rank in told}
        began, before = self._start or (now, {})
        passed_s = now - began
        if here.keys() == before.keys() and (len(here) < 2 or passed_s < WINDOW_S):
            return None
        self._start = now, here
        if here.keys() != before.keys():
            return None
        if min(_issued(one) - _issued(before[rank]) for rank, one in here.items()) < WINDOW_STEPS:
            return None
        shares = {
            rank: (one.collectives.waited_s - before[rank].collectives.waited_s) / passed_s
            for rank, one in here.items()
        }
        odd = min(shares, key=lambda rank: shares[rank])
        others = statistics.median(share for rank, share in shares.items() if rank != odd)
        if shares[odd] > WORKING_SHARE or others < WAITING_SHARE:
            return None
        return Sign(SLOW, (odd,), min(others, 1.0), (1 - shares[odd]) / max(1 - others, 0.01))


def _issued(told: RankTold) -> int:
    return sum(
        group.issued + sum(group.sent.values()) + sum(group.received.values()) for group in told.collectives.groups
    )


def _held(told: Mapping[int, RankTold], running: Collection[int]) -> Sign | None:
    poll = {rank: RankProgress("", one.collectives) for rank, one in told.items()}
    poll.update({rank: RankProgress("", None) for rank in running if rank not in told})
    verdict = find_stragglers(poll)
    if verdict is None or not set(verdict.odd) & set(running):  # of those that never come the runtime tells
        return None
    return Sign(HELD, verdict.odd) if verdict.since_s >= (CIRCLE_S if verdict.circular else HELD_S) else None


def _alone(now: float, told: Mapping[int, RankTold], running: Collection[int], ended: Ended | None) -> Sign | None:
    if ended is None or not running or ended.ranks < len(running):
        return None
    if any(rank in told and told[rank].collectives.waiting for rank in running):
        return None  # the runtime tells of ranks that wait for others that have ended
    late = now - ended.last_at >= max(ALONE_S, ALONE_TIMES * ended.longest_s)
    return Sign(ALONE, tuple(sorted(running))) if late else None


FIRST_S = 2.0
EVERY_S, SLOWER, SELDOM_S = 1.5, 1.25, 15.0
"""The time between two looks, the factor by which it grows, and its limit."""
STACK_S = 3.0
"""The time after the sign of a held cell until its stack follows."""
ANSWER_S = 0.3
READ_S = 1.0


Draw: TypeAlias = "Callable[[str, str, Sequence[int]], OwnDisplay | None]"
"""A function that draws a sign: its words, the same with commands that help, and its ranks; None where text is all."""


class CellHooks(NamedTuple):
    """The rooms above, as the cells of a session see them."""

    open_notice: Callable[[Session, RunningCell], Draw] = lambda session, cell: lambda words, text, odd: None
    """Opens the display for the signs of a cell, which are text without one."""
    name_cell: Callable[[ProcMesh, str], str] = lambda procs, cell: ""
    """Returns the name of a cell's file on ranks, while a debugger looks at one of them."""


class WatchedCell(Scheduled):
    """A running cell under watch: the publisher's thread times the looks, which run aside, as ranks may not answer."""

    def __init__(self, cell: RunningCell, session: Session, stop: str = "interrupt") -> None:
        """Watch a cell until it ends. stop: how the person ends it."""
        self._cell = cell
        self._publisher = publisher = session.publisher
        self._draw = session.part(CellHooks).open_notice(session, cell)
        self._stop = f"stop: {stop}"
        self._signs = HangDetector()
        self._pause_s = EVERY_S
        self._ended_at: dict[int, float] = {}
        self._told_suspects = False
        self._held: tuple[Sign, float] | None = None
        """The sign of ranks that are held up, with its time, until the stack has followed."""
        publisher.schedule(self, time.monotonic() + FIRST_S)
        cell.run.future.add_done_callback(lambda _future: publisher.forget(self))

    @property
    def is_over(self) -> bool:
        """Whether the cell has ended, failed or was interrupted, of which its own output tells."""
        cell = self._cell
        return cell.run.future.done() or cell.output.hide_interrupts or bool(cell.failures) or self._signs.spent

    def pump(self, now: float) -> float | None:
        """Begin a look, which schedules the next one."""
        if not self.is_over and not self._publisher.is_stopping:
            run_in_background(self._look)
        return None

    def _look(self) -> None:
        due = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * SLOWER, SELDOM_S)
        try:
            self._look_at_ranks()
        except Exception:  # the mesh was stopped, detached, changed: the cell says so, and this is a service only
            return
        self._publisher.schedule_unless(self, due, lambda: self.is_over)

    def _look_at_ranks(self) -> None:
        cell = self._cell
        mesh = cell.procs.base()
        if mesh.lost or not mesh.alive:
            return
        if states.suspects(mesh) and not self._told_suspects:
            self._told_suspects = True
            hosts = "; ".join(f"host {name} is {why}" for name, why in states.suspects(mesh).items())
            cell.output.note(f"{hosts}\n  its ranks keep their state and go on when it answers    {self._stop}")
        told = ask(mesh, RankTold, "progress", timeout_s=ANSWER_S)
        now = time.monotonic()
        sign = self._signs.look(now, told, set(cell.waiting), self._note_ended(now))
        if sign is not None and (text := self._describe(sign, told)) and not self.is_over:
            self._signs.given(sign)
            self._show(text, sign)
            self._held = (sign, now) if sign.kind == HELD else self._held
        elif self._held is not None and now >= self._held[1] + STACK_S:
            (held, _), self._held = self._held, None
            stacks = mesh.stacks(timeout_s=READ_S)
            if stacks.verdict is not None and stacks.verdict.odd == held.odd and not self.is_over:
                cell.output.note(MeshStacks([stacks[rank] for rank in held.odd]).text())

    def _show(self, words: str, sign: Sign) -> None:
        """Show the words with buttons, else with the commands that do the same."""
        look = (
            f"\n  look: %mesh stacks rank={format_ranks(sign.odd)}" if sign.kind == ALONE else "    look: %mesh stacks"
        )
        text = f"{words}{look}    {self._stop}"
        drawn = self._draw(words, text, sign.odd)
        if drawn is not None:
            self._cell.output.show(drawn)
        else:
            self._cell.output.note(text)

    def _note_ended(self, now: float) -> Ended | None:
        """Return the ranks that have ended by now."""
        done = dict(self._cell.output.done)
        for rank in done:
            self._ended_at.setdefault(rank, now)
        longest_s = max((one.duration_s for one in done.values()), default=0.0)
        return Ended(len(done), longest_s, max(self._ended_at.values())) if done else None

    def _describe(self, sign: Sign, told: dict[int, RankTold]) -> str:
        """Return the text of a sign; nothing if a closer look does not confirm it."""
        cell = self._cell
        if sign.kind == SLOW:
            (odd,) = sign.odd
            place = told[odd].where
            return (
                f"rank {odd} holds the others up: they wait {sign.share:.0%} of the time, since it takes about "
                f"{sign.times:.0f}x as long for its part\n  it is {place} just now"
            )
        stacks = cell.procs.base().stacks(timeout_s=READ_S)
        if sign.kind == HELD:
            verdict = stacks.verdict
            if verdict is None or verdict.odd != sign.odd:
                return ""
            since = format_seconds(verdict.since_s)
            return f"{verdict.text}\n  for {since} now"
        ended = set(cell.ranks) - set(sign.odd)
        doing = {predicate(stacks[rank]) for rank in sign.odd}
        one = len(sign.odd) == 1
        what = f": it {doing.pop()}" if one else ""
        return (
            f"{name_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended {cell.what}; "
            f"{name_ranks(sign.odd)} still run{'s' if one else ''} it{what}"
        )
