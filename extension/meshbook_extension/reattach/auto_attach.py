"""The next kernel of a notebook finds the meshes that the last one has left.

They are attached in the background as soon as the extension is loaded, so that the kernel starts as fast as ever; the
first cell waits for that and is told.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from meshbook.errors import MeshError
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.labels import format_duration
from meshbook_extension.reattach.notebook_state import KEY, StateWriter, Trace, decode, drop_traces, read_traces

if TYPE_CHECKING:
    from meshbook.mesh.attach import Attachment

WAIT_S = 20.0
"""How long the first cell waits for what is being attached."""


class AutoAttach:
    """One per kernel, and none where nothing names the notebook."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._notebook = session.notebook
        self._attachments: list[Attachment] = []
        self._problems: list[str] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, and tell of it at the first cell."""
        if not self._notebook:
            return
        self._thread = threading.Thread(target=self._attach, name="meshbook.auto_attach", daemon=True)
        self._thread.start()
        self._session.shell.events.register("pre_run_cell", self._tell)

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Until all that can be attached is attached."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _attach(self) -> None:
        """On a thread of its own."""
        try:
            self._attach_all()
        except Exception as error:  # told at the first cell; the kernel is as good as new
            self._problems.append(f"the meshes of the last kernel could not be looked for: {error}")

    def _attach_all(self) -> None:
        traces = read_traces(self._notebook)
        if not traces:
            return
        from meshbook.mesh.driven import attach
        from meshbook.sessions.listing import sessions

        known = {saved.id: saved for saved in sessions()}
        for trace in traces:
            saved = known.get(trace.session)
            names = ", ".join(f'"{name}"' for name in trace.meshes)
            notebook_state = saved and decode(saved.recall(KEY))
            if saved is None:
                self._problems.append(_explain_end(trace, names))
            elif saved.is_ours:
                continue  # the extension was loaded anew
            elif saved.owner_pid is not None:
                if notebook_state and notebook_state.notebook == self._notebook:
                    continue  # another kernel of this notebook lives
                self._problems.append(f"mesh {names} belongs to process {saved.owner_pid} now; see %mesh list")
            else:
                try:
                    self._attachments.append(attach(saved))
                except MeshError as error:
                    self._problems.append(f"mesh {names} could not be attached again: {error}")

    def _tell(self, *_info: object) -> None:
        """Before the first cell: all is here, or is said to be gone."""
        from meshbook_extension.reattach.restore import restore

        started = time.monotonic()
        if not self.wait():
            waited = format_duration(time.monotonic() - started)
            print(f"the meshes of the last kernel did not answer within {waited}; see %mesh list")
            return
        self._session.shell.events.unregister("pre_run_cell", self._tell)
        for attachment in self._attachments:
            restore(self._session, attachment, again=True)
        if self._problems:
            print("\n".join(self._problems))
            if not self._attachments:
                drop_traces(self._notebook)
        self._attachments, self._problems = [], []
        self._session.part(StateWriter).save()


def _explain_end(trace: Trace, names: str) -> str:
    """Why a session is gone: its agents say so in their logs."""
    from meshbook.system.user_folders import log_base

    logs = log_base() / trace.session
    said = [line for path in sorted(logs.glob("agent-*.log")) for line in _last_lines(path)]
    why = said[-1] if said else "its host was restarted, its host agent was killed, or another kernel has stopped it"
    return f"mesh {names} of the last kernel has ended: {why}\n  its logs: {logs}    start another: %mesh spawn gpus=4"


def _last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-1:]
