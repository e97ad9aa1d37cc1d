"""Who knows whom in one notebook: a session is opened with all that listens to it, and closed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshbook.actor.supervision import observe_unhandled
from meshbook.errors.advice import set_advice
from meshbook.mesh.driven import set_current_mesh, set_output_source, set_prompt_handler, set_start_display
from meshbook_extension.cells.call_output import CallOutput
from meshbook_extension.cells.hang_watch import HangWatch
from meshbook_extension.cells.prompt import CallPromptHandler
from meshbook_extension.cells.running import Jobs
from meshbook_extension.commands.sync import SentModules
from meshbook_extension.completion.completer import Completer
from meshbook_extension.completion.hooks import Hooks
from meshbook_extension.notebook.advice import NOTEBOOK_ADVICE, name_notebook_cells
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.time_limits import TimeLimits
from meshbook_extension.output.publisher import StartLine, served_cell
from meshbook_extension.reattach.auto_attach import AutoAttach
from meshbook_extension.reattach.notebook_state import StateWriter, notebook_key
from meshbook_extension.visual_debugger.target import Debugged

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from meshbook.mesh.proc_mesh import ProcMesh


def open_session(shell: InteractiveShell, earlier: Session | None) -> Session:
    """A session whose calls print into the cells of ``shell``.

    earlier: one that was closed, with whose meshes, slices and jobs it goes on; without, those that an earlier kernel
    of the notebook has left come back.
    """
    session = Session(shell, notebook_key(shell))
    if earlier is not None:
        session.meshes, session.slices, session.current = earlier.meshes, earlier.slices, earlier.current
        session.setups, session.returned, session.errors = earlier.setups, earlier.returned, earlier.errors
        for kept in (Jobs, AutoAttach, SentModules):
            session.add_part(earlier.part(kept))
        session.part(TimeLimits).go_on(earlier.part(TimeLimits), session.publisher)
    calls, state_writer = CallOutput(session), StateWriter(session)
    for part in (calls, state_writer, Debugged(session), Hooks(shell, Completer(session))):
        session.add_part(part)
    set_advice(NOTEBOOK_ADVICE, name_notebook_cells)
    set_output_source(calls.target)

    def give_procs(sizes: dict[str, int]) -> ProcMesh:
        from meshbook_extension.commands import meshes  # which the first command imports

        return meshes.give_procs(session, sizes)

    set_current_mesh(session.mesh, give_procs)
    set_prompt_handler(CallPromptHandler(session))
    set_start_display(StartLine(shell).show)
    observe_unhandled(session.errors.note_unhandled)
    for listener in (calls.finish, state_writer.save, session.note_error):
        shell.events.register("post_run_cell", listener)
    served_cell.watch(shell)
    session.on_change.append(state_writer.save)
    if earlier is None:
        auto_attach = AutoAttach(session)
        session.add_part(auto_attach)
        auto_attach.start()
    return session


def close_session(session: Session) -> None:
    """End what `open_session` has begun. The meshes run on, until they are stopped or the process ends."""
    observe_unhandled(None)
    set_advice(None)
    set_output_source(None)
    set_current_mesh(None)
    set_prompt_handler(None)
    set_start_display(None)
    session.part(Hooks).uninstall()
    session.part(Debugged).end()
    for listener in (session.part(CallOutput).finish, session.part(StateWriter).save, session.note_error):
        session.shell.events.unregister("post_run_cell", listener)
    served_cell.unwatch()
    session.part(HangWatch).close()
    session.publisher.stop()
