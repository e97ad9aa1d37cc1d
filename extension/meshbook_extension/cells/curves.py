"""The curves of logged scalars below a running cell: drawn again at most three times a second, while they are watched.

ranks ──> `Metrics` of their mesh ──names──> `CurveView` of the cell that logs ──> a display that is replaced
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import uuid
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshbook.calls.output import NewScalars
from meshbook.concurrency.background import run_in_background
from meshbook.curves.nan_watch import GRADIENT, OUTPUT, place_of
from meshbook.curves.recorder import number_of, on_own, own, recorder
from meshbook.curves.series import LoggedPoints, MetricRow, Metrics, Points
from meshbook.curves.table import Summary
from meshbook.errors import MeshError
from meshbook.formatting import name_ranks
from meshbook.mesh import states
from meshbook.mesh.peeks import NoValue, peek
from meshbook.mesh.proc_view import ask
from meshbook_extension.output.curve_picture import DEFAULT_LOOK, Curve, Look, bundle
from meshbook_extension.output.labels import WARN, show_message
from meshbook_extension.output.publisher import CellSink, Publisher, Scheduled, sink_for

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.cells.running import RunningCell

INTERVAL_S = 0.34
"""The time between two pictures in one cell."""
ALARM_S = 0.3
"""The time between the news of a value that is not finite and its line, in which those of other ranks may come."""
DRAWING_SHARE = 8
"""A picture that takes long is drawn more rarely: it takes at most this part of the time."""


@dataclass
class WatchedNames:
    """The names that a person watches in this notebook."""

    names: tuple[str, ...] | None = None
    """The names; an empty tuple means everything that is logged, and None nothing."""
    look: Look = DEFAULT_LOOK
    expression: str = ""
    """The expression that is evaluated on ranks while they run a cell; it is one of the names."""
    every_s: float = 1.0
    turn: int = 0
    """The number of changes so far; an expression is watched until the next one."""
    nan: bool = False
    """Whether the first value that is not finite is told."""

    def wants(self, names: Collection[str]) -> bool:
        """Whether one of these names is watched."""
        return self.names is not None and (not self.names or not set(self.names).isdisjoint(names))

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Return the names that are watched, in the order in which the person gave them."""
        if self.names is None:
            return []
        return [name for name in self.names or names if name in names]


def curves_of(metrics: Metrics, names: Sequence[str], ranks: Collection[int] | None = None) -> list[Curve]:
    """Return the last runs of names that were logged, on these ranks or on all."""
    curves: list[Curve] = []
    for name in names:
        series, latest = metrics.series(name, ranks), metrics.latest(name, ranks)
        if series and latest and not name.startswith((OUTPUT, GRADIENT)):
            curves.append(Curve(Summary.of(name, series), latest))
    return curves


def picture_of(watch: WatchedNames, metrics: Metrics) -> str:
    """Return the picture of all that is watched, as HTML; empty where nothing of it was logged."""
    curves = curves_of(metrics, watch.chosen(metrics.names()))
    return str(bundle(curves, watch.look)["text/html"]) if curves else ""


def watch_modules(procs: ProcMesh, is_on: bool) -> None:
    """Have ranks watch their modules and gradients, or not any more, also while they are busy; again is no harm."""
    ask(procs.base(), bool, "watch_nan", is_on)


class NanAlarm:
    """The line on the first value of a cell that is not finite; told once, when the others had time to come."""

    def __init__(self, watch: WatchedNames, metrics: Metrics) -> None:
        self._watch, self._metrics = watch, metrics
        self._known = metrics.odd_count
        self._names: set[str] = set()
        self.due_at: float | None = None
        """The time at which to tell; None where there is nothing to tell."""
        self._told = False

    def _news(self) -> list[MetricRow]:
        new = self._metrics.odd_count - self._known
        return [odd for odd in list(self._metrics.odd)[-new:] if odd.name in self._names] if new > 0 else []

    def note(self, names: Collection[str]) -> bool:
        """Note news of these names; returns whether there is something to tell."""
        if not self._watch.nan or self._told:
            return False
        self._names.update(names)
        if self.due_at is None and self._news():
            self.due_at = time.monotonic() + ALARM_S
        return self.due_at is not None

    def take(self, now: float, *, at_once: bool = False) -> str:
        """Return the line if it is time, else nothing. at_once: the cell ends."""
        if self.due_at is None or not (at_once or now >= self.due_at):
            return ""
        self.due_at, self._told = None, True
        found = self._news()
        first = min(found, key=lambda odd: odd.time)
        kind = "a NaN" if math.isnan(first.value) else "a value that is not finite"
        place = place_of(first.name), first.step
        same = {odd.rank: odd.name for odd in found if (place_of(odd.name), odd.step) == place}
        on = f" on {name_ranks(rank for rank in same if rank is not None)}" if first.rank is not None else ""
        name = next((name for name in same.values() if " after step " in name), first.name)  # of a rank that logs steps
        when = "" if name.startswith((OUTPUT, GRADIENT)) else f" at step {first.step:g}"  # others say it
        return f"{kind} is{on} in the {name}{when}"


class CurveView(Scheduled):
    """The picture in one cell. `note` may be called by any thread; the publisher's thread draws."""

    def __init__(
        self,
        watch: WatchedNames,
        metrics: Metrics,
        sink: CellSink,
        publisher: Publisher,
        ranks: Collection[int] | None = None,
    ) -> None:
        """Show curves of these ranks, or of all. Cells that run beside this one log under the same names."""
        self._watch, self._metrics = watch, metrics
        self._ranks = ranks
        self._sink, self._publisher = sink, publisher
        self._display_id = ""
        self._names: dict[str, None] = {}
        """The names that were logged in this cell, in order."""
        self._next_at = 0.0
        self._has_news = False
        self._alarm = NanAlarm(watch, metrics)

    def note(self, names: Sequence[str]) -> None:
        """Note news of these names, to be shown soon."""
        is_odd = self._alarm.note(names)
        if self._watch.wants(names):
            self._names.update(dict.fromkeys(names))
            self._has_news = True
            self._publisher.schedule(self, self._next_at)
        elif is_odd:
            self._publisher.schedule(self, self._alarm.due_at or 0.0)

    def pump(self, now: float, *, at_once: bool = False) -> float | None:
        """Show the line on the first value that is not finite, and the picture, if it is time. at_once: the cell ends.

        Returns: when more will be due.
        """
        at_once = at_once or self._publisher.is_stopping
        if alarm := self._alarm.take(now, at_once=at_once):
            show_message(self._sink, WARN, alarm)
        if self._has_news and (at_once or (self._sink.replaces and now >= self._next_at)):
            self._draw()
        times = [self._next_at if self._has_news and self._sink.replaces else None, self._alarm.due_at]
        return min((at for at in times if at is not None), default=None)

    def _draw(self) -> None:
        self._has_news = False
        began = time.monotonic()
        curves = curves_of(self._metrics, self._watch.chosen(list(self._names)), self._ranks)
        if curves:
            is_first, self._display_id = not self._display_id, self._display_id or uuid.uuid4().hex
            self._sink.display(bundle(curves, self._watch.look), {}, self._display_id, update=not is_first)
        now = time.monotonic()
        self._next_at = now + max(INTERVAL_S, DRAWING_SHARE * (now - began))


PEEK_S = 1.0
"""The longest that one evaluation of a watched expression holds a rank up."""
TRIES = 5
"""The evaluations without a number behind which a cell says why."""
_outputs = itertools.count(-1, -1)
"""Numbers for cells whose expression is watched; outputs of ranks have positive ones."""


class WatchedExpression(Scheduled):
    """The expression of `%mesh watch --eval` in one running cell. The publisher's thread times the looks."""

    def __init__(self, cell: RunningCell, watch: WatchedNames, publisher: Publisher) -> None:
        """Watch the expression until the cell ends."""
        self._cell, self._watch, self._publisher = cell, watch, publisher
        self._output = next(_outputs)
        self._looks = self._numbers = 0
        self._turn = watch.turn
        publisher.schedule(self, time.monotonic() + min(INTERVAL_S, watch.every_s))
        cell.run.future.add_done_callback(lambda _future: publisher.forget(self))

    def pump(self, now: float) -> float | None:
        """Begin a look, which schedules the next one: ranks may take their time."""
        if self._watch.turn == self._turn and not self._cell.run.future.done() and not self._publisher.is_stopping:
            run_in_background(self._look)
        return None

    def _look(self) -> None:
        due, at, name = time.monotonic() + self._watch.every_s, time.time(), self._watch.expression
        try:
            values = peek(self._cell.procs, name, PEEK_S).values
        except MeshError:  # the mesh was stopped, or detached: the cell says so
            return
        why = ""
        found: dict[int, float] = {}
        for rank, value in zip(self._cell.procs.ranks, values.values(), strict=True):
            try:
                found[rank] = float(number_of(name, value))  # type: ignore[arg-type]  # no value is on a device here
            except (TypeError, ValueError) as error:
                why = why or f"rank {rank}: {value.why if isinstance(value, NoValue) else error}"
        metrics = states.metrics(self._cell.procs)
        for rank, number in found.items():
            point = Points(array("d", [self._looks]), array("d", [at]), array("d", [number]))
            metrics.add(self._output, rank, [LoggedPoints(name, 1, point)])
        self._looks += 1
        self._numbers += bool(found)
        if found:
            self._cell.output.receive(NewScalars((name,)))
        elif self._looks == TRIES and not self._numbers:
            self._cell.output.note(f"%mesh watch --eval {name}: no number so far; {why}")
        self._publisher.schedule_unless(self, due, self._cell.run.future.done)


class OwnCurves:
    """The picture of scalars that the notebook's process logs itself, in the cell that does."""

    def __init__(self, shell: InteractiveShell, watch: WatchedNames, publisher: Publisher) -> None:
        self._shell, self._watch, self._publisher = shell, watch, publisher
        self._cell = 0
        self._view: CurveView | None = None
        recorder.count_for(self._cell_here)
        on_own.append(self._on_logged)

    def end(self) -> None:
        """Show no more of it."""
        recorder.count_for(lambda: 0)
        on_own.remove(self._on_logged)

    def _cell_here(self) -> int:
        """Return the number of the running cell; called at each `log`."""
        if self._view is None and threading.current_thread() is threading.main_thread():
            self._view = CurveView(self._watch, own, sink_for(self._shell), self._publisher)
        return self._cell

    def _on_logged(self, names: tuple[str, ...]) -> None:
        if (view := self._view) is not None:
            view.note(names)

    def begin_cell(self, *_: object) -> None:
        """Note that another cell begins, on the thread of cells."""
        self._cell += 1

    def end_cell(self, *_: object) -> None:
        """Show the last state before the cell is done."""
        if recorder.is_due:
            recorder.flush()
        view, self._view = self._view, None
        if view is not None:
            view.pump(time.monotonic(), at_once=True)
