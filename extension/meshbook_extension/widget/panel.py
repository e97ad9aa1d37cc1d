"""The panel in JupyterLab and Notebook 7, from the kernel's side: a comm for each page that has one.

    browser/static/lab.js --comm_open "meshbook"--> `Panels` --session, layout, live, answer--> panel and status bar

The page opens the comm, also while a cell runs. It hears after each cell which mesh is current, and whether every cell
goes there. All else comes while somebody looks at the panel, as for a widget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshbook.formatting import format_sizes
from meshbook_extension.cells.transformers import AutoMode
from meshbook_extension.output.labels import count
from meshbook_extension.output.publisher import JupyterMessage
from meshbook_extension.widget.busy_comms import BusyComms
from meshbook_extension.widget.feed import Feed
from meshbook_extension.widget.mesh_source import MeshSource

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel

    from meshbook_extension.notebook.session import Session

TARGET = "meshbook"
"""The name by which the page opens a comm."""
PAGES = 16
"""The pages that are told; one that was closed or loaded again does not say so."""


class _Page:
    """The panel of one page."""

    def __init__(self, session: Session, comm: Any) -> None:
        self.comm = comm
        self._layout: Mapping[str, object] = {}
        self.feed = Feed(MeshSource(session, None), self, endures=True)

    def show(self, layout: Mapping[str, object], live: Mapping[str, object]) -> None:
        if layout != self._layout:
            self._layout = layout
            self.comm.send({"kind": "layout", "layout": layout})
        self.comm.send({"kind": "live", "live": live})

    def answer(self, content: Mapping[str, object]) -> None:
        self.comm.send(dict(content))

    def tell(self, content: Mapping[str, object]) -> None:
        self.comm.send({"kind": "session", **content})


class Panels:
    """The panels that show the current mesh of a session; pages can open comms from the start."""

    def __init__(self, session: Session, kernel: IPythonKernel) -> None:
        self._session = session
        self._pages: dict[str, _Page] = {}
        self._manager: Any = kernel.comm_manager
        self._comms = BusyComms.of(kernel)
        self._manager.register_target(TARGET, self._on_open)
        self._comms.serve(["comm_open"], self._take_open)

    def end(self) -> None:
        """Close all comms."""
        self._manager.unregister_target(TARGET, self._on_open)
        self._comms.serve(["comm_open"], None)
        for comm_id, page in list(self._pages.items()):
            self._forget(comm_id)
            page.comm.close()

    def tell(self, *_: object) -> None:
        """Tell the pages which mesh is current, after a cell."""
        for page in list(self._pages.values()):
            page.tell(self._describe())

    def _describe(self) -> dict[str, object]:
        session = self._session
        procs = session.meshes.get(session.current or "")
        is_auto = AutoMode.of(session.shell).is_on
        if procs is None:
            return {"mesh": "", "text": "no mesh", "auto": is_auto}
        dead = len(set(procs.ranks) & set(procs.base().lost))
        died = f", {count(dead, 'rank')} dead" if dead else ""
        return {"mesh": procs.name, "text": f"{format_sizes(procs.sizes)}{died}", "auto": is_auto}

    def _take_open(self, message: JupyterMessage, idents: list[bytes]) -> Callable[[], None] | None:
        """Serve a page's opening while a cell runs; comms of others are the kernel's."""
        if message["content"].get("target_name") != TARGET:
            return None
        return lambda: self._manager.comm_open(None, idents, message)

    def _on_open(self, comm: Any, message: JupyterMessage) -> None:
        page = self._pages[comm.comm_id] = _Page(self._session, comm)
        comm.on_msg(lambda message: page.feed.on_message(message["content"]["data"]))
        comm.on_close(lambda _message: self._forget(comm.comm_id))
        self._comms.listen(comm.comm_id, page.feed.on_message)
        page.tell(self._describe())
        for comm_id in list(self._pages)[:-PAGES]:
            self._forget(comm_id)

    def _forget(self, comm_id: str) -> None:
        self._pages.pop(comm_id, None)
        self._comms.forget(comm_id)
