"""The widgets themselves: the health of a mesh, and the notice of a cell that is held up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anywidget
import traitlets

from meshbook_extension.output.labels import WARN, message_card
from meshbook_extension.widget.feed import Buttons, Feed
from meshbook_extension.widget.mesh_source import MeshSource
from meshbook_extension.widget.snapshot import Snapshot

STATIC = Path(__file__).parents[1] / "browser" / "static"
"""The folder of the ES modules, from which JupyterLab loads the panel."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)


def join_modules(name: str) -> str:
    """Return an ES module with those that it imports in one text: a widget's code has no address to import from.

    The modules share one scope there, so their names at top level differ.
    """
    texts: dict[str, str] = {}

    def add(module: str) -> None:
        text = (STATIC / module).read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        own = _IMPORT.sub("", text)
        texts[module] = own if module == name else re.sub(r"^export ", "", own, flags=re.MULTILINE)

    add(name)
    return "\n".join(texts.values())


class HealthWidget(anywidget.AnyWidget):
    """A live picture of one mesh. Custom messages reach `on_message`, by way of the busy kernel or the ordinary one."""

    _esm = join_modules("health.js")
    _css = (STATIC / "meshbook.css").read_text(encoding="utf-8")
    layout_of = traitlets.Dict().tag(sync=True)
    live = traitlets.Dict().tag(sync=True)

    def __init__(self, source: MeshSource, on_rest: Callable[[Snapshot], None] | None = None) -> None:
        """on_rest: called with the last snapshot when nobody looks any more, on the ticking thread."""
        feed = Feed(source, self, on_rest)
        self.refresh, self.on_message = feed.refresh, feed.on_message
        super().__init__()
        self.on_msg(lambda _widget, content, _buffers: self.on_message(content))

    def show(self, layout: Mapping[str, object], live: Mapping[str, object]) -> None:
        """Show this state in all views."""
        if layout != self.layout_of:
            self.layout_of = dict(layout)
        self.live = dict(live)

    def answer(self, content: Mapping[str, object]) -> None:
        """Show the answer to a button."""
        self.send(dict(content))


class NoticeWidget(anywidget.AnyWidget):
    """The words on a cell that is held up, with buttons while it is."""

    _esm = join_modules("notice.js")
    _css = HealthWidget._css
    words = traitlets.Unicode().tag(sync=True)
    ranks: traitlets.List[int] = traitlets.List().tag(sync=True)
    """The ranks that hold the others up."""
    is_open = traitlets.Bool(True).tag(sync=True)
    """Whether the cell still runs."""

    def __init__(self, source: MeshSource, words: str, text: str, ranks: Sequence[int]) -> None:
        """text: the words with commands, for where there are no buttons."""
        self._text = text
        self._said = ""
        """The stacks that were asked for last; they begin with the same words."""
        self.on_message = Buttons(source, self._answer).on_message
        super().__init__(words=words, ranks=list(ranks))
        self.on_msg(lambda _widget, content, _buffers: self.on_message(content))

    def _answer(self, content: Mapping[str, object]) -> None:
        if content["action"] == "stacks":
            self._said = str(content["text"])
        self.send(dict(content))

    def content(self) -> dict[str, object]:
        """Return the words, and the stacks, as plain HTML and as text."""
        return {"text/html": message_card(WARN, self._said or self.words), "text/plain": self._said or self._text}
