"""Names across the border: a name that one side lacks and the other has ends its NameError with the way to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from meshbook.errors import CallFailed
from meshbook.formatting import name_ranks
from meshbook_extension.cells.record import CellRecord
from meshbook_extension.notebook.session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_MISSING = re.compile(r"name '(\w+)' is not defined")


def push_hints(session: Session, error: CallFailed) -> list[str]:
    """Write a line for each name that ranks lack and the notebook has."""
    failures = sorted(error.failures, key=lambda failure: failure.rank)
    found = [_MISSING.match(failure.evalue) for failure in failures if failure.ename == "NameError"]
    names, hidden = session.shell.user_ns, session.shell.user_ns_hidden
    lines = []
    for name in dict.fromkeys(match[1] for match in found if match):
        if name not in names or name in hidden or name.startswith("_"):
            continue
        if isinstance(names[name], ModuleType):
            lines.append(f"  {name} is a module in the notebook: import it in a cell of the ranks")
        else:
            lines.append(f"  {name} is defined in the notebook: %mesh push {name}")
    return lines


def pull_hint(session: Session, name: str) -> str:
    """Write the line for a name that the notebook lacks and ranks of the current mesh have; empty where none has."""
    procs = session.meshes.get(session.current or "")
    if procs is None or not procs.alive or not (ranks := session.part(CellRecord).ranks_with(procs, name)):
        return ""
    return f"{name} is on {name_ranks(ranks)}: %mesh pull {name}, or %%mesh above the cell"


class NameErrors:
    """The part of a session that ends a NameError of the notebook with `pull_hint`.

    A shell has one handler of chosen errors. Where another extension has set it, that one stays.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        if not session.shell.custom_exceptions:
            session.shell.set_custom_exc((NameError,), self._show)

    def end(self) -> None:
        """Let the shell show its errors itself again."""
        if self._session.shell.custom_exceptions == (NameError,):
            self._session.shell.set_custom_exc((), None)

    def _show(
        self,
        shell: InteractiveShell,
        kind: type[BaseException],
        error: BaseException,
        frames: TracebackType | None,
        tb_offset: int | None = None,
    ) -> Sequence[str]:
        found = _MISSING.match(str(error))
        if found and (hint := pull_hint(self._session, found[1])) and not hasattr(error, "_render_traceback_"):

            def render() -> list[str]:
                return [*shell.InteractiveTB.structured_traceback(kind, error, frames, tb_offset=tb_offset), hint]

            vars(error)["_render_traceback_"] = render
        shell.showtraceback((kind, error, frames), tb_offset=tb_offset, running_compiled_code=True)
        return []
