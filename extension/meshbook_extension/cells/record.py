"""The record of a notebook's executed cells: text, targets, order, outcome. `%mesh export` makes a script of it.

It is kept with the session, as a file to which each cell appends a line of JSON, so that the next kernel of the
notebook, or another that attaches, has it too. Cells that ran before there was a mesh are written with the first one.
"""

from __future__ import annotations

import contextlib
import math
import symtable
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshbook.mesh.driven import own_sessions
from meshbook.mesh.states import known_device
from meshbook.wire.messages import utf8_data
from meshbook_extension.cells.transformers import AutoMode, as_ranks_do, goes_to_mesh, mesh_part
from meshbook_extension.output.publisher import parent_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult

    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.notebook.session import Session

CELLS = "cells"
"""The key under which a session remembers the record."""
KEPT_CHARS = 8_000_000
"""The most text that is kept; the oldest cells go first."""
GIVEN = frozenset({"rank", "local_rank", "world_size", "point", "device"})
"""Names that ranks have from their start."""


class NamedTarget(msgspec.Struct, frozen=True):
    """The part of a mesh that a cell, or a command in it, has named."""

    words: tuple[str, ...]
    pairs: dict[str, str]
    """The target as it was written."""
    mesh: str
    id: str
    """The mesh's session and its number there."""
    axes: dict[str, int]
    """The axes of the whole mesh, as it was arranged."""
    sizes: dict[str, int]
    ranks: tuple[int, ...]
    hosts: int
    device: str

    @property
    def size(self) -> int:
        """The number of ranks of the whole mesh."""
        return math.prod(self.axes.values())


class MeshPart(NamedTuple):
    """The part of a cell that ran on ranks."""

    line: str
    """The options and the target behind ``%%mesh``."""
    code: str
    lines_above: int


class ExecutedCell(msgspec.Struct, frozen=True):
    """A cell as it was executed."""

    number: int
    cell_id: str
    """The front end's name of the cell, where it has one."""
    text: str
    is_auto: bool
    """Whether auto mode has sent it to the mesh."""
    error: str
    """The name of the error with which it ended; empty where it ended well."""
    targets: tuple[NamedTarget, ...]

    @property
    def on_ranks(self) -> MeshPart | None:
        """Its code on ranks; None for a cell of the notebook's own process."""
        if self.is_auto:
            return MeshPart("", self.text, 0)
        return MeshPart(*part) if (part := mesh_part(self.text)) else None

    @property
    def code(self) -> str:
        """Its code, without a ``%%mesh`` line."""
        return part.code if (part := self.on_ranks) else self.text

    def is_run_again_by(self, later: ExecutedCell) -> bool:
        """Whether a later run is of the same cell: by its name, else by its text."""
        if self.cell_id and later.cell_id:
            return self.cell_id == later.cell_id
        return self.text == later.text


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ExecutedCell).decode


class CellRecord:
    """The executed cells of a session, the last one at the end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.cells: list[ExecutedCell] = []
        self._chars = 0
        self._added = 0
        """The number of cells that were ever added."""
        self._written: dict[str, int] = {}
        """The value of `_added` when the file of each session was written."""

    def note(self, result: ExecutionResult) -> None:
        """Add the cell that has just ended, unless it is the front end's own."""
        named = self._session.named_targets
        targets = tuple(target_of(self._session, *each) for each in named)
        named.clear()
        info = result.info
        if info is None or info.silent or not info.store_history or not info.raw_cell.strip():
            return
        shell, failure = self._session.shell, result.error_before_exec or result.error_in_exec
        cell_id = str((parent_of(shell).get("metadata") or {}).get("cellId") or getattr(info, "cell_id", "") or "")
        is_auto = AutoMode.of(shell).is_on and goes_to_mesh(info.raw_cell.splitlines(keepends=True))
        error = "" if failure is None else type(failure).__name__
        number = int(result.execution_count or 0)
        self._add([ExecutedCell(number, cell_id, info.raw_cell, is_auto, error, targets)])
        with contextlib.suppress(OSError):  # of a full disk the mesh's own files tell
            self._save()

    def _add(self, cells: Sequence[ExecutedCell]) -> None:
        self.cells += cells
        self._added += len(cells)
        self._chars += sum(len(cell.text) for cell in cells)
        while self._chars > KEPT_CHARS and len(self.cells) > 1:
            self._chars -= len(self.cells.pop(0).text)

    def _save(self) -> None:
        """Append the new cells to the files of the sessions; a file is written whole at first, and when it is long."""
        for folder in own_sessions():
            if not folder.state.meshes:
                continue
            before = self._written.get(folder.id)
            if before is None or folder.append(CELLS, _lines(self.cells[before - self._added :])) > 4 * KEPT_CHARS:
                folder.remember(CELLS, _lines(self.cells))
            self._written[folder.id] = self._added

    def take_up(self, data: bytes | None) -> None:
        """Add the cells that earlier kernels have left, before those of this one."""
        own, self.cells, self._chars = self.cells, [], 0
        self._added -= len(own)
        self._add([*(cell for cell in _read(data or b"") if cell not in own), *own])
        self._written.clear()

    def go_on(self, session: Session) -> CellRecord:
        """Return this record for the session that follows, as the extension was loaded anew."""
        self._session = session
        return self

    def ranks_with(self, procs: ProcMesh, name: str) -> list[int]:
        """Return the living ranks of a mesh that cells have given this name."""
        found = set(procs.ranks) if name in GIVEN else set()
        for cell in self.cells:
            part = cell.on_ranks if name in cell.text and cell.targets else None
            if part and cell.targets[0].id == _id_of(procs) and name in bound_by(part.code):
                found.update(cell.targets[0].ranks)
        return sorted(found.intersection(procs.ranks).difference(procs.lost))


def _lines(cells: Sequence[ExecutedCell]) -> bytes:
    try:
        return b"".join(_encode(cell) + b"\n" for cell in cells)
    except UnicodeEncodeError:  # of text that is not UTF-8
        return b"".join(_encode(utf8_data(cell)) + b"\n" for cell in cells)


def _read(data: bytes) -> Iterator[ExecutedCell]:
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # the last line may be cut
            yield _decode(line)


def _id_of(procs: ProcMesh) -> str:
    return f"{procs.session}/{procs.id}"


def target_of(session: Session, words: Sequence[str], pairs: dict[str, str], procs: ProcMesh) -> NamedTarget:
    """Return the target that words and pairs have named."""
    whole = session.meshes.get(procs.name, procs)
    hosts, device = len(whole.hosts), known_device(procs)
    sizes = dict(procs.sizes)
    return NamedTarget(
        tuple(words), pairs, procs.name, _id_of(procs), dict(whole.sizes), sizes, procs.ranks, hosts, device
    )


def bound_by(code: str) -> set[str]:
    """Return the names that a cell binds at its top level; none where it cannot be read."""
    try:
        table = symtable.symtable(as_ranks_do(code), "<cell>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
