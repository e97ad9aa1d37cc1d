"""What the ranks are doing and what they hold: status, top, actors, tensors."""

from __future__ import annotations

import sys
import textwrap

from meshbook.formatting import format_sizes
from meshbook_extension.commands import Command, on_ranks
from meshbook_extension.notebook.grammar import Arguments, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.widget.display import HealthDisplays
from meshbook_extension.widget.text import status_text

TEXT = Option("--text", "as text, also where the widget can be shown")


@on_ranks(
    name="%mesh top",
    summary="The same as %mesh status.",
    options=(TEXT,),
    examples=("%mesh top", "%mesh top gpus=0:2"),
)
@on_ranks(
    name="%mesh status",
    summary="The ranks: where they run, what they do, how much memory they hold; live where a widget can be shown.",
    options=(TEXT,),
    examples=("%mesh status", "%mesh status gpus=0:2", "%mesh status --text", "%mesh"),
)
def status(session: Session, arguments: Arguments) -> None:
    """The widget, or a table."""
    procs = session.target(arguments.words, arguments.pairs)
    if arguments.flag(TEXT.name) or not session.part(HealthDisplays).show(session, procs):
        print(status_text(session, procs, procs.status()))


@on_ranks(
    name="%mesh actors",
    summary="The actors of the ranks: what each is doing, and how many messages wait for it.",
    examples=("%mesh actors", "%mesh actors gpus=0:2"),
    notes="Without a current mesh: those of all meshes that this notebook has made in Python.\n",
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


@Command(
    name="%mesh tensors",
    summary="The notebook's mesh tensors: how they lie, and what each rank holds of them.",
    examples=("%mesh tensors",),
    notes="Tensors and modules that a variable holds, of all meshes; the totals count those without a name too.",
)
def tensors(session: Session, arguments: Arguments) -> None:
    """A table for each mesh."""
    tables: list[str] = []
    if "meshbook.tensors.handles.mesh_tensor" in sys.modules:  # there is none otherwise, and torch need not be imported
        from meshbook.tensors.handles.listing import tensor_tables

        names = session.shell.user_ns
        tables = tensor_tables({name: value for name, value in list(names.items()) if not name.startswith("_")})
    print("\n".join(tables) or "no mesh tensors yet. Make one: meshbook.distribute(tensor, mesh)")
