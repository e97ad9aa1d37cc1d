"""Finds syntax errors of a mesh cell before it is sent, so that no rank runs half of it."""

from __future__ import annotations

import ast
import traceback
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from meshbook.errors import UsageError


class CellSyntaxError(UsageError):
    """The cell is not Python, nor what IPython makes of magics. Nothing was run."""

    def __init__(self, shown: str) -> None:
        super().__init__(shown)
        self.shown = shown

    def __str__(self) -> str:
        return f"{self.shown}\n  nothing was run on the ranks"

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def check_syntax(code: str, cell_number: int, line_offset: int) -> None:
    """Compile ``code`` as the ranks' shells will: magics, ``!commands`` and top-level await are fine.

    line_offset: lines of the notebook's cell above ``code``, so that the error names the line that the person sees.
    Raises: CellSyntaxError.
    """
    leading = len(code) - len(code.lstrip("\n"))
    try:
        manager: Any = TransformerManager
        python = manager().transform_cell(code)
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
