"""The completer: it completes and inspects the name at the cursor, in replies of Jupyter's protocol.

Code for ranks is completed by a rank that answers within `TIMEOUT_S`, our own lines by their grammars.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from meshbook.calls.rank_state import Completions
from meshbook.errors import MeshError, UsageError
from meshbook.mesh.driven import metrics
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask_first
from meshbook.sessions import listing
from meshbook.shell.completer import top_level, user_names
from meshbook_extension.cells.run import MESH_CELL
from meshbook_extension.cells.running import Jobs
from meshbook_extension.cells.transformers import AutoMode
from meshbook_extension.commands import COMMANDS, load_all
from meshbook_extension.commands.spawn import find_profiles
from meshbook_extension.completion.grammar import Follow, MagicLine, RankCode, Word, follow, locate
from meshbook_extension.notebook.grammar import PAIR, Grammar, expression_start
from meshbook_extension.notebook.session import Session
from meshbook_extension.output.publisher import JupyterMessage

T = TypeVar("T")

PATIENCE_S = 0.06
"""The time after which another rank is asked too: native code may hold the first one's GIL."""

TIMEOUT_S = 0.25
"""The time after which the notebook's own names must do."""

SILENT_S = 5.0
"""The time for which a rank that did not answer is not the first to be asked, and has less time."""

TIMEOUT_WHEN_SILENT_S = 0.1
"""The same as `TIMEOUT_S` where all ranks that are asked have been silent."""

ASKED_MAX = 3
"""The most ranks that are asked: if these are silent, all are."""


class LivingRanks:
    """The ranks of a session's meshes, which answer unless they have been silent lately; and all names (`Known`)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._silent_until: dict[tuple[str, int], float] = {}

    def view(self, words: Sequence[str] = (), pairs: Mapping[str, str] | None = None) -> ProcMesh | None:
        """Return the ranks that a command means, as far as it is typed; without a command the current mesh."""
        for chosen in ((words, pairs), (words, {}), ((), {})):
            try:
                return self._session.find_ranks(*chosen)
            except MeshError:
                continue
        return None

    def sizes(self) -> Mapping[str, int]:
        view = self.view()
        return view.sizes if view is not None else {}

    def ranks(self) -> Sequence[int]:
        view = self.view()
        return view.ranks if view is not None else ()

    def names(self, kind: str, prefix: str) -> Iterable[str]:
        match kind:
            case "SLICE":
                return [*self._session.slices, *self._session.meshes]
            case "meshes":
                return list(self._session.meshes)
            case "ID":
                return [str(job.number) for job in self._session.part(Jobs).all()]
            case "notebook":
                return user_names(self._session.shell, prefix)
            case "ranks":
                view = self.view()
                return (self.ask(view, list[str], "user_names", prefix) or ()) if view is not None else ()
            case "waiting":
                return [mesh.name for saved in listing.sessions() if saved.owner_pid is None for mesh in saved.meshes]
            case "logged":
                return metrics().names
            case "PROFILE":
                with contextlib.suppress(UsageError):  # said where one is used
                    return find_profiles(Path.cwd()).lines
            case "MOD,..":
                return [name for name in top_level() if name.startswith(prefix)]
        return ()

    def ask(self, view: ProcMesh, kind: type[T], endpoint: str, *args: object) -> T | None:
        """Return the first answer to a question of `meshbook.worker.queries`; None where no rank answers."""
        ranks = self._candidates(view)
        if not ranks:
            return None
        all_silent = all(self._is_silent(view, rank) for rank in ranks)
        timeout_s = TIMEOUT_WHEN_SILENT_S if all_silent else TIMEOUT_S
        try:
            found = ask_first(view, kind, endpoint, *args, ranks=ranks, patience_s=PATIENCE_S, timeout_s=timeout_s)
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
        """Return the living ranks in the order of asking."""
        lost = set(view.lost)
        living = [rank for rank in view.ranks if rank not in lost]
        return sorted(living, key=lambda rank: self._is_silent(view, rank))[:ASKED_MAX]


_LOG = logging.getLogger(__name__)


class Completer:
    """The completer of a session. Its methods may be called on any thread, and take at most a quarter of a second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._living = LivingRanks(session)

    def is_ours(self, cell: str, cursor: int) -> bool:
        """Whether code for the ranks, or a line of ours, stands at ``cursor``."""
        return self._locate(cell, cursor) is not None

    def complete(self, cell: str, cursor: int) -> Completions | None:
        """Return completions at ``cursor``, in code points; None: IPython completes there, or no rank answers."""
        try:
            place = self._locate(cell, cursor)
            if isinstance(place, RankCode):
                return self._complete_code(place)
            if isinstance(place, MagicLine):
                return self._complete_line(place, cursor)
        except Exception:  # a mesh may be ending; whoever types has no use for a traceback
            _LOG.debug("no completion", exc_info=True)
        return None

    def inspect(self, cell: str, cursor: int, detail: int = 0) -> str | None:
        """Return the text about the name at ``cursor``; empty: there is none; None: as for `complete`."""
        try:
            return self._inspect(self._locate(cell, cursor), detail)
        except Exception:
            _LOG.debug("no inspection", exc_info=True)
            return None

    def _inspect(self, place: RankCode | MagicLine | None, detail: int) -> str | None:
        if isinstance(place, MagicLine):
            code = self._expression(place)
            if code is None:
                grammar, _ = _grammar_of(place)
                return f"{grammar.help()}\n" if grammar is not None and grammar.name else None
            place = code
        if place is None:
            return None
        view = self._view(place.arguments)
        return None if view is None else self._living.ask(view, str, "inspect", place.code, place.cursor, detail)

    def _locate(self, cell: str, cursor: int) -> RankCode | MagicLine | None:
        return locate(cell, cursor, auto=AutoMode.of(self._session.shell).is_on)

    def _complete_code(self, place: RankCode) -> Completions | None:
        view = self._view(place.arguments)
        found = None if view is None else self._living.ask(view, Completions, "complete", place.code, place.cursor)
        return found and found._replace(start=found.start + place.start, end=found.end + place.start)

    def _complete_line(self, line: MagicLine, cursor: int) -> Completions | None:
        grammar, text = _grammar_of(line)
        if grammar is None:
            words = [Word(name, "magic") for name in (*COMMANDS, "help") if name.startswith(text.lstrip())]
            return _found(Follow(len(text.lstrip()), words), cursor)
        following = follow(grammar, text, self._living)
        if following.expression is None:
            return _found(following, cursor)
        code = self._expression(line)
        live = self._complete_code(code) if code is not None else None
        if live is None or not live.items:
            return _found(following, cursor) if following.words else live
        own = following.words if live.start == cursor - following.replaced else []
        return live._replace(items=[*own, *live.items])

    def _expression(self, line: MagicLine) -> RankCode | None:
        """Return the code in a line of ours, of ``%mesh eval`` say, if the cursor stands in it."""
        grammar, text = _grammar_of(line)
        if grammar is None or not grammar.tail:
            return None
        start = expression_start(grammar, text)
        if start is None:
            return None
        return RankCode(
            text[start:] + line.after, len(text) - start, line.start + len(line.text) - len(text) + start, text[:start]
        )

    def _view(self, arguments: str) -> ProcMesh | None:
        """Return the ranks of a target as far as it is typed; options that take names of slices count."""
        pairs: dict[str, str] = {}
        words: list[str] = []
        known = {*self._session.slices, *self._session.meshes}
        for part in arguments.split():
            if (pair := PAIR.fullmatch(part)) and pair[2]:
                pairs[pair[1]] = pair[2]
            elif part in known:
                words = [part]
        return self._living.view(words, pairs)


def _grammar_of(line: MagicLine) -> tuple[Grammar | None, str]:
    """Return the grammar of a line and the typed arguments; no grammar while the command itself is being typed."""
    if line.is_cell:
        return MESH_CELL, line.text
    load_all()
    found = re.match(r"\s*(\S+)(?=\s)", line.text)
    if found is None:
        return None, line.text
    if found[1] == "help":
        return None, line.text[found.end() :]
    command = COMMANDS.get(found[1])
    return (command[0] if command else _NOTHING_KNOWN), line.text[found.end() :]


def _found(following: Follow, cursor: int) -> Completions:
    return Completions(cursor - following.replaced, cursor, [*following.words])


_NOTHING_KNOWN = Grammar(name="", summary="", examples=("",))


TYPES = "_jupyter_types_experimental"
"""The metadata in which front ends look for the kinds of completions."""


def complete_reply(found: Completions | None, cursor: int) -> JupyterMessage:
    """Return the content of a complete_reply; found is None where there is nothing at ``cursor``."""
    start, end, items = found or (cursor, cursor, [])
    kinds = [
        {"start": start, "end": end, "text": text, "type": kind, "signature": signature}
        for text, kind, signature in items
    ]
    return {
        "status": "ok",
        "matches": [text for text, _, _ in items],
        "cursor_start": start,
        "cursor_end": end,
        "metadata": {TYPES: kinds},
    }


def inspect_reply(text: str) -> JupyterMessage:
    """Return the content of an inspect_reply."""
    data = {"text/plain": text} if text else {}
    return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}
