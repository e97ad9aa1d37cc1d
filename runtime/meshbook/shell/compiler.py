"""The compiler of a rank's cells: Python, under the cell's name and line numbers."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast

from IPython.core.compilerop import CachingCompiler

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
