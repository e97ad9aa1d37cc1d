"""Who answers the prompts of ranks that stop in a call: a notebook's cell, or the terminal of a script."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from meshbook.debug.prompt import DebugPrompt

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import ProcMesh


class PromptHandler(Protocol):
    """Set by `meshbook.mesh.set_attendant`."""

    def refusal(self) -> str:
        """Why a rank could find nobody at its prompt if it stopped in a call that is made here and now; or nothing."""

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        """On the main thread, which waits for a call: have the person type until none of ``procs`` is stopped.

        Returns: whether the person has left ranks stopped. Raises: KeyboardInterrupt.
        """


class ConsoleTerminal:
    """stdin and stdout of a script."""

    def show(self, texts: Mapping[int, str]) -> None:
        """See `meshbook.debug.prompt.Terminal`."""
        for rank, text in texts.items():
            print("\n".join(f"[{rank}] {line}" for line in text.splitlines()))

    def say(self, text: str) -> None:
        """See `meshbook.debug.prompt.Terminal`."""
        print(text)

    def read(self, prompt: str, is_open: Callable[[], bool]) -> str | None:
        """See `meshbook.debug.prompt.Terminal`."""
        return input(prompt)


class ConsolePromptHandler:
    """For scripts that run in a terminal."""

    def refusal(self) -> str:
        """See `PromptHandler`."""
        if threading.current_thread() is not threading.main_thread():
            return "the call was not made by the main thread, which could ask at the terminal"
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        return "" if has_terminal else "the program that made the call has no terminal"

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        """See `PromptHandler`."""
        return DebugPrompt(procs, ConsoleTerminal()).attend(is_over)
