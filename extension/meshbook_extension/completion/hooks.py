"""Have a kernel, or a terminal's IPython, ask the completer first and IPython itself where it has no answer.

Methods of the instance are replaced, so that the stock ipykernel works as ours does, and `uninstall` takes everything
away again. Attributes are looked for before: where one is missing, completion stays IPython's own.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from meshbook_extension.completion.completer import Completer, Found, complete_reply, inspect_reply
from meshbook_extension.completion.while_busy import BusyCompletion


class Hooks:
    """The methods that were replaced on one shell."""

    def __init__(self, shell: Any, completer: Completer) -> None:
        self._completer = completer
        self._replaced: list[tuple[Any, str]] = []
        self._busy: BusyCompletion | None = None
        kernel = getattr(shell, "kernel", None)
        if kernel is None:
            self._replace(shell.Completer, "completions", self._in_terminal)
        else:
            self._replace(kernel, "do_complete", self._complete)
            self._replace(kernel, "do_inspect", self._inspect)
            self._busy = BusyCompletion(shell, completer)

    def uninstall(self) -> None:
        """Put the shell's own methods back."""
        if self._busy is not None:
            self._busy.uninstall()
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None and name not in vars(owner):
            setattr(owner, name, make(original))
            self._replaced.append((owner, name))

    def _complete(self, original: Any) -> Any:
        async def do_complete(code: str, cursor_pos: int | None) -> Any:
            cursor = len(code) if cursor_pos is None else cursor_pos
            found = await asyncio.to_thread(self._completer.complete, code, cursor)
            return await _own(original(code, cursor_pos)) if found is None else complete_reply(found, cursor)

        return do_complete

    def _inspect(self, original: Any) -> Any:
        async def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
            text = await asyncio.to_thread(self._completer.inspect, code, cursor_pos, detail_level)
            if text is None:
                return await _own(original(code, cursor_pos, detail_level, *args, **options))
            return inspect_reply(text)

        return do_inspect

    def _in_terminal(self, original: Any) -> Any:
        def completions(text: str, offset: int) -> Iterator[Any]:
            found = self._completer.complete(text, offset)
            return original(text, offset) if found is None else _as_completions(found)

        return completions


async def _own(reply: Any) -> Any:
    """ipykernel's own answer: it, or an awaitable of it."""
    return await reply if inspect.isawaitable(reply) else reply


def _as_completions(found: Found) -> Iterator[Any]:
    from IPython.core.completer import Completion

    for match in found.matches:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "provisional API"
            made = Completion(found.start, found.end, match.text, type=match.kind, signature=match.signature)
        yield made
