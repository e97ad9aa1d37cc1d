"""The place at the cursor (code for the ranks, a line of ours, or neither), and the words that may follow in ours.

The grammar says where names stand and how they are called there (``SLICE``, ``ID``, ``AXIS=..``); `Known` says which
there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshbook_extension.cells.transformers import goes_to_mesh
from meshbook_extension.notebook.grammar import PAIR, Grammar, Option, expression_start
from meshbook_extension.notebook.targets import RANK

_CELL_MAGIC = re.compile(r"\s*%%mesh(?!\w)")
_LINE_MAGIC = re.compile(r"\s*%mesh(?!\w)")
_OTHER_CELL_MAGIC = re.compile(r"\s*%%(?!local\b)\w")


@dataclass(frozen=True)
class RankCode:
    """Python for the ranks: ``code`` begins at ``start`` of the cell, and the cursor is at ``cursor`` of it.

    arguments: the text behind ``%%mesh``, which says the ranks.
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
    """Return the place at ``cursor`` (code points); None for the notebook's own code. auto: whether auto mode is on."""
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
    """Return the line of ours; None while the cursor stands in the magic's name, which IPython completes."""
    if cursor <= arguments_start:
        return None
    end = line_start + len(line)
    text = line[arguments_start - line_start : cursor - line_start]
    return MagicLine(text, line[cursor - line_start : end - line_start], arguments_start, is_cell)


INDICES_MAX = 256
"""The most indices of an axis that are listed."""

_PLACEHOLDER = re.compile(r"\w+")
_PAIR_FORM = re.compile(r"(\w+)=(\w+|\.\.)")
_EXAMPLE_AXIS = re.compile(r"(?<=\s)([a-z]\w*)=\d")
AXIS = "AXIS"


class Word(NamedTuple):
    """A word that may stand at the cursor; ``signature`` where it is known."""

    text: str
    kind: str
    """The kind in IPython's words."""
    signature: str = ""


class Follow(NamedTuple):
    """The words that may replace the last ``replaced`` characters; the last ``expression`` are Python for ranks."""

    replaced: int
    words: list[Word]
    expression: int | None = None


class Known(Protocol):
    """The names that there are now."""

    def sizes(self) -> Mapping[str, int]:
        """Return the axes of the current mesh with their sizes."""

    def ranks(self) -> Sequence[int]:
        """Return the ranks of the mesh."""

    def names(self, kind: str, prefix: str) -> Iterable[str]:
        """Return names of a kind (`Grammar.names`), or of a placeholder such as ``SLICE``."""


def follow(grammar: Grammar, text: str, known: Known) -> Follow:
    """Complete the end of ``text``, the arguments of the command as far as they are typed."""
    start = expression_start(grammar, text)
    expression = None if start is None else len(text) - start
    if start is not None and re.search(r"\W", text[start:]):
        return Follow(0, [], expression)
    *before, current = re.split(r"\s+", text.lstrip())
    if "--" in before:
        return Follow(0, [])
    options = {option.name: option for option in grammar.options}
    asking = options.get(before[-1]) if before else None
    if asking is not None and asking.value is not bool:
        return _starting(current, _values(asking, current, known))
    name, equals, value = current.partition("=")
    if equals and name in options:
        return _starting(value, _values(options[name], value, known))
    if current.startswith("-"):
        unused = [name for name in (*options, "--help") if name not in before]
        return _starting(current, [Word(name, "param") for name in unused])
    if pair := PAIR.fullmatch(current):
        return _pair_values(grammar, pair[1], pair[2], known)
    found = _starting(current, [*_words(grammar, current, known), *_pairs(grammar, before, known)])
    return found._replace(expression=expression)


def _starting(typed: str, words: Iterable[Word]) -> Follow:
    return Follow(len(typed), [word for word in dict.fromkeys(words) if word.text.startswith(typed)])


def _values(option: Option, typed: str, known: Known) -> list[Word]:
    """Return the words that may be the value of an option."""
    if option.choices:
        return [Word(choice, "keyword") for choice in option.choices]
    if option.metavar == f"{RANK}=R":
        return [Word(f"{RANK}={rank}", "value") for rank in known.ranks()[:INDICES_MAX]]
    done, comma, last = typed.rpartition(",")
    return [Word(f"{done}{comma}{name}", "instance") for name in known.names(option.metavar, last)]


def _words(grammar: Grammar, typed: str, known: Known) -> list[Word]:
    """Return the words that may stand as a plain word."""
    found = [Word(f"@{name}", "instance") for name in known.names("PROFILE", typed)] if grammar.profiles else []
    for placeholder in dict.fromkeys(_PLACEHOLDER.findall(grammar.words)):
        if not placeholder.isupper():
            found.append(Word(placeholder, "keyword"))
        elif placeholder == "RANK":
            found += [Word(str(rank), "value") for rank in known.ranks()[:INDICES_MAX]]
        else:
            kind = grammar.names if placeholder == "NAME" else placeholder
            found += [Word(name, "instance") for name in known.names(kind, typed)]
    return found


def _pairs(grammar: Grammar, before: Sequence[str], known: Known) -> list[Word]:
    """Return the words that may stand on the left of an equals sign, and do not yet."""
    axes: list[str] = []
    for left, right in _PAIR_FORM.findall(grammar.pairs):
        if left != AXIS:
            axes += [] if left.isupper() else [left]  # NEW is the person's to name
            continue
        new = [axis for example in grammar.examples for axis in _EXAMPLE_AXIS.findall(example)]
        makes_axes = "--on" in {option.name for option in grammar.options}
        axes += new if makes_axes else known.sizes()  # the person names them, and examples are as good as any
        axes += [RANK] if right == ".." else []
    used = {word.partition("=")[0] for word in before}
    return [Word(f"{axis}=", "param") for axis in dict.fromkeys(axes) if axis not in used]


def _pair_values(grammar: Grammar, axis: str, typed: str, known: Known) -> Follow:
    """Return the words that may stand on the right of an equals sign."""
    forms = dict(_PAIR_FORM.findall(grammar.pairs))
    sizes = known.sizes()
    if forms.get(axis) == AXIS:
        return _starting(typed, [Word(name, "param") for name in sizes])
    if axis in forms or forms.get(AXIS) != "..":
        return Follow(0, [])
    last = re.split("[,:-]", typed)[-1]
    ends_slice = ":" in typed.rpartition(",")[2]
    indices: Sequence[int] = known.ranks() if axis == RANK else range(sizes.get(axis, 0) + ends_slice)
    words = [Word(str(index), "value") for index in indices[:INDICES_MAX]]
    return _starting(last, words if typed else [*words, Word(":", "value")])
