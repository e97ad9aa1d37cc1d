"""The actors of a mesh: ``%mesh actors``."""

from __future__ import annotations

from meshbook_extension.commands import command
from meshbook_extension.options import Arguments, Grammar
from meshbook_extension.session import Session
from meshbook_extension.targets import FORMS


@command(
    Grammar(
        name="%mesh actors",
        summary="The actors of the ranks: what each is doing, and how many messages wait for it.",
        words="[SLICE]",
        count=(0, 1),
        pairs="[AXIS=.. ...]",
        examples=("%mesh actors", "%mesh actors gpus=0:2"),
        notes=FORMS,
    )
)
def actors(session: Session, arguments: Arguments) -> None:
    """A table; ranks whose actors do the same share a row."""
    from meshbook.actor.listing import actor_table

    procs = session.target(arguments.words, arguments.pairs)
    if states := procs.actors():
        print(actor_table(states))
    else:
        print(
            f'no actors on these ranks. Make some: %mesh use {procs.name} --out procs, then procs.spawn("name", Class)'
        )
