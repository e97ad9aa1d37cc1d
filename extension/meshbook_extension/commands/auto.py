"""``%mesh auto``: every cell to the mesh.

A module of its own because each group of commands is one.
"""

from __future__ import annotations

from meshbook.formatting import name_ranks
from meshbook_extension.cells.transformers import AutoMode
from meshbook_extension.commands import command
from meshbook_extension.notebook.grammar import Arguments, Grammar
from meshbook_extension.notebook.session import Session

AUTO = Grammar(
    name="%mesh auto",
    summary="Run every cell on the mesh until off; %%local above a cell escapes.",
    words="on|off",
    count=(0, 1),
    examples=("%mesh auto on", "%mesh auto off"),
    notes="Cells that begin with %mesh or with a cell magic (%%...) stay in the notebook's process.",
)


@command(AUTO)
def auto(session: Session, arguments: Arguments) -> None:
    """Switch it; without a word, say how it stands."""
    mode = AutoMode.of(session.shell)
    word = arguments.words[0] if arguments.words else None
    if word not in (None, "on", "off"):
        raise AUTO.refuse(f'say on or off, not "{word}".')
    if word == "on":
        procs = session.mesh()
        mode.switch_on()
        print(f'every cell runs on {name_ranks(procs.ranks)} of mesh "{procs.name}"')
        print("  here instead: %%local above the cell    end: %mesh auto off")
        return
    if word == "off":
        mode.switch_off()
    print(f"auto is {'on' if mode.is_on else 'off'}")
