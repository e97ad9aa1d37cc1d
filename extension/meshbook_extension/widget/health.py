"""The widget itself: its content comes from a `MeshSource`, and clicks go to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anywidget
import traitlets

from meshbook.errors import MeshError
from meshbook_extension.widget.snapshot import History, Snapshot

if TYPE_CHECKING:
    from meshbook_extension.widget.mesh_source import MeshSource

_LOG = logging.getLogger(__name__)

TICK_S = 1.0
LOOK_S = 30.0
"""The time that a view counts as looked at; the browser says it again every 10 s."""


class ButtonAnswer(NamedTuple):
    """The text that the widget shows after a button was pressed."""

    title: str
    text: str
    copied: str = ""
    """The text that the button Copy copies; empty for the same text."""


ACTIONS = ("interrupt", "stacks", "pdb", "logs", "heal")
"""The buttons, from left to right."""


class HealthWidget(anywidget.AnyWidget):
    """A live picture of one mesh. Custom messages reach `on_message`, by way of the busy kernel or the ordinary one."""

    _esm = Path(__file__).parent / "health.js"
    _css = Path(__file__).parent / "health.css"
    layout_of = traitlets.Dict().tag(sync=True)
    live = traitlets.Dict().tag(sync=True)

    def __init__(self, source: MeshSource, on_rest: Callable[[Snapshot], None] | None = None) -> None:
        """on_rest: called with the last snapshot when nobody looks any more, on the ticking thread."""
        self._source, self._on_rest = source, on_rest
        self._seen_until: dict[str, float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._history = History()
        self._snapshot: Snapshot | None = None
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: self.on_message(content))

    def refresh(self, snapshot: Snapshot) -> None:
        """Show ``snapshot`` in all views."""
        self._snapshot = snapshot
        self._history.add(snapshot)
        layout = snapshot.layout()
        if layout != self.layout_of:
            self.layout_of = layout
        self.live = snapshot.live() | {
            "phase": "live",
            "note": "",
            "tick_s": TICK_S,
            "actions": list(ACTIONS),
            "history": self._history.live(),
        }

    # ---- messages: on any thread -----------------------------------------------------------------------------

    def on_message(self, content: object) -> None:
        """Serve ``{kind: look, view, visible}`` or ``{kind: act, action, ranks}``; other messages are ignored."""
        match content:
            case {"kind": "look", "view": str(view), "visible": bool(visible)}:
                self._look(view, visible)
            case {"kind": "act", "action": str(action), "ranks": list(ranks)} if action in ACTIONS:
                chosen = [rank for rank in ranks if isinstance(rank, int)]
                threading.Thread(
                    target=self._act, args=(action, chosen), name=f"meshbook.{action}", daemon=True
                ).start()

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

    def _act(self, action: str, ranks: Sequence[int]) -> None:
        try:
            answer = self._source.act(action, ranks)
        except (MeshError, TimeoutError) as error:
            answer = ButtonAnswer(f"{action} failed", str(error))
        except Exception as error:
            _LOG.exception("a button of the health widget failed")
            answer = ButtonAnswer(f"{action} failed", f"{type(error).__name__}: {error}")
        self.send({"kind": "answer", "action": action} | answer._asdict())
        with self._changed:
            self._changed.notify()  # show what has changed without waiting for the next tick

    # ---- the ticking thread: it lives while somebody looks -------------------------------------------------------

    def _tick(self) -> None:
        phase, note = "paused", ""
        try:
            while self._is_seen():
                self.refresh(self._source.snapshot())
        except (MeshError, TimeoutError) as error:  # the mesh was stopped, or cannot be asked any more
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
            if self._snapshot is not None and time.time() - self._snapshot.at < TICK_S:
                self._changed.wait(TICK_S)
            now = time.monotonic()
            self._seen_until = {view: until for view, until in self._seen_until.items() if until > now}
            if not self._seen_until:
                self._thread = None  # whoever looks from here on starts another
            return self._thread is not None

    def _rest(self, phase: str, note: str) -> None:
        self.live = dict(self.live) | {"phase": phase, "note": note}
        if self._on_rest is not None and self._snapshot is not None:
            self._on_rest(self._snapshot)
