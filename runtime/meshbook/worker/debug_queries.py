"""What a rank is asked and told while it may be stopped at a prompt; on its control thread, so plain data both ways."""

from __future__ import annotations

import time
from bdb import BdbQuit
from typing import TYPE_CHECKING

from meshbook.calls.rank_state import LastError
from meshbook.errors import GroupAborted
from meshbook.errors.advice import Advice, set_advice
from meshbook.shell.failures import text_of
from meshbook.source import functions
from meshbook.source.location import describe_frame
from meshbook.source.thread_frames import frame_of

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker


def pdb_prompt(worker: Worker) -> list[object] | None:
    """The fields of the `meshbook.wire.messages.AtPrompt` at which the rank waits, if it does."""
    prompt = worker.shell.debugger.prompt
    return None if prompt is None else list(prompt)


def pdb_command(worker: Worker, number: int, line: str) -> bool:
    """Type a line at prompt ``number``; whether the rank waited there."""
    return worker.shell.debugger.command(number, line)


def pdb_break_in(worker: Worker) -> str:
    """Have the main thread stop at its next line of the user's code; returns what it does now."""
    debugger = worker.shell.debugger
    if worker.current is None:
        return "idle"
    if not debugger.place:
        debugger.refusal = ""  # who asks for it is there
        worker.gate.visit(debugger.break_in)
    return describe_frame(frame_of(worker.main_thread))


def hold_deadlines(worker: Worker, held: bool) -> None:
    """Some rank is stopped at a prompt, or none is any more: the deadlines of collectives stand still meanwhile."""
    worker.groups.hold_deadlines(held)


def learn_source(worker: Worker, name: str, text: str) -> None:
    """See `meshbook.source.functions`."""
    functions.learn_source(name, text)


def learn_advice(worker: Worker, *words: str) -> None:
    """Take the words of another front end, which has attached the mesh."""
    set_advice(Advice(*words))


def last_error(worker: Worker) -> LastError | None:
    """The exception that a post-mortem would be of, if there is one."""
    kept = worker.shell.last_error
    if kept is None:
        return None
    error = kept.error
    return LastError(
        type(error).__name__,
        text_of(error)[:500],
        time.monotonic() - kept.at,
        kept.call,
        freed=isinstance(error, (GroupAborted, KeyboardInterrupt, BdbQuit)),
        has_frames=error.__traceback__ is not None,
    )
