"""The actors of a mesh: ``%mesh actors``."""

from __future__ import annotations

import textwrap

from meshbook.formatting import format_sizes
from meshbook_extension.commands import command
from meshbook_extension.notebook.grammar import Arguments, Grammar
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS


@command(
    Grammar(
        name="%mesh actors",
        summary="The actors of the ranks: what each is doing, and how many messages wait for it.",
        words="[SLICE]",
        count=(0, 1),
        pairs="[AXIS=.. ...]",
        examples=("%mesh actors", "%mesh actors gpus=0:2"),
        notes=f"Without a current mesh: those of all meshes that this notebook has made in Python.\n{FORMS}",
    )
)
def actors(session: Session, arguments: Arguments) -> None:
    """A table; ranks whose actors do the same share a row. Without a current mesh: one for each of this process."""
    from meshbook.actor.listing import actor_table
    from meshbook.mesh.driven import own_meshes

    if session.current is None and not arguments.words and not arguments.pairs and (meshes := own_meshes()):
        for procs in meshes:
            title = f'mesh "{procs.name}": {format_sizes(procs.sizes)}'
            states = procs.actors()
            print(title if states else f"{title}, no actors")
            if states:
                print(textwrap.indent(actor_table(states), "  "))
        return
    procs = session.target(arguments.words, arguments.pairs)
    if states := procs.actors():
        print(actor_table(states))
    else:
        print(
            f'no actors on these ranks. Make some: %mesh use {procs.name} --out procs, then procs.spawn("name", Class)'
        )
