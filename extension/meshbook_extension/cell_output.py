"""The output of one cell: from the ranks' events to a sink, grouped, bounded, and never silently less.

`receive` is called on the runtime's I/O thread and only queues; `pump` is called on the publisher's thread and does the
rest. Text goes out at most ten times a second, failures at once. Beyond `SHOWN_CHARACTERS` only the last lines are
shown, with an exact count of what is not, and where the whole of it lies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path

from meshbook.errors import Failure, group_failures
from meshbook.output_events import DisplayData, OutputCut, OutputEvent, RankDone, StreamText
from meshbook.wording import format_bytes, name_ranks
from meshbook_extension.collapse import Grouping, Piece
from meshbook_extension.labels import Labeller, Text, join_runs, label, label_block
from meshbook_extension.publish import Publisher, Sink

SHOWN_CHARACTERS = 200_000
"""Text of one cell that goes to the front end; ten times this freezes JupyterLab for seconds."""
SHOWN_DISPLAY_CHARACTERS = 20_000_000
"""The same for plots and other rich output."""
LAST_LINES = 20
"""Shown at the end of a cell that printed more."""
TEXT_INTERVAL_S = 0.1
BARS_INTERVAL_S = 0.25
FIRST_DELAY_S = 0.02
"""How long a first event waits for its companions."""
NOTE_INTERVAL_S = 5.0
"""Between counts of what is not shown, once the cell has ended."""
FULL_TRACEBACKS = 4
"""Different errors of one cell that are shown with their tracebacks; of others only the last line."""
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class CellOutput:
    """Takes the events of one cell and shows them. Made on the main thread; `finish` waits there."""

    def __init__(
        self,
        ranks: Collection[int],
        sink: Sink,
        grouping: Grouping,
        publisher: Publisher,
        log_paths: Callable[[], Mapping[int, str]],
        name: str = "",
    ) -> None:
        self.done: dict[int, RankDone] = {}
        """The ranks that have ended, known before it is shown."""
        self.hide_interrupts = False
        """The person interrupted the cell: that ranks stopped is no news."""
        self._ranks = frozenset(ranks)
        self._sink, self._grouping, self._publisher, self._log_paths = sink, grouping, publisher, log_paths
        self._name = name
        self._events: deque[tuple[float, OutputEvent]] = deque()
        self._labeller = Labeller()
        self._texts: list[Text] = []
        self._updates: dict[str, DisplayData] = {}
        self._tracebacks = FailureView()
        self._budget = Budget()
        self._next_text_at = 0.0
        self._next_bars_at = 0.0
        self._bars_shown: list[str] = []
        self._finishing = False
        self._ended = False
        self._drained = threading.Event()
        self._error: Exception | None = None

    def receive(self, event: OutputEvent) -> None:
        """Take an event; on the runtime's I/O thread, so nothing is done here that could wait."""
        now = time.monotonic()
        at = max(now + FIRST_DELAY_S, self._next_text_at)
        if isinstance(event, RankDone):
            self.done[event.rank] = event
            at = now if len(self.done) == len(self._ranks) else now + FIRST_DELAY_S
        self._events.append((now, event))
        self._publisher.schedule(self, at)

    def finish(self, timeout_s: float = 5.0) -> None:
        """Show everything received so far and wait until it is shown. What comes later is still shown.

        Raises: whatever went wrong while showing it.
        """
        self._drained.clear()
        self._finishing = True
        self._publisher.schedule(self, time.monotonic())
        self._drained.wait(timeout_s)
        if self._error is not None:
            raise self._error

    def note(self, text: str) -> None:
        """Say something about the cell, in its output; from any thread."""
        self._events.append((time.monotonic(), StreamText(-1, "stderr", text + "\n", -1)))
        self._publisher.schedule(self, time.monotonic())

    # ---- the publisher's thread ------------------------------------------------------------------------------

    def pump(self, now: float) -> float | None:
        """Take the events in and show what is due; returns when there will be more."""
        finishing, self._finishing = self._finishing, False
        while self._events:
            at, event = self._events.popleft()
            self._take(event, at)
        everything = finishing or len(self.done) == len(self._ranks)
        if finishing:
            self._show(self._grouping.close(now), now)
        elif everything or self._tracebacks.is_due(now):
            self._show(self._grouping.take(now, at_once=True), now)
        elif now >= self._next_text_at:
            self._show(self._grouping.take(now), now)
        if everything or self._tracebacks.is_due(now):
            self._show_failures()
        self._show_updates()
        self._show_bars(now)
        if finishing:
            self._ended = True
        self._show_count(now, finishing)
        if finishing:
            self._drained.set()
        return self._due_at()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._drained.set()

    def _take(self, event: OutputEvent, at: float) -> None:
        if isinstance(event, StreamText):
            if event.rank < 0:
                self._say(event.text)
            else:
                self._grouping.feed(event.rank, event.stream, event.text, at)
        elif isinstance(event, DisplayData):
            self._take_display(event, at)
        elif isinstance(event, OutputCut):
            if self._budget.cut(event) and not self._budget.exceeded:
                self._say(f"{name_ranks([event.rank])} prints more than is shown here; all of it goes to {event.log_path}\n")
        else:
            self._grouping.end(event.rank, at)
            interrupted = event.failure is not None and event.failure.ename == "KeyboardInterrupt"
            if event.failure is not None and not (interrupted and self.hide_interrupts):
                self._tracebacks.add(event.failure, at)

    def _take_display(self, event: DisplayData, at: float) -> None:
        data = dict(event.data)
        if WIDGET_VIEW in data and "text/plain" in data:
            del data[WIDGET_VIEW]  # the widget lives on the rank; no front end can reach it
        event = event._replace(data=data)
        display_id = self._display_id(event)
        if event.update and display_id:
            self._updates[display_id] = event
            return
        key: Hashable = (event.rank, display_id) if display_id else tuple(sorted((k, str(v)) for k, v in data.items()))
        self._grouping.feed_display(event.rank, key, event, at)

    def _display_id(self, event: DisplayData) -> str | None:
        """Ranks choose their ids alone, so that two may choose the same."""
        own = (event.transient or {}).get("display_id")
        return f"{self._name}.{event.rank}.{own}" if own else None

    def _show(self, pieces: list[Piece], now: float) -> None:
        for piece in pieces:
            if piece.display is not None:
                self._show_display(piece)
            elif self._budget.admit(piece):
                self._texts += self._labeller.write(piece)
            if self._budget.just_exceeded():
                self._say(f"{format_bytes(SHOWN_CHARACTERS)} are shown here; the rest goes to the logs: %mesh logs -n 100\n")
        if self._ended or self._finishing:
            self._texts += self._labeller.end_line()
        if self._texts:
            self._next_text_at = now + TEXT_INTERVAL_S
        self._send_texts()

    def _say(self, text: str) -> None:
        self._texts += [*self._labeller.end_line(), Text("stderr", text)]

    def _send_texts(self) -> None:
        texts, self._texts = self._texts, []
        for stream, text in join_runs(texts):
            self._sink.stream(stream, text)

    def _show_display(self, piece: Piece) -> None:
        event: DisplayData = piece.display
        if not self._budget.admit_display(piece):
            return
        self._texts += self._labeller.end_line()
        self._send_texts()
        if set(event.data) == {"text/plain"}:
            text = label_block(piece.ranks, event.data["text/plain"])
            self._sink.display({"text/plain": text}, event.metadata, self._display_id(event))
        else:
            self._sink.display({"text/plain": label(piece.ranks)}, {})
            self._sink.display(event.data, event.metadata, self._display_id(event))

    def _show_updates(self) -> None:
        updates, self._updates = self._updates, {}
        for display_id, event in updates.items():
            data = dict(event.data)
            if set(data) == {"text/plain"}:
                data["text/plain"] = label_block([event.rank], data["text/plain"])
            self._sink.display(data, event.metadata, display_id, update=True)

    def _show_failures(self) -> None:
        self._texts += self._labeller.end_line()
        self._send_texts()
        self._tracebacks.show(self._sink)

    def _show_bars(self, now: float) -> None:
        bars = [f"{label(ranks)} {state}" for ranks, state in self._grouping.bars()]
        if bars != self._bars_shown and (now >= self._next_bars_at or not bars):
            self._bars_shown = bars
            self._next_bars_at = now + BARS_INTERVAL_S
            self._sink.bars(bars)

    def _show_count(self, now: float, finishing: bool) -> None:
        if self._ended and self._budget.has_news(now, finishing):
            note, last = self._budget.report(now, self._log_paths)
            self._say(note)
            for piece in last:
                self._texts += self._labeller.write(piece)
            self._texts += self._labeller.end_line()
            self._send_texts()

    def _due_at(self) -> float | None:
        times = [self._tracebacks.due_at(), self._budget.next_report_at() if self._ended else None]
        lines = self._grouping.due_at()
        if lines is not None:
            times.append(max(lines, self._next_text_at))
        if self._bars_shown or self._grouping.bars():
            times.append(self._next_bars_at if self._events else None)
        if self._events:
            times.append(self._next_text_at)
        return min((at for at in times if at is not None), default=None)
