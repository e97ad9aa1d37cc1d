"""The compiler of a rank's cells: IPython's syntax becomes Python, under the cell's name and line numbers.

Most cells are plain Python. IPython would take them apart twice, for its syntax and to see whether they await; eight
ranks on two cores do so one after the other, and a person waits for that four times. So its syntax is looked for only
where there may be some.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
import re

from IPython.core import inputtransformer2
from IPython.core.compilerop import CachingCompiler
from IPython.core.inputtransformer2 import TransformerManager

from meshbook.source.location import add_cell, cell_label


class CellCompiler(CachingCompiler):
    """IPython's compiler, told by `begin` which cell comes next."""

    def __init__(self) -> None:
        super().__init__()
        self._filename_map: dict[str, int] = {}
        self._above: dict[str, str] = {}
        """The blank lines that stand for lines above the code of each file."""
        self.begin("", None, 0)

    def begin(self, code: str, number: int | None, lines_above: int, debug_name: str = "") -> None:
        """Note the cell that runs next. lines_above: the number of lines above ``code`` in the notebook's cell.

        debug_name: the name of its file, where a debugger has set breakpoints by it.
        """
        self._code, self._number, self._lines_above = code, number, lines_above
        self._debug_name = debug_name
        self._above.clear()

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        above = self._count_above(transformed_code if raw_code is None else raw_code)
        blank = "\n" * (above or 0)
        number_of_cell, name_of_cell = (None, "") if above is None else (self._number, self._debug_name)
        name = add_cell(blank + transformed_code, number_of_cell, name_of_cell)
        self._above[name] = blank
        self._filename_map[name] = number
        return name

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> ast.AST:
        tree: ast.AST = super().ast_parse(self._above.get(filename, "") + source, filename, symbol)
        return tree

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return the words before ``, line 3`` in a traceback."""
        label = cell_label(name)
        kind, _, number = (label or "").partition(" ")
        if kind not in ("a", "cell"):
            return None  # a program is a file
        return ("Cell", f"[{number}]") if kind == "cell" else ("A", "cell")

    def _count_above(self, code: str) -> int | None:
        """Count the lines above ``code`` if it is the cell, or the body of a magic such as ``%%capture`` at its end."""
        cell, body = self._code.rstrip("\n"), code.rstrip("\n")
        if not cell.endswith(body):
            return None  # code that the cell has put together
        leading = code[: len(code) - len(code.lstrip())].count("\n")  # IPython strips blank lines
        return self._lines_above + cell[: len(cell) - len(body)].count("\n") + leading


_KNOWN = [
    getattr(inputtransformer2, name, None)
    for name in (
        "leading_empty_lines", "leading_indent", "classic_prompt", "ipython_prompt", "cell_magic", "MagicAssign",
        "SystemAssign", "EscapedCommand", "HelpEnd",
    )
]  # fmt: skip
"""IPython's transformers that change no cell in which `_MAY_BE_SPECIAL` finds nothing."""

_MAY_BE_SPECIAL = re.compile(
    r"""[%!?]                                     # magics, commands, help: anywhere
    | \A\s                                        # lines above the code, or its indentation, which are taken away
    | ^[ \t]*(?:[,;/>.\[]|In\ )                   # calls without parentheses, prompts
    | ^[^\S\n]+$                                  # blanks on a line without code, which are taken away too
    | [\r\v\f\x1c-\x1e\x85\u2028\u2029]           # what else ends a line for IPython
    """,
    re.MULTILINE | re.VERBOSE,
)


class RankTransformers(TransformerManager):
    """IPython's transformers, but plain Python skips them unless a user or a newer IPython has added others."""

    def __init__(self) -> None:
        super().__init__()
        self._first = self._current()
        self._knows_all = all(each in _KNOWN for each in self._first)

    def transform_cell(self, cell: str) -> str:
        if cell and self._knows_all and self._current() == self._first and not _MAY_BE_SPECIAL.search(cell):
            return cell if cell.endswith("\n") else f"{cell}\n"
        return str(super().transform_cell(cell))

    def _current(self) -> list[object]:
        return [*self.cleanup_transforms, *self.line_transforms, *self.token_transformers]


def may_await(python: str) -> bool:
    """Whether ``python`` may need an event loop; only then is it compiled to find out."""
    return "await" in python or "async" in python
