"""``%mesh`` and ``%%mesh``, as IPython knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import MAGIC_NO_VAR_EXPAND_ATTR

from meshbook_extension.cells.run import MESH_CELL, run_mesh_cell
from meshbook_extension.commands import dispatch, help_text
from meshbook_extension.notebook.session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RAW = ("eval",)
"""Commands whose line is taken as it stands; in others ``$x`` and ``{x}`` stand for variables of the notebook."""


class MeshMagics:
    """The magics of one session."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        self.shell = shell
        self.session = session

    def register(self) -> None:
        """Make them known to the shell."""
        for kind, function in (("line", self.line), ("cell", self.cell)):
            self.shell.magics_manager.register_function(function, magic_kind=kind, magic_name="mesh")

    def line(self, line: str) -> None:
        if line.split(" ", 1)[0] not in RAW:
            line = self.shell.var_expand(line, depth=2)
        dispatch(self.session, line)

    def cell(self, line: str, cell: str) -> None:
        run_mesh_cell(self.session, line, cell)


MeshMagics.line.__doc__ = help_text()
MeshMagics.cell.__doc__ = MESH_CELL.help()
setattr(MeshMagics.line, MAGIC_NO_VAR_EXPAND_ATTR, True)
