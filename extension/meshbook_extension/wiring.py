"""This module makes a notebook's session and magics, and connects the listeners to the session."""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import MAGIC_NO_VAR_EXPAND_ATTR

from meshbook.errors.advice import Advice, set_advice
from meshbook.mesh.driven import set_front_end
from meshbook_extension.cells.curves import OwnCurves, WatchedNames
from meshbook_extension.cells.hang_watch import CellHooks
from meshbook_extension.cells.names import NameErrors
from meshbook_extension.cells.prompt import CallOutput, CallPromptHandler
from meshbook_extension.cells.record import CellRecord
from meshbook_extension.cells.run import MESH_CELL, run_mesh_cell, tell_news
from meshbook_extension.cells.running import Jobs
from meshbook_extension.commands import dispatch, help_tables
from meshbook_extension.commands.checkpoints import save_due
from meshbook_extension.commands.packages import SentModules
from meshbook_extension.commands.spawn import give_procs
from meshbook_extension.completion.completer import Completer
from meshbook_extension.completion.hooks import Hooks
from meshbook_extension.notebook.error_log import name_notebook_cells
from meshbook_extension.notebook.saves import MeshSaves
from meshbook_extension.notebook.session import Session
from meshbook_extension.notebook.time_limits import TimeLimits
from meshbook_extension.output.publisher import ProgressLine, kernel_of, served_cell
from meshbook_extension.output.transcripts import Transcripts
from meshbook_extension.reattach.notebook_state import StateWriter, notebook_key
from meshbook_extension.reattach.restore import AutoAttach
from meshbook_extension.visual_debugger.target import Debugged
from meshbook_extension.widget.busy_comms import BusyComms
from meshbook_extension.widget.display import hang_notices
from meshbook_extension.widget.panel import Panels

RAW = ("eval",)
"""Commands whose line is taken as it stands; in others ``$x`` and ``{x}`` stand for variables of the notebook."""


class MeshMagics:
    """The magics of one session."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        self.shell = shell
        self.session = session

    def register(self) -> None:
        """Register the magics with the shell."""
        for kind, function in (("line", self.line), ("cell", self.cell)):
            self.shell.magics_manager.register_function(function, magic_kind=kind, magic_name="mesh")

    def line(self, line: str) -> object:
        if line.split(" ", 1)[0] not in RAW:
            line = self.shell.var_expand(line, depth=2)
        value = dispatch(self.session, line)
        return None if value is None or _is_statement(sys._getframe(2)) else value

    def cell(self, line: str, cell: str) -> None:
        run_mesh_cell(self.session, line, cell)


def _is_statement(frame: FrameType) -> bool:
    """Whether the line of a frame is a magic alone, whose value IPython would show below the command's own text."""
    if frame.f_code.co_filename.startswith("<timed "):  # %%time shows the value of an expression, and keeps no source
        following = (each.opname for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
        return next(following, "") == "RETURN_VALUE"
    try:
        (statement,) = ast.parse(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()).body
    except (SyntaxError, ValueError):
        return False
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and "magic" in call.func.attr


MeshMagics.line.__doc__ = "\n".join(map(str, help_tables()))
MeshMagics.cell.__doc__ = MESH_CELL.help()
setattr(MeshMagics.line, MAGIC_NO_VAR_EXPAND_ATTR, True)


NOTEBOOK_ADVICE = Advice(
    heal="%mesh heal",
    heal_call="%mesh heal, or procs.heal()",
    rebuild="%mesh heal (procs.rebuild_groups() in Python)",
    shrink="%mesh shrink",
    change="%mesh {verb} {sizes}",
    respawn="%mesh respawn rank={ranks}",
    insist="%mesh respawn rank={ranks} --force",
    spawn="%mesh spawn gpus=4",
    spawn_call="%mesh spawn gpus=4, or this_host().spawn_procs(...)",
    spawn_hosts="%mesh spawn hosts=3 gpus=4",
    grow_hosts="%mesh grow hosts=1 --on ENGINE",
    shared_network="spawn with --interface of a network that they share",
    no_groups="with --no-group",
    heal_elsewhere="%mesh heal --on ENGINE",
    stop="%mesh stop",
    detach="%mesh detach, or meshbook.detach()",
    whole="base(), or %mesh use",
    fresh_view="slice that; or: %mesh use NAME --out VAR",
    interrupt="%mesh interrupt",
    wait="%mesh wait",
    stacks="%mesh stacks",
    stacks_call="%mesh stacks; mesh.stacks() in Python",
    stacks_of="%mesh stacks rank={rank}",
    logs="%mesh logs rank={ranks}",
    prompt="%mesh pdb",
    postmortem="%mesh postmortem",
    free="%mesh free",
    pull="%mesh pull",
    pip="in a cell of its own, %mesh pip",
    ask="Ask in the notebook, and send the answer with: %mesh push NAME",
    cpu='--device cpu (device="cpu" in Python)',
    invite="%mesh spawn hosts=2 gpus=8 --on manual",
    within="--within 10m (within_s=600 in Python)",
)
"""The advice of errors in a notebook: magics, and Python too where a Python call may have raised the error."""


def open_session(shell: InteractiveShell, earlier: Session | None) -> Session:
    """Open a session whose calls print into the cells of ``shell``.

    earlier: a closed one, whose meshes, slices and jobs it takes over; without it those of an earlier kernel of the
    notebook come back.
    """
    session = Session(shell, notebook_key(shell))
    closing = session.closing
    closing.callback(session.publisher.stop)
    if earlier is not None:
        session.go_on(earlier)
        for kept in (Jobs, AutoAttach, MeshSaves, SentModules, Transcripts, WatchedNames):
            session.add_part(earlier.part(kept))
        session.part(TimeLimits).go_on(earlier.part(TimeLimits), session.publisher)
    record = session.add_part(CellRecord(session) if earlier is None else earlier.part(CellRecord).go_on(session))
    calls = session.add_part(CallOutput(session))
    state_writer = session.add_part(StateWriter(session))
    curves = session.add_part(OwnCurves(shell, session.part(WatchedNames), session.publisher))
    closing.callback(curves.end)
    closing.callback(NameErrors(session).end)
    debugged = session.add_part(Debugged(session))
    closing.callback(debugged.end)
    session.add_part(CellHooks(hang_notices, debugged.name_cell))
    closing.callback(Hooks(shell, Completer(session)).uninstall)

    set_advice(NOTEBOOK_ADVICE, name_notebook_cells)
    closing.callback(set_advice, None)
    set_front_end(
        output_source=calls.target,
        prompt_handler=CallPromptHandler(session),
        current=session.mesh,
        of_sizes=partial(give_procs, session),
        show_progress=ProgressLine(shell).show,
        note_unhandled=session.errors.note_unhandled,
    )
    closing.callback(set_front_end)
    served_cell.begin(shell)
    before: list[Callable[..., object]] = [
        curves.begin_cell,
        lambda _info: served_cell.begin(shell),
        partial(tell_news, session),
    ]
    after: list[Callable[..., object]] = [
        calls.finish,
        curves.end_cell,
        record.note,
        partial(save_due, session),
        state_writer.save,
        session.note_error,
        served_cell.end,
    ]
    if (kernel := kernel_of(shell)) is not None:
        panels = session.add_part(Panels(session, kernel))
        closing.callback(panels.end)
        before.append(BusyComms.of(kernel).install)
        after.append(panels.tell)
    for event, listeners in (("pre_run_cell", before), ("post_run_cell", after)):
        for listener in listeners:
            shell.events.register(event, listener)
            closing.callback(shell.events.unregister, event, listener)
    session.on_change.append(state_writer.save)
    session.on_forget.append(session.part(MeshSaves).forget)
    if earlier is None:
        session.add_part(AutoAttach(session)).start()
    return session
