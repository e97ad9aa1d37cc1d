"""The transformers of a cell's text, before IPython reads it; and the check of its syntax, before ranks run it.

IPython's cleanup transformers get the lines of a cell and return others. Ours come in the order

    auto mode (only while it is on)   x = 1          ->  %%mesh
                                                         x = 1
    help and %%local (always)         # a comment    ->  %%mesh
                                      %%mesh
                                      %mesh spawn?   ->  %mesh help spawn
                                      %mesh eval x?  ->  %%mesh
                                                         x?
                                      %%local        ->  (an empty line)
"""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pygments.token import Token

from meshbook.errors import UsageError
from meshbook.shell.compiler import RankTransformers
from meshbook_extension.output.publisher import parent_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_COMMAND_HELP = re.compile(r"\s*%mesh\s+(\w+)\s*\?{1,2}\s*")
_EVAL_HELP = re.compile(r"\s*%mesh\s+eval\s+((?:\S+\s+)*)(%{0,2}[^\W\d][\w.]*\?{1,2})\s*")
_CELL_LINE = re.compile(r"\s*%%mesh(?![\w?])(?!\s*\?)")
_CELL_HELP = re.compile(r"\s(--help|-h)\s*$")
_AS_RANKS_DO = RankTransformers()
_LOCAL = re.compile(r"%%local\s*")
_TIMED = re.compile(r"%%time\s*")
_OWN_LINE = re.compile(r"\s*%mesh\b")


def answer_help(lines: list[str]) -> list[str]:
    """Answer ``?`` behind a command of ``%mesh``: IPython would look for a variable of that name."""
    if len(lines) != 1:
        return lines
    if found := _COMMAND_HELP.fullmatch(lines[0]):
        return [f"%mesh help {found[1]}\n"]
    if found := _EVAL_HELP.fullmatch(lines[0]):
        target = re.sub(r"--at(=|\s+)", "", found[1]).strip()
        return [f"%%mesh {target}".rstrip() + "\n", f"{found[2]}\n"]
    return lines


def take_empty_cell(lines: list[str]) -> list[str]:
    """Run ``%%mesh`` with nothing below it: IPython would refuse it in its own words, ``%%mesh --help`` too."""
    if len(lines) != 1 or not _CELL_LINE.match(lines[0]):
        return lines
    return ["%mesh help cell\n"] if _CELL_HELP.search(lines[0]) else [*lines, "\n"]


# a console that asks whether the cell is complete wants to hear that it is not
take_empty_cell.has_side_effects = True  # type: ignore[attr-defined]


def drop_comments(lines: list[str]) -> list[str]:
    """Drop comments above ``%%mesh``: IPython knows a cell magic on the first line only."""
    first = _first_code_line(lines)
    return lines[first:] if first is not None and _CELL_LINE.match(lines[first]) else lines


def drop_local(lines: list[str]) -> list[str]:
    """Take ``%%local`` away, so that the cell runs here. An empty line stays, so that line numbers hold."""
    first = _first_code_line(lines)
    if first is not None and _LOCAL.fullmatch(lines[first]):
        return [*lines[:first], "\n", *lines[first + 1 :]]
    return lines


def mesh_part(text: str) -> tuple[str, str, int] | None:
    """Return the line, the code and the number of lines above it of a cell with ``%%mesh``; None for another."""
    lines = text.splitlines(keepends=True)
    first = _first_code_line(lines)
    if first is not None and _TIMED.fullmatch(lines[first]):
        first = next((at for at in range(first + 1, len(lines)) if lines[at].strip()), first)
    if first is None or not _CELL_LINE.match(lines[first]):
        return None
    return lines[first].strip().removeprefix("%%mesh").strip(), "".join(lines[first + 1 :]), first + 1


class AutoMode:
    """The mode in which every cell of a shell goes to the mesh. It lives in the shell's transformers while it is on."""

    # completeness checks of consoles would take the cell for a magic that waits for an empty line
    has_side_effects = True

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._marked: Any = None
        """The prompts of a terminal that name the mesh."""

    @classmethod
    def of(cls, shell: InteractiveShell) -> AutoMode:
        """Return the shell's auto mode: the one that is on, or a new one that is off."""
        for transformer in shell.input_transformers_cleanup:
            if isinstance(transformer, cls):
                return transformer
        return cls(shell)

    @property
    def is_on(self) -> bool:
        """Whether cells go to the mesh."""
        return self in self._shell.input_transformers_cleanup

    def switch_on(self, current: Callable[[], str | None]) -> None:
        """Send every later cell to the mesh. current: returns its name, which a terminal has before its prompt."""
        if self.is_on:
            return
        self._shell.input_transformers_cleanup.insert(0, self)
        self._marked = getattr(self._shell, "prompts", None)
        if self._marked is not None:
            tokens = self._marked.in_prompt_tokens
            self._marked.in_prompt_tokens = lambda: [(Token.Prompt, f"({current() or 'no mesh'}) "), *tokens()]

    def switch_off(self) -> None:
        """Run every later cell here."""
        if self.is_on:
            self._shell.input_transformers_cleanup.remove(self)
            if self._marked is not None:
                del self._marked.in_prompt_tokens  # that of its class is there again

    def __call__(self, lines: list[str]) -> list[str]:
        content = parent_of(self._shell).get("content") or {}
        # code of the front end's own (variable inspectors, completers) leaves no history
        is_own = content.get("silent", False) or content.get("store_history", True) is False
        return lines if is_own or not goes_to_mesh(lines) else ["%%mesh\n", *lines]


TRANSFORMERS: tuple[Callable[[list[str]], list[str]], ...] = (drop_comments, answer_help, take_empty_cell, drop_local)


def goes_to_mesh(lines: list[str]) -> bool:
    """Whether auto mode sends this cell to the ranks."""
    first = _first_code_line(lines)
    return first is not None and not lines[first].lstrip().startswith("%%") and not _OWN_LINE.match(lines[first])


def _first_code_line(lines: list[str]) -> int | None:
    """Return the number of the first line that is neither empty nor a comment."""
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            return number
    return None


class CellSyntaxError(UsageError):
    """The cell is neither Python nor IPython's syntax. Nothing was run."""

    def __init__(self, shown: str) -> None:
        super().__init__(shown)
        self.shown = shown

    def __str__(self) -> str:
        return f"{self.shown}\n  nothing was run on the ranks"

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def as_ranks_do(code: str) -> str:
    """Return a cell as the Python that the ranks' shells make of it."""
    return str(_AS_RANKS_DO.transform_cell(code))


def check_syntax(code: str, cell_number: int, line_offset: int) -> None:
    """Compile ``code`` as the ranks' shells will: magics, ``!commands`` and top-level await are fine.

    line_offset: lines of the notebook's cell above ``code``, so that the error names the line that the person sees.
    Raises: CellSyntaxError.
    """
    leading = len(code) - len(code.lstrip("\n"))
    try:
        python = as_ranks_do(code)
        ast.parse("\n" * (line_offset + leading) + python, f"cell {cell_number}")
    except SyntaxError as error:
        # IPython's own transformations fail before lines are counted from the top of the cell
        if error.filename != f"cell {cell_number}":
            error.filename = f"cell {cell_number}"
            error.lineno = (error.lineno or 1) + line_offset + leading
        shown = "".join(traceback.format_exception_only(type(error), error)).rstrip()
        raise CellSyntaxError(shown) from None
    except (ValueError, OverflowError, MemoryError, RecursionError):
        return  # the rank says it with its own words
