"""Who knows whom in one notebook: a session is opened with all that listens to it, and closed again."""

from __future__ import annotations

from typing import Any

from meshbook.actor.supervision import observe_unhandled
from meshbook.mesh import set_attendant, set_output_source
from meshbook_extension.call_output import CallOutput
from meshbook_extension.comeback import Comeback
from meshbook_extension.completion.hooks import Hooks
from meshbook_extension.completion.typist import Typist
from meshbook_extension.hang_watch import HangWatch
from meshbook_extension.jobs import Jobs
from meshbook_extension.keepsake import Keeper, notebook_key
from meshbook_extension.prompts import CallAttendant
from meshbook_extension.session import Session
from meshbook_extension.visual_debugger.target import Debugged


def open_session(shell: Any, earlier: Session | None) -> Session:
    """A session whose calls print into the cells of ``shell``.

    earlier: one that was closed, with whose meshes, slices and jobs it goes on; without, those that an earlier kernel
    of the notebook has left come back.
    """
    session = Session(shell, notebook_key(shell))
    if earlier is not None:
        session.meshes, session.slices, session.current = earlier.meshes, earlier.slices, earlier.current
        session.setups, session.returned, session.errors = earlier.setups, earlier.returned, earlier.errors
        for kept in (Jobs, Comeback):
            session.add_part(earlier.part(kept))
    calls, keeper = CallOutput(session), Keeper(session)
    for part in (calls, keeper, Debugged(session), Hooks(shell, Typist(session))):
        session.add_part(part)
    set_output_source(calls.target)
    set_attendant(CallAttendant(session))
    observe_unhandled(session.errors.note_unhandled)
    for listener in (calls.finish, keeper.save, session.note_error):
        shell.events.register("post_run_cell", listener)
    session.on_change.append(keeper.save)
    if earlier is None:
        comeback = Comeback(session)
        session.add_part(comeback)
        comeback.start()
    return session


def close_session(session: Session) -> None:
    """End what `open_session` has begun. The meshes run on, until they are stopped or the process ends."""
    observe_unhandled(None)
    set_output_source(None)
    set_attendant(None)
    session.part(Hooks).uninstall()
    session.part(Debugged).end()
    for listener in (session.part(CallOutput).finish, session.part(Keeper).save, session.note_error):
        session.shell.events.unregister("post_run_cell", listener)
    session.part(HangWatch).close()
    session.publisher.stop()
