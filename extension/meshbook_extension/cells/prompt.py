"""The output of calls that the notebook's code makes itself, and the prompt of stopped ranks, in the running cell."""

from __future__ import annotations

import contextlib
import getpass
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from meshbook.calls.output import DisplayData, OutputEvent, OutputTarget, StreamText
from meshbook.formatting import name_ranks
from meshbook.mesh import states
from meshbook.mesh.proc_view import new_output_id
from meshbook.mesh.prompt import DebugPrompt
from meshbook_extension.cells.output import CellOutput, open_output
from meshbook_extension.notebook.targets import choose
from meshbook_extension.notebook.waiting import run_tasks
from meshbook_extension.output.publisher import kernel_of, parent_of, session_of

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel
    from IPython.core.interactiveshell import InteractiveShell

    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook_extension.cells.running import RunningCell
    from meshbook_extension.notebook.session import Session

_NEVER_DONE = frozenset({-1})
"""Calls come and go within a cell, so no set of ranks tells that all is said."""


class CallOutput:
    """The output of calls that the running cell makes; one target per cell and mesh."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._diverted: OutputTarget | None = None
        self._key: object = None
        self._of_mesh: dict[int, tuple[OutputTarget, CellOutput]] = {}
        """The outputs of the running cell by the mesh's id, each with the target that leads to it."""

    def finish(self, *_: object) -> None:
        """Show the text that the ending cell's calls have printed, before the cell is done."""
        outputs, self._of_mesh = self._of_mesh, {}
        for _target, output in outputs.values():
            with contextlib.suppress(KeyboardInterrupt):  # the cell has ended, and what is left was counted
                output.finish()

    def target(self, procs: ProcMesh) -> OutputTarget | None:
        """Return the target for the prints of a call that is made now; None outside the thread of cells."""
        if threading.current_thread() is not threading.main_thread():
            return None
        return self._diverted or self._here(procs)[0]

    @contextlib.contextmanager
    def diverted(self, target: OutputTarget) -> Iterator[None]:
        """Send the prints of calls that the thread of cells makes in the block to ``target``."""
        self._diverted = target
        try:
            yield
        finally:
            self._diverted = None

    def output(self, procs: ProcMesh) -> CellOutput:
        """Return the output of ``procs`` in the running cell, on the thread of cells."""
        return self._here(procs)[1]

    def _here(self, procs: ProcMesh) -> tuple[OutputTarget, CellOutput]:
        shell = self._session.shell
        key = parent_of(shell).get("header", {}).get("msg_id", shell.execution_count)
        if key != self._key:
            self.finish()
            self._key = key
        for id, (_target, output) in self._of_mesh.items():
            if id != procs.id and output.has_unshown:
                output.drain()  # what was printed there comes before what this call prints here
        if procs.id not in self._of_mesh:
            made = open_output(self._session, procs.base(), ranks=_NEVER_DONE)

            def receive(event: OutputEvent) -> None:
                if not (isinstance(event, DisplayData) and event.is_result):  # the call returns it
                    made.receive(event)

            self._of_mesh[procs.id] = OutputTarget(new_output_id(procs), receive), made
        return self._of_mesh[procs.id]


POLL_S = 0.05
"""The time between two looks of a prompt whether its rank is still there."""


def who_stays(procs: ProcMesh) -> str:
    """Describe the ranks that stay stopped when the person leaves their prompt."""
    stopped = states.stopped_ranks(procs).of(procs.ranks)
    stay = "stays" if len(stopped) == 1 else "stay"
    return f"{name_ranks(stopped)} {stay} stopped; %mesh pdb opens the prompt again"


class CellLeft(Exception):
    """The person left the prompt of a cell, and its ranks stay stopped."""


class NotebookTerminal:
    """A terminal that shows in the output of a cell and reads in the running cell."""

    def __init__(self, shell: InteractiveShell, output: CellOutput) -> None:
        self._shell, self._output = shell, output

    def show(self, texts: Mapping[int, str]) -> None:
        """Show each text under its rank."""
        for rank, text in texts.items():
            self._output.receive(StreamText(rank, "stdout", text, 0))
        self._output.drain()

    def say(self, text: str) -> None:
        """Show words of the prompt itself."""
        self._output.note(text, "stdout")
        self._output.drain()

    def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str | None:
        """Read a line; None if it was given up."""
        self._output.drain()
        kernel = kernel_of(self._shell)
        if kernel is None:
            return getpass.getpass(prompt) if hidden else input(prompt)
        if not hasattr(kernel, "stdin_socket") or "shell" not in getattr(kernel, "_parent_ident", ()):
            return str(kernel.getpass(prompt) if hidden else kernel.raw_input(prompt))
        return _read_line(kernel, prompt, is_open, hidden)


def _read_line(kernel: IPythonKernel, prompt: str, is_open: Callable[[], bool], hidden: bool) -> str | None:
    """Read a line as ipykernel's ``_input_request`` does, but give up once ``is_open()`` is false. Main thread only."""
    import zmq

    sys.stdout.flush()
    sys.stderr.flush()
    socket, session = kernel.stdin_socket, session_of(kernel)
    while socket.poll(0):
        socket.recv_multipart(zmq.NOBLOCK)  # answers to a prompt that was given up
    content = {"prompt": prompt, "password": hidden}
    session.send(socket, "input_request", content, kernel.get_parent("shell"), ident=kernel._parent_ident["shell"])
    while is_open():
        run_tasks()
        if socket.poll(POLL_S * 1000):
            _ident, reply = session.recv(socket)
            if reply is not None:
                value = str(reply["content"].get("value", ""))
                if value == "\x04":
                    raise EOFError
                return value
    return None


def why_no_prompt(shell: InteractiveShell) -> str:
    """Return the reason why no person can answer a prompt in the running cell; empty where one can."""
    if kernel_of(shell) is None:
        return "" if sys.stdin is not None and sys.stdin.isatty() else "this program has no terminal to type at"
    if (parent_of(shell).get("content") or {}).get("allow_stdin", True):
        return ""
    return "this notebook runs without a person at it (nbclient, papermill), so nobody could type at its prompt"


class CellPrompt:
    """The pdb prompt of a cell, open while the notebook waits for the cell."""

    def __init__(self, session: Session, cell: RunningCell) -> None:
        self._cell = cell
        self._prompt = DebugPrompt(cell.procs, NotebookTerminal(session.shell, cell.output), choose)
        cell.output.stops_where = ""

    @property
    def is_wanted(self) -> bool:
        """Whether ranks of the cell are stopped, and this thread may ask the person."""
        return self._prompt.wanted and threading.current_thread() is threading.main_thread()

    def open(self) -> None:
        """Have the person type while ranks of the cell are stopped. Raises: KeyboardInterrupt, CellLeft."""
        if self._prompt.attend(self._cell.run.future.done):
            self._cell.output.stops_where = "; look: %mesh pdb"
            self._cell.output.note(who_stays(self._cell.procs))
            raise CellLeft


class CallPromptHandler:
    """The handler that opens the prompt where a cell waits for a call: ``procs.execute(train).get()``."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def refusal(self) -> str:
        """Return the reason why no person can answer a prompt; empty where one can."""
        return why_no_prompt(self._session.shell)

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        """Have the person type in the cell that waits for the call; returns whether ranks are left stopped."""
        output = self._session.part(CallOutput).output(procs)
        return DebugPrompt(procs, NotebookTerminal(self._session.shell, output), choose).attend(is_over)
