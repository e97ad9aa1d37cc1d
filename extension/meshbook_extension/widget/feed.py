"""The feed of a view in the browser: it asks the ranks while somebody looks, and serves the buttons.

A view is a widget in a notebook, or the panel beside one. Its messages may come on any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from meshbook.errors import MeshError
from meshbook_extension.widget.snapshot import History, Snapshot

if TYPE_CHECKING:
    from meshbook_extension.widget.mesh_source import MeshSource

_LOG = logging.getLogger(__name__)

TICK_S = 1.0
LOOK_S = 30.0
"""The time that a view counts as looked at; the browser says it again every 10 s."""
ACTIONS = ("interrupt", "stacks", "pdb", "logs", "heal", "jobs", "variables")


class ButtonAnswer(NamedTuple):
    """The content that a view shows after a button was pressed."""

    title: str
    text: str
    copied: str = ""
    """The text that the button Copy copies; empty for the same text."""
    table: Sequence[Sequence[str]] = ()
    """Rows of cells, the heads first."""


class BrowserView(Protocol):
    """A view in the browser, written to from any thread."""

    def show(self, layout: Mapping[str, object], live: Mapping[str, object]) -> None:
        """Show this state."""

    def answer(self, content: Mapping[str, object]) -> None:
        """Show the answer to a button."""


class Buttons:
    """The buttons of a view."""

    def __init__(self, source: MeshSource, answer: Callable[[Mapping[str, object]], None]) -> None:
        self.source, self._answer = source, answer

    def on_message(self, content: object) -> None:
        """Serve ``{kind: act, action, ranks}``, whose answer comes later, and ``{kind: dismiss, error}``."""
        match content:
            case {"kind": "act", "action": str(action), "ranks": list(ranks)} if action in ACTIONS:
                chosen = [rank for rank in ranks if isinstance(rank, int)]
                name = f"meshbook.{action}"
                threading.Thread(target=self._act, args=(action, chosen), name=name, daemon=True).start()
            case {"kind": "dismiss", "error": int(number)}:
                self.source.dismiss(number)
                self._after_act()

    def _act(self, action: str, ranks: Sequence[int]) -> None:
        try:
            answer = self.source.act(action, ranks)
        except (MeshError, TimeoutError) as error:
            answer = ButtonAnswer(f"{action} failed", str(error))
        except Exception as error:
            _LOG.exception("a button of the health widget failed")
            answer = ButtonAnswer(f"{action} failed", f"{type(error).__name__}: {error}")
        self._answer({"kind": "answer", "action": action} | answer._asdict())
        self._after_act()

    def _after_act(self) -> None:
        """Hook: a button has changed something."""


class Feed(Buttons):
    """The feed of one view, or of several that show the same."""

    def __init__(
        self,
        source: MeshSource,
        view: BrowserView,
        on_rest: Callable[[Snapshot], None] | None = None,
        *,
        endures: bool = False,
    ) -> None:
        """on_rest: called with the last snapshot when nobody looks any more, on the ticking thread.

        endures: whether to ask again, while somebody looks, after a mesh could not be asked: another may follow.
        """
        super().__init__(source, view.answer)
        self._view, self._on_rest, self._endures = view, on_rest, endures
        self._seen_until: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._history = History()
        self._snapshot: Snapshot | None = None
        self._asked_at = float("-inf")
        self._shown: tuple[Mapping[str, object], Mapping[str, object]] = ({}, {})

    def refresh(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``."""
        if self._snapshot is not None and self._snapshot.name != snapshot.name:
            self._history = History()
        self._snapshot = snapshot
        self._history.add(snapshot)
        state = {"phase": "live", "note": "", "tick_s": TICK_S, "history": self._history.live()}
        self._show(snapshot.layout(), snapshot.live() | state)

    def on_message(self, content: object) -> None:
        """Serve ``{kind: look, view, visible}`` too; other messages are ignored."""
        match content:
            case {"kind": "look", "view": str(view), "visible": bool(visible)}:
                self._look(view, visible)
            case _:
                super().on_message(content)

    def _show(self, layout: Mapping[str, object], live: Mapping[str, object]) -> None:
        self._shown = (layout, live)
        self._view.show(layout, live)

    def _after_act(self) -> None:
        with self._changed:
            self._asked_at = float("-inf")
            self._changed.notify()  # show what has changed without waiting for the next tick

    def _look(self, view: str, visible: bool) -> None:
        with self._changed:
            if visible:
                self._seen_until[view] = time.monotonic() + LOOK_S
            else:
                self._seen_until.pop(view, None)
            if visible and self._thread is None:
                self._thread = threading.Thread(target=self._tick, name="meshbook.widget", daemon=True)
                self._thread.start()
            self._changed.notify()

    # ---- the ticking thread: it lives while somebody looks -------------------------------------------------------

    def _tick(self) -> None:
        phase, note = "paused", ""
        try:
            while self._is_seen():
                try:
                    self.refresh(self.source.snapshot())
                except (MeshError, TimeoutError) as error:  # the mesh was stopped, or cannot be asked any more
                    if not self._endures:
                        raise
                    self._show({}, {"phase": "none", "note": str(error), "tick_s": TICK_S})
        except (MeshError, TimeoutError) as error:
            phase, note = "ended", str(error)
        except Exception as error:
            _LOG.exception("the health widget could not be refreshed")
            note = f"not refreshed: {type(error).__name__}: {error}"
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None
        self._rest(phase, note)

    def _is_seen(self) -> bool:
        """Wait for the next tick, or for news; returns whether a view is looked at then."""
        with self._changed:
            if (left_s := self._asked_at + TICK_S - time.monotonic()) > 0:
                self._changed.wait(left_s)
            now = self._asked_at = time.monotonic()
            self._seen_until = {view: until for view, until in self._seen_until.items() if until > now}
            if not self._seen_until:
                self._thread = None  # whoever looks from here on starts another
            return self._thread is not None

    def _rest(self, phase: str, note: str) -> None:
        layout, live = self._shown
        self._view.show(layout, {**live, "phase": phase, "note": note})
        if self._on_rest is not None and self._snapshot is not None:
            self._on_rest(self._snapshot)
