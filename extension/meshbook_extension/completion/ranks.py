"""Asking a rank what it knows, for as long as a person who types will wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from meshbook.calls.rank_state import Completions
from meshbook.errors import MeshError

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.notebook.session import Session

T = TypeVar("T")

PATIENCE_S = 0.06
"""After so long another rank is asked too: native code may hold the first one's GIL."""

TIMEOUT_S = 0.25
"""After so long the notebook's own names must do."""

SILENT_S = 5.0
"""A rank that did not answer is not the first to be asked for so long, and is waited for less."""

TIMEOUT_WHEN_SILENT_S = 0.1
"""After so long the notebook's own names must do where all ranks that are asked have been silent."""

ASKED_MAX = 3
"""What keeps so many ranks silent keeps all of them silent."""

CODE_MAX = 200_000
"""Characters of a cell around the cursor that are sent."""


class LivingRanks:
    """Knows which ranks of a session's meshes have been silent lately."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._silent_until: dict[tuple[str, int], float] = {}

    def complete(self, view: ProcMesh, code: str, cursor: int) -> Completions | None:
        """The answer of `meshbook.worker.completion.complete`, with positions in ``code``; None: nobody answers."""
        skipped, code, cursor = _around(code, cursor)
        found = self._ask(view, Completions, "complete", code, cursor)
        if found is None:
            return None
        return found._replace(start=found.start + skipped, end=found.end + skipped)

    def inspect(self, view: ProcMesh, code: str, cursor: int, detail: int) -> str | None:
        """What Shift-Tab shows; empty: no such name there; None: nobody answers."""
        _, code, cursor = _around(code, cursor)
        return self._ask(view, str, "inspect", code, cursor, detail)

    def names(self, view: ProcMesh, prefix: str) -> list[str]:
        """The ranks' variables; none when nobody answers."""
        return self._ask(view, list[str], "user_names", prefix) or []

    def view(self, words: Sequence[str], pairs: Mapping[str, str]) -> ProcMesh | None:
        """The ranks that a command means, as well as one can say while it is being typed."""
        for chosen in ((words, pairs), (words, {}), ((), {})):
            try:
                return self._session.target(*chosen)
            except MeshError:
                continue
        return None

    def _ask(self, view: ProcMesh, kind: type[T], endpoint: str, *args: object) -> T | None:
        ranks = self._candidates(view)
        if not ranks:
            return None
        all_silent = all(self._is_silent(view, rank) for rank in ranks)
        timeout_s = TIMEOUT_WHEN_SILENT_S if all_silent else TIMEOUT_S
        try:
            found = view.ask_one(kind, endpoint, *args, ranks=ranks, patience_s=PATIENCE_S, timeout_s=timeout_s)
        except MeshError:  # it is being stopped or renumbered
            return None
        silent = ranks if found is None else ranks[: ranks.index(found[0])]
        for rank in silent:
            self._silent_until[view.name, rank] = time.monotonic() + SILENT_S
        if found is None:
            return None
        self._silent_until.pop((view.name, found[0]), None)
        return found[1]

    def _is_silent(self, view: ProcMesh, rank: int) -> bool:
        return self._silent_until.get((view.name, rank), 0.0) > time.monotonic()

    def _candidates(self, view: ProcMesh) -> list[int]:
        """The living ranks in the order of asking."""
        lost = set(view.lost)
        living = [rank for rank in view.ranks if rank not in lost]
        return sorted(living, key=lambda rank: self._is_silent(view, rank))[:ASKED_MAX]


def _around(code: str, cursor: int) -> tuple[int, str, int]:
    """The lines around the cursor, where a cell is very long: (characters left out above, lines, cursor in them)."""
    skipped = 0
    if cursor > CODE_MAX // 2:
        skipped = code.find("\n", cursor - CODE_MAX // 2, cursor) + 1
    return skipped, code[skipped : skipped + CODE_MAX], cursor - skipped
