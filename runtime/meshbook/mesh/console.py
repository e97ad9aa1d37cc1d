"""What the person sees and answers in a script: lines about a mesh, and the prompts of ranks that stop in a call."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from meshbook.calls.call import OpenCall
from meshbook.concurrency import forks
from meshbook.controller.controller import Controller, OutputSource
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import LeftStopped, UsageError
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.prompt import DebugPrompt


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, ours or any other of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def tell_person(line: str) -> None:
    """Print a line about the mesh: to stdout in a notebook, where it is part of the cell, to stderr in a script."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that has gone, or a closed file, fails no repair
        print(line, file=sys.stdout if is_notebook() else sys.stderr, flush=True)


class PromptHandler(Protocol):
    """Who answers prompts; set by `meshbook.mesh.set_prompt_handler`."""

    def refusal(self) -> str:
        """Why a rank could find nobody at its prompt if it stopped in a call that is made here and now; or nothing."""

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        """On the main thread, which waits for a call: have the person type until none of ``procs`` is stopped.

        Returns: whether the person has left ranks stopped. Raises: KeyboardInterrupt.
        """


class ConsoleTerminal:
    """stdin and stdout of a script, as `meshbook.mesh.prompt.Terminal` has them."""

    def show(self, texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            self.say("\n".join(f"[{rank}] {line}" for line in text.splitlines()))

    def say(self, text: str) -> None:
        print(text)

    def read(self, prompt: str, is_open: Callable[[], bool]) -> str | None:
        return input(prompt)


class ConsolePromptHandler:
    """The `PromptHandler` of scripts that run in a terminal."""

    def refusal(self) -> str:
        if threading.get_ident() != forks.main_thread:
            return "the call was not made by the main thread, which could ask at the terminal"
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        return "" if has_terminal else "the program that made the call has no terminal"

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        return DebugPrompt(procs, ConsoleTerminal()).attend(is_over)


def _no_current_mesh() -> ProcMesh:
    raise UsageError("a notebook has a current mesh, this process has none: give the mesh, as in distribute(x, mesh)")


class ProcessFrontEnd:
    """The front end of this process: the terminal, until a notebook extension puts itself in its place.

    output_source: called with the ProcMesh on the caller's thread; returns an OutputTarget, or None for our stdout.
    current: returns the mesh that a notebook calls current. of_sizes: see `meshbook.mesh.driven.set_current_mesh`.
    """

    def __init__(self) -> None:
        self.output_source: OutputSource | None = None
        self.have_prompts_answered(ConsolePromptHandler())
        self.current: Callable[[], ProcMesh] = _no_current_mesh
        self.of_sizes: Callable[[dict[str, int]], ProcMesh] | None = None
        self.show_start: Callable[[str], object] = _show_nothing

    def have_prompts_answered(self, by: PromptHandler) -> None:
        """Have ``by`` answer ranks that stop at breakpoints."""
        self._prompt_handler, self.refusal = by, by.refusal

    def attend(self, controller: Controller, mesh: MeshState, call: OpenCall) -> None:
        procs = ProcMesh(controller, mesh, call.members)
        if self._prompt_handler.attend(procs, lambda: call.is_told):
            raise LeftStopped(call.what, mesh.stopped_ranks.of(procs.ranks))


def _show_nothing(text: str) -> None:
    """A script has lines of its own on its terminal."""
