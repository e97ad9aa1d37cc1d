"""Have a kernel, or a terminal's IPython, ask the completer first and IPython itself where it has no answer.

Methods of the instance are replaced, so that the stock ipykernel works as ours does, and `uninstall` takes everything
away again. Attributes are looked for before: where one is missing, completion stays IPython's own.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from meshbook_extension.completion.completer import Completer, Found, complete_reply, inspect_reply
from meshbook_extension.completion.while_busy import BusyCompletion
from meshbook_extension.output.publisher import kernel_of

if TYPE_CHECKING:
    from IPython.core.completer import Completion
    from IPython.core.interactiveshell import InteractiveShell


Original: TypeAlias = Callable[..., object]
"""A method of the shell or the kernel."""


class Hooks:
    """The methods that were replaced on one shell."""

    def __init__(self, shell: InteractiveShell, completer: Completer) -> None:
        self._completer = completer
        self._replaced: list[tuple[object, str]] = []
        self._busy: BusyCompletion | None = None
        kernel = kernel_of(shell)
        if kernel is None:
            self._replace(shell.Completer, "completions", self._in_terminal)
        else:
            self._replace(kernel, "do_complete", self._complete)
            self._replace(kernel, "do_inspect", self._inspect)
            self._busy = BusyCompletion(shell, kernel, completer)

    def uninstall(self) -> None:
        """Put the shell's own methods back."""
        if self._busy is not None:
            self._busy.uninstall()
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()

    def _replace(self, owner: object, name: str, make: Callable[[Original], Original]) -> None:
        original = getattr(owner, name, None)
        if original is not None and name not in vars(owner):
            setattr(owner, name, make(original))
            self._replaced.append((owner, name))

    def _complete(self, original: Original) -> Original:
        async def do_complete(code: str, cursor_pos: int | None) -> object:
            cursor = len(code) if cursor_pos is None else cursor_pos
            found = await asyncio.to_thread(self._completer.complete, code, cursor)
            return await _own(original(code, cursor_pos)) if found is None else complete_reply(found, cursor)

        return do_complete

    def _inspect(self, original: Original) -> Original:
        async def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *others: object) -> object:
            text = await asyncio.to_thread(self._completer.inspect, code, cursor_pos, detail_level)
            if text is None:
                return await _own(original(code, cursor_pos, detail_level, *others))
            return inspect_reply(text)

        return do_inspect

    def _in_terminal(self, original: Original) -> Original:
        def completions(text: str, offset: int) -> object:
            found = self._completer.complete(text, offset)
            return original(text, offset) if found is None else _as_completions(found)

        return completions


async def _own(reply: object) -> object:
    """ipykernel's own answer: it, or an awaitable of it."""
    return await reply if inspect.isawaitable(reply) else reply


def _as_completions(found: Found) -> Iterator[Completion]:
    from IPython.core.completer import Completion

    for match in found.matches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "provisional API"
            made = Completion(found.start, found.end, match.text, type=match.kind, signature=match.signature)
        yield made
