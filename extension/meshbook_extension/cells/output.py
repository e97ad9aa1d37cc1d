"""The output of one cell, from the ranks' events to a sink: grouped, bounded, and never silently less.

`receive` is called on the runtime's I/O thread and only queues; `pump` is called on the publisher's thread and does the
rest. Text goes out at most ten times a second, failures at once.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import NamedTuple

from meshbook.calls.output import (
    DisplayData,
    NewScalars,
    Notice,
    OutputDropped,
    OutputEvent,
    RankDone,
    Stop,
    StreamText,
)
from meshbook.errors import FailureKind
from meshbook.formatting import name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.shape.members import members_of
from meshbook_extension.cells.curves import CurveView, WatchedNames
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.budget import LABEL_CHARACTERS, Budget, name_paths
from meshbook_extension.output.display_rounds import DisplayRounds, RankCard, look_of
from meshbook_extension.output.labels import (
    MANY_RUNS,
    NEWS,
    NOTICE,
    RUNS,
    WARN,
    CellMessage,
    FailureView,
    Labeller,
    Text,
    join_runs,
    label,
    show_message,
)
from meshbook_extension.output.line_merging import Grouping, LinePiece, grouping_for
from meshbook_extension.output.line_reader import join_bars
from meshbook_extension.output.publisher import CellSink, Publisher, Scheduled, is_attended, parent_of, sink_for
from meshbook_extension.output.transcripts import Transcript, Transcripts

TEXT_INTERVAL_S = 0.1
BARS_INTERVAL_S = 0.25
FIRST_DELAY_S = 0.02
"""The time that a first event waits for others."""
STOP_NOTE_S = 0.3
"""The time after which a stop at a breakpoint is reported, unless its prompt has opened."""
PATIENCE_S = 3.0
"""The time that a line waits for hosts which do not answer whether all text of their ranks has come."""
FLOOD_CHARACTERS = 20_000
"""The amount of unshown text from which on lines wait for their window only: a longer wait costs time."""
COUNT_INTERVAL_S = 5.0
"""The time between two counts of unshown text, once the cell has ended."""
LOOK_S = 0.1
"""The time between two looks of a cell at the output that it waits for."""
REST_NOTE_S = 2.0
"""The time after which a cell says that it still shows its ranks' text."""
STALLED_S = 30.0
"""The time without any progress after which a cell stops waiting for its output."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


RUNS_OF_CELL = 300
"""The most changes between stdout and stderr that stay in order: each is an output of its own for a front end."""


_Output = StreamText | DisplayData | OutputDropped
"""The events that bring output of a rank."""


class OwnDisplay(NamedTuple):
    """Rich content of our own, not of a rank."""

    data: Mapping[str, object]
    metadata: Mapping[str, object]
    display_id: str


class Concluded(NamedTuple):
    """The event that the cell's outcome is known. invalid: ranks whose values mean nothing."""

    invalid: frozenset[int]


class CellOutput(Scheduled):
    """The output of one cell, which takes events and shows them. The main thread makes it, and `finish` waits there."""

    def __init__(
        self,
        ranks: Collection[int],
        sink: CellSink,
        grouping: Grouping,
        publisher: Publisher,
        log_paths: Callable[[], Mapping[int, str]],
        await_printed: Callable[[Callable[[], None], float], object],
        name: str = "",
        curves: CurveView | None = None,
        coordinates: Callable[[int], str] = lambda rank: "",
        only: Collection[int] = (),
    ) -> None:
        """await_printed: calls its first argument when all text printed by now has come, or after the given seconds.

        coordinates: those of a rank, in words. only: the ranks whose output is shown; all, if there are none.
        """
        self.done: dict[int, RankDone] = {}
        """The ends of ranks, known before they are shown."""
        self.hide_interrupts = False
        """Whether the person interrupted the cell, so that interrupts of its ranks are no news."""
        self.progress: list[tuple[tuple[int, ...], str]] = []
        """The progress bars as they stand, equal ones once, each with its ranks."""
        self.stops_where = "; look: %mesh pdb"
        """The advice behind the place at which a rank stopped."""
        self.defers_tracebacks = False
        """Whether the cell's own error has the tracebacks: tools that run notebooks keep the first error."""
        self.awaits_outcome = False
        """Whether values of last expressions wait until `conclude` tells which of them are valid."""
        self._invalid: frozenset[int] = frozenset()
        self._held_ends: list[tuple[int, float]] = []
        """The ends kept from the grouping, with their times: no value is shown while a rank counts as running."""
        self._stopped_ranks: deque[tuple[float, Stop]] = deque()
        self._ranks, self._only = frozenset(ranks), frozenset(only)
        self.summary_follows = False
        """Whether an error that names all failed ranks is raised when the cell has ended."""
        self._sink, self._grouping, self._publisher, self._log_paths = sink, grouping, publisher, log_paths
        self._name, self._curves = name, curves
        self._events: deque[tuple[float, OutputEvent | CellMessage | OwnDisplay | Concluded | None]] = deque()
        """The events, each with its time; None stands for the news that all text printed by then has come."""
        self._await_printed = await_printed
        self._unshown_characters = 0
        """The characters that have come since text was shown."""
        self._waiting: dict[int, int] = {}
        """The same of each rank: text behind a budget's worth of it would find the budget spent."""
        self._moved = 0
        """A count of events taken in and texts shown."""
        self._complete_to, self._asked_at = 0.0, math.inf
        """The time by which all printed text has come; and the time of an open question for more, else infinity."""
        self._labeller = Labeller()
        self._texts: list[Text] = []
        self._notes: list[CellMessage | OwnDisplay] = []
        self._rounds = DisplayRounds(
            sink,
            self._only or self._ranks,
            lambda ranks: coordinates(ranks[0]) if len(ranks) == 1 else "same",
            joins=grouping.joins_bars,
        )
        self._runs = 0
        self._failures = FailureView()
        self._budget = Budget()
        self._bars: list[str] = []
        self._bars_shown: list[str] = []
        self._next_text_at = 0.0
        self._next_bars_at = 0.0
        self._next_count_at = 0.0
        self._told_of_limit = False
        self._finishing = self._closing = False
        self._ended = self._all_done = False
        self.has_unshown = False
        """Whether an event was received that is not shown yet; from any thread."""
        self._drained = threading.Event()
        self._error: Exception | None = None

    def receive(self, event: OutputEvent) -> None:
        """Queue an event, on the runtime's I/O thread, where nothing may wait."""
        now = time.monotonic()
        if isinstance(event, NewScalars):
            if self._curves is not None:
                self._curves.note(event.names)
            return
        if self._only and isinstance(event, _Output) and event.rank not in self._only:
            return
        at = max(now + FIRST_DELAY_S, self._next_text_at)
        if isinstance(event, RankDone):
            self.done[event.rank] = event
            at = now + (0 if len(self.done) == len(self._ranks) else FIRST_DELAY_S)
        self.has_unshown = True
        self._events.append((now, event))
        self._publisher.schedule(self, at)

    def note(self, text: str, kind: str = WARN) -> None:
        """Show a message of our own in the cell's output; from any thread. kind: of those that cards have."""
        self._put(CellMessage(kind, text))

    def show(self, shown: OwnDisplay) -> None:
        """Show rich content of our own in the cell's output; from any thread."""
        self._put(shown)

    def await_outcome(self, is_running: Callable[[], bool]) -> None:
        """Keep the values of last expressions until `conclude`. is_running: whether the cell goes on."""
        self.awaits_outcome = True
        if isinstance(self._sink, Transcript):
            self._sink.follow(is_running)

    def conclude(self, invalid: Collection[int]) -> None:
        """Show the values of last expressions, but for those of the ranks ``invalid``; from any thread."""
        self._put(Concluded(frozenset(invalid)))

    def _put(self, event: CellMessage | OwnDisplay | Concluded) -> None:
        now = time.monotonic()
        self._events.append((now, event))
        self._publisher.schedule(self, now)

    def finish(self) -> None:
        """Show everything received so far and wait until it is shown. Later output is shown too.

        A cell with much to show says so; output that an interrupt leaves unshown is counted. One whose output nothing
        takes, for so long, ends with a notice.
        Raises: the errors of showing it; KeyboardInterrupt, when the rest was counted.
        """
        self._closing = True
        self.drain()

    def drain(self) -> None:
        """Show everything received so far, as `finish`, while the cell goes on."""
        self._drained.clear()
        self._finishing = True
        self._publisher.schedule(self, time.monotonic())
        try:
            self._wait_drained(REST_NOTE_S)
        except KeyboardInterrupt:
            self._budget.exceeded = True  # what is on its way passes quickly, and is counted
            self._wait_drained(math.inf)
            raise
        if self._error is not None:
            raise self._error

    def _wait_drained(self, note_after_s: float) -> None:
        began = moved_at = time.monotonic()
        moved = self._moved
        while not self._drained.wait(LOOK_S):
            now = time.monotonic()
            if self._moved != moved:
                moved, moved_at = self._moved, now
            if now - moved_at >= STALLED_S:
                where = f"{name_paths([*self._log_paths().values()])}%mesh logs -n 1000"
                ends = f"no output could be shown for {STALLED_S:g} s, so the cell ends without the rest"
                print(f"{ends}\n  all of it: {where}", file=sys.stderr)
                return
            if now - began >= note_after_s:
                note_after_s = math.inf
                print("showing the rest of what ranks printed; an interrupt leaves it to the logs", file=sys.stderr)

    @property
    def is_full(self) -> bool:
        """Whether the budget is spent, so that more text is only counted."""
        return self._budget.exceeded

    # ---- the publisher's thread ------------------------------------------------------------------------------

    def pump(self, now: float) -> float | None:
        """Take the events in and show everything due; returns when more will be due."""
        finishing, self._finishing = self._finishing or self._publisher.is_stopping, False
        self.has_unshown = False
        self._ended = self._ended or (finishing and self._closing)
        if now >= self._asked_at + PATIENCE_S:
            self._take(self._asked_at, None)
        while self._events:
            self._take(*self._events.popleft())
        if self._unshown_characters > FLOOD_CHARACTERS:
            self._complete_to = now
        failures_at = self._failures.due_at
        everything = finishing or (failures_at is not None and failures_at <= now)
        at_once, self._all_done = everything or self._all_done, False
        if finishing:
            self._take_skipped(now)
            self._show(self._grouping.close(now, results=self._ended), now, at_once=True)
            self._end_line()
        elif at_once or now >= self._next_text_at:
            self._show(self._grouping.take(self._complete_to, at_once=everything), now, at_once=everything)
        if everything or (at_once and self._failures.has_news):
            self._end_line()
            without_repeats = finishing and self.summary_follows
            self._failures.show(self._sink, brief=self.defers_tracebacks, without_repeats=without_repeats)
        self._note_stops(now)
        self._show_notes()
        self._rounds.draw_again(now, at_once=finishing)
        self._show_bars(now)
        if self._curves is not None and finishing:
            self._curves.pump(now, at_once=True)
        if self._ended and (finishing or now >= self._next_count_at):
            self._show_count(now)
        if finishing:
            self._drained.set()
        due = self._due_at(now)
        self.has_unshown = self.has_unshown or due is not None
        return due

    def fail(self, error: Exception) -> None:
        self._error = error
        self._drained.set()

    def _due_at(self, now: float) -> float | None:
        times = [self._failures.due_at, *(at for at, _ in self._stopped_ranks)]
        lines_at = self._grouping.due_at()
        if lines_at is not None and lines_at > self._complete_to:
            times.append(self._ask(now) if lines_at <= now else lines_at)
        elif lines_at is not None:
            times.append(max(lines_at, self._next_text_at))
        rounds_at = self._rounds.due_at()
        if rounds_at is not None:
            times.append(max(rounds_at, self._next_text_at))
        if self._bars != self._bars_shown:
            times.append(self._next_bars_at)
        if self._ended and self._budget.has_news:
            times.append(self._next_count_at)
        return min((at for at in times if at is not None), default=None)

    def _ask(self, now: float) -> float:
        """Ask for all text printed by now, before lines go that have waited; returns when to go on without it."""
        if self._asked_at == math.inf:
            self._asked_at = now
            self._await_printed(lambda: self._on_printed(now), PATIENCE_S)
        return self._asked_at + PATIENCE_S

    def _on_printed(self, asked_at: float) -> None:
        self._events.append((asked_at, None))
        self._publisher.schedule(self, max(time.monotonic(), self._next_text_at))

    def _take(self, at: float, event: OutputEvent | CellMessage | OwnDisplay | Concluded | None) -> None:
        self._moved += 1
        if isinstance(event, StreamText):
            self._take_text(event, at)
        elif event is None:
            self._complete_to = max(self._complete_to, at)
            if at == self._asked_at:
                self._asked_at = math.inf
        elif isinstance(event, DisplayData):
            self._take_display(event, at)
        elif isinstance(event, OutputDropped):
            self._budget.cut(event.rank, event.size_bytes, event.log_path, event.lacks)
            if event.size_bytes:
                self._tell_of_limit()
        elif isinstance(event, RankDone):
            self._all_done = len(self.done) == len(self._ranks)
            if self._all_done and self.awaits_outcome:
                self._held_ends.append((event.rank, at))
            else:
                self._grouping.end(event.rank, at)
            failure = event.failure
            if failure is not None and not (self.hide_interrupts and failure.kind is FailureKind.INTERRUPTED):
                self._failures.add(failure, at)
        elif isinstance(event, Stop):
            self._stopped_ranks.append((at + STOP_NOTE_S, event))
        elif isinstance(event, CellMessage | OwnDisplay):
            self._notes.append(event)
        elif isinstance(event, Concluded):
            self._invalid, self.awaits_outcome, self._all_done = event.invalid, False, True
            while self._held_ends:
                self._grouping.end(*self._held_ends.pop(0))
        elif isinstance(event, Notice):
            self._notes.append(CellMessage(NOTICE, event.text))

    def _take_text(self, event: StreamText, at: float) -> None:
        text, room, rest = event.text, self._budget.limit - self._waiting.get(event.rank, 0), ""
        if "\r" not in text:
            if self._budget.exceeded or room <= 0:
                self._budget.skip(event.rank, event.stream, text)
                return
            if len(text) > room:
                end = text.find("\n", room) + 1 or len(text)
                text, rest = text[:end], text[end:]
            labels = LABEL_CHARACTERS * text.count("\n")
            self._waiting[event.rank] = self._budget.limit - room + len(text) + labels
        if self._budget.has_skipped(event.rank):
            self._take_skipped(at)
        self._unshown_characters += len(text)
        self._grouping.feed(event.rank, event.stream, text, at, event.place)
        if rest:
            self._budget.skip(event.rank, event.stream, rest)

    def _take_skipped(self, now: float) -> None:
        for rank, stream, text in self._budget.take_skipped():
            self._grouping.feed(rank, stream, text, now)

    def _take_display(self, event: DisplayData, at: float) -> None:
        data = dict(event.data)
        if WIDGET_VIEW in data and "text/plain" in data:
            del data[WIDGET_VIEW]  # the widget lives on the rank, where no front end can reach it
        own = (event.transient or {}).get("display_id")
        display_id = f"{self._name}.{event.rank}.{own}" if own else None  # since two ranks may choose the same id
        card = RankCard((event.rank,), data, event.metadata, display_id, event.is_result)
        if event.update and display_id:
            self._rounds.update(card)
            return
        self._rounds.expect(card)
        key: Hashable = (event.rank, display_id) if display_id else look_of(data)
        self._grouping.feed_display(event.rank, key, card, at, is_result=event.is_result)

    def _show(self, pieces: list[LinePiece], now: float, *, at_once: bool = False) -> None:
        admitted = (piece for piece in pieces if piece.display is None or self._admit_display(piece))
        for item in self._rounds.arrange(admitted, now, at_once=at_once):
            if not isinstance(item, LinePiece):
                self._end_line()
                self._rounds.show(item, now)
            elif self._budget.admit(item):
                self._texts += self._labeller.write(item)
            else:
                self._tell_of_limit()
        if self._texts:
            self._next_text_at, self._unshown_characters = now + TEXT_INTERVAL_S, 0
            self._waiting.clear()
        self._send_texts()

    def _admit_display(self, piece: LinePiece) -> bool:
        """Whether a display is shown, and of which ranks: not the values of those whose values mean nothing."""
        card = piece.display
        assert isinstance(card, RankCard)
        card.ranks = tuple(rank for rank in piece.ranks if not (card.is_result and rank in self._invalid))
        size = sum(len(str(value)) for value in card.data.values())
        return bool(card.ranks) and self._budget.admit_display(piece._replace(ranks=card.ranks), size)

    def _tell_of_limit(self) -> None:
        if not self._told_of_limit:
            self._told_of_limit = True
            where = "" if self._budget.lacks else "; all of it goes to the logs"
            text = f"more is printed than can be shown here{where}: %mesh logs -n 100"
            self._notes.append(CellMessage(NOTICE, text))

    def _end_line(self) -> None:
        """End the open line, so that the next text begins a line."""
        self._texts += self._labeller.end_line()
        self._send_texts()

    def _send_texts(self) -> None:
        texts, self._texts = self._texts, []
        for stream, text in join_runs(texts, RUNS if self._runs > RUNS_OF_CELL else MANY_RUNS):
            self._sink.stream(stream, text)
            self._runs += 1
            self._moved += 1

    def _show_notes(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            if isinstance(note, CellMessage) and note.kind == NEWS:
                self._texts += [*self._labeller.end_line(), Text("stdout", f"{note.text}\n")]
                continue
            self._end_line()
            if isinstance(note, OwnDisplay):
                self._sink.display(note.data, note.metadata, note.display_id)
            else:
                show_message(self._sink, note.kind, note.text)
        self._send_texts()

    def _note_stops(self, now: float) -> None:
        """Report the ranks that stopped without a prompt, those at one place together."""
        if not self._stopped_ranks or self._stopped_ranks[0][0] > now:
            return
        places: dict[str, list[int]] = {}
        for _, stop in self._stopped_ranks:
            if not stop.seen:
                stop.seen = True
                places.setdefault(stop.words, []).append(stop.rank)
        self._stopped_ranks.clear()
        self._notes += [
            CellMessage(NOTICE, f"{name_ranks(ranks)} {words}{self.stops_where}") for words, ranks in places.items()
        ]

    def _show_bars(self, now: float) -> None:
        self.progress = self._grouping.bars()
        bars = join_bars(self.progress) if self._grouping.joins_bars else self.progress
        self._bars = [f"{label(ranks)} {state}" for ranks, state in bars]
        if self._bars != self._bars_shown and (now >= self._next_bars_at or not self._bars):
            self._bars_shown = self._bars
            self._next_bars_at = now + BARS_INTERVAL_S
            self._sink.bars(self._bars)

    def _show_count(self, now: float) -> None:
        if not self._budget.has_news:
            return
        self._next_count_at = now + COUNT_INTERVAL_S
        self._take_skipped(now)
        self._show(self._grouping.take(now, at_once=True), now)
        note, last = self._budget.report(self._log_paths())
        self._end_line()
        if note:
            show_message(self._sink, NOTICE, note.rstrip("\n"))
        for piece in last:
            self._texts += self._labeller.write(piece)
        self._end_line()


def open_output(
    session: Session,
    procs: ProcMesh,
    *,
    group: str = "equal",
    ranks: Collection[int] | None = None,
    what: str = "",
    only: Collection[int] = (),
) -> CellOutput:
    """Return the output of ``procs`` in the notebook's running cell.

    ranks: when these have ended the cell has; all of ``procs``, if they are not given. what: the name under which
    `Transcripts` keep it, as ``cell 7``; without one it is not kept. only: the ranks whose output is shown, if not all.
    """
    sink, grouping = sink_for(session.shell), grouping_for(group, only or procs.ranks)
    transcript = session.part(Transcripts).open(what, sink, page_of(session)) if what else None
    members = members_of(procs.base())
    return CellOutput(
        procs.ranks if ranks is None else ranks,
        transcript or sink,
        grouping,
        session.publisher,
        procs.log_paths,
        partial(states.await_printed, procs),
        procs.name,
        CurveView(
            session.part(WatchedNames), states.metrics(procs), transcript or sink, session.publisher, procs.ranks
        ),
        lambda rank: ", ".join(f"{axis}={index}" for axis, index in members.point(rank).items()),
        only,
    )


def page_of(session: Session) -> str:
    """Return the id of the page that runs the cell; empty where no person looks at one."""
    parent = parent_of(session.shell)
    return str(parent.get("header", {}).get("session", "")) if parent and is_attended(parent) else ""
