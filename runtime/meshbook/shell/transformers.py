"""IPython's input syntax, looked for only where there may be some: most cells are plain Python.

IPython takes these apart twice, for its syntax and to see whether they await. Eight ranks on two cores do so one after
the other, so a person waits for that four times.
"""

from __future__ import annotations

import re

from IPython.core import inputtransformer2
from IPython.core.inputtransformer2 import TransformerManager

_KNOWN = [
    getattr(inputtransformer2, name, None)
    for name in (
        "leading_empty_lines", "leading_indent", "classic_prompt", "ipython_prompt", "cell_magic", "MagicAssign",
        "SystemAssign", "EscapedCommand", "HelpEnd",
    )
]  # fmt: skip
"""None of these changes a cell in which `_MAY_BE_SPECIAL` finds nothing."""

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
    """IPython's, but plain Python is left alone at once, unless a user or a newer IPython has added others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first = self._current()
        self._knows_all = all(each in _KNOWN for each in self._first)

    def transform_cell(self, cell: str) -> str:
        if cell and self._knows_all and self._current() == self._first and not _MAY_BE_SPECIAL.search(cell):
            return cell if cell.endswith("\n") else f"{cell}\n"
        return str(super().transform_cell(cell))

    def _current(self) -> list[object]:
        return [*self.cleanup_transforms, *self.line_transforms, *self.token_transformers]


def may_await(python: str) -> bool:
    """Whether ``python`` may need an event loop; else there is no need to compile it to find out."""
    return "await" in python or "async" in python
