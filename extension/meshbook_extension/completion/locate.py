"""What stands at the cursor of a cell: code for the ranks, a line of ours, or neither."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshbook_extension.cells.transformers import goes_to_mesh

_CELL_MAGIC = re.compile(r"\s*%%mesh(?!\w)")
_LINE_MAGIC = re.compile(r"\s*%mesh(?!\w)")
_OTHER_CELL_MAGIC = re.compile(r"\s*%%(?!local\b)\w")


@dataclass(frozen=True)
class RankCode:
    """Python for the ranks: ``code``, in which the cursor is at ``cursor``, begins at ``start`` of the cell.

    arguments: what stands behind ``%%mesh``; it says which ranks.
    """

    code: str
    cursor: int
    start: int
    arguments: str = ""


@dataclass(frozen=True)
class MagicLine:
    """The arguments of ``%mesh`` or ``%%mesh``: ``text``, which begins at ``start`` of the cell, up to the cursor.

    after: the rest of the line.
    """

    text: str
    after: str
    start: int
    is_cell: bool


def locate(cell: str, cursor: int, *, auto: bool = False) -> RankCode | MagicLine | None:
    """What stands at ``cursor`` (code points); None: something of the notebook's own. auto: whether auto mode is on."""
    line_start = cell.rfind("\n", 0, cursor) + 1
    line_end = cell.find("\n", cursor)
    line = cell[line_start : len(cell) if line_end < 0 else line_end]
    head_start = len(cell) - len(cell.lstrip("\n"))
    if found := _CELL_MAGIC.match(cell):
        return _in_mesh_cell(cell, cursor, found.end())
    if found := _LINE_MAGIC.match(line):
        return _magic_line(line, line_start, line_start + found.end(), cursor, is_cell=False)
    if auto and goes_to_mesh(cell.splitlines(keepends=True)) and not _OTHER_CELL_MAGIC.match(cell, head_start):
        return RankCode(cell, cursor, 0)
    return None


def _in_mesh_cell(cell: str, cursor: int, arguments_start: int) -> RankCode | MagicLine | None:
    end = cell.find("\n", arguments_start)
    end = len(cell) if end < 0 else end
    if cursor > end:
        return RankCode(cell[end + 1 :], cursor - end - 1, end + 1, cell[arguments_start:end])
    line_start = cell.rfind("\n", 0, arguments_start) + 1
    return _magic_line(cell[line_start:end], line_start, arguments_start, cursor, is_cell=True)


def _magic_line(line: str, line_start: int, arguments_start: int, cursor: int, *, is_cell: bool) -> MagicLine | None:
    """None while the cursor stands in the magic's own name: IPython knows its name."""
    if cursor <= arguments_start:
        return None
    end = line_start + len(line)
    text = line[arguments_start - line_start : cursor - line_start]
    return MagicLine(text, line[cursor - line_start : end - line_start], arguments_start, is_cell)
