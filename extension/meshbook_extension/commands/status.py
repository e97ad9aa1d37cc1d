"""What the ranks are doing: status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshbook_extension.commands import command
from meshbook_extension.notebook.grammar import Arguments, Grammar, Option
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.targets import FORMS
from meshbook_extension.widget.display import HealthDisplays
from meshbook_extension.widget.text import status_text

if TYPE_CHECKING:
    pass


TEXT = Option("--text", "as text, also where the widget can be shown")


@command(
    Grammar(
        name="%mesh status",
        summary="The ranks: where they run, what they do, how much memory they hold; live where a widget can be shown.",
        words="[SLICE]",
        count=(0, 1),
        pairs="[AXIS=.. ...]",
        options=(TEXT,),
        examples=("%mesh status", "%mesh status gpus=0:2", "%mesh status --text", "%mesh"),
        notes=FORMS,
    )
)
def status(session: Session, arguments: Arguments) -> None:
    """The widget, or a table."""
    procs = session.target(arguments.words, arguments.pairs)
    if arguments.flag(TEXT.name) or not session.part(HealthDisplays).show(session, procs):
        print(status_text(session, procs, procs.status()))


@command(
    Grammar(
        name="%mesh top",
        summary="The same as %mesh status.",
        words="[SLICE]",
        count=(0, 1),
        pairs="[AXIS=.. ...]",
        options=(TEXT,),
        examples=("%mesh top", "%mesh top gpus=0:2"),
        notes=FORMS,
    )
)
def top(session: Session, arguments: Arguments) -> None:
    """The widget, or a table."""
    status(session, arguments)
