"""The places where a kernel, or a terminal's IPython, asks our completer before its own.

Methods of the instance are replaced, so that the stock ipykernel works as ours does, and `Hooks.uninstall` takes
everything away again. Where a version of ipykernel lacks an attribute, completion stays IPython's own.

ipykernel answers requests one after the other, so a Tab pressed while a cell runs would wait for its end. Requests
about code for ranks, and about our own lines, need nothing of the main thread: `BusyCompletion` takes them out of the
queue (`meshbook_extension.widget.busy_comms`) and answers at once. Front ends take any ``idle`` for the end of the
running cell, so its ``busy`` is said again afterwards.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from IPython.core.completer import Completion

from meshbook.calls.rank_state import Completions
from meshbook_extension.completion.completer import Completer, complete_reply, inspect_reply
from meshbook_extension.output.publisher import JupyterMessage, kernel_of, served_cell, session_of
from meshbook_extension.widget.busy_comms import BusyComms

if TYPE_CHECKING:
    from ipykernel.ipkernel import IPythonKernel
    from IPython.core.interactiveshell import InteractiveShell
    from zmq import Socket
    from zmq.eventloop.zmqstream import ZMQStream

Original: TypeAlias = Callable[..., object]
"""A method of the shell or the kernel."""


class Hooks:
    """The methods that are replaced on one shell."""

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
            self._busy = BusyCompletion(kernel, completer)

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
    """Return ipykernel's own answer, or await it."""
    return await reply if inspect.isawaitable(reply) else reply


def _as_completions(found: Completions) -> Iterator[Completion]:
    for text, kind, signature in found.items:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "provisional API"
            made = Completion(found.start, found.end, text, type=kind, signature=signature)
        yield made


_KINDS = {"complete_request": "complete_reply", "inspect_request": "inspect_reply"}


class BusyCompletion:
    """The answers of one kernel while a cell runs."""

    def __init__(self, kernel: IPythonKernel, completer: Completer) -> None:
        self._kernel, self._completer = kernel, completer
        self._answers: set[asyncio.Task[None]] = set()
        BusyComms.of(kernel).serve(_KINDS, self._take)

    def uninstall(self) -> None:
        """Leave all requests to the kernel."""
        BusyComms.of(self._kernel).serve(_KINDS, None)

    def _take(self, request: JupyterMessage, idents: list[bytes]) -> Callable[[], None] | None:
        """Return what answers ``request`` if a cell runs and it is about ours; else None."""
        content = request["content"]
        if not served_cell.parent or request["header"].get("subshell_id"):
            return None
        if not self._completer.is_ours(content["code"], content["cursor_pos"]):
            return None
        return lambda: self._answer(idents, request)

    def _answer(self, idents: list[bytes], request: JupyterMessage) -> None:
        if threading.current_thread() is threading.main_thread():  # ipykernel 6, in the wait loop of a magic
            stream = self._kernel.shell_stream
            self._send(idents, request, self._reply(request), stream and stream.socket)
        else:
            task = asyncio.get_running_loop().create_task(self._answer_aside(idents, request))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer_aside(self, idents: list[bytes], request: JupyterMessage) -> None:
        reply = await asyncio.to_thread(self._reply, request)
        self._send(idents, request, reply, self._kernel.shell_stream)

    def _reply(self, request: JupyterMessage) -> JupyterMessage:
        content = request["content"]
        code, cursor = content["code"], content["cursor_pos"]
        if request["msg_type"] == "inspect_request":
            return inspect_reply(self._completer.inspect(code, cursor, content.get("detail_level", 0)) or "")
        return complete_reply(self._completer.complete(code, cursor), cursor)

    def _send(
        self,
        idents: list[bytes],
        request: JupyterMessage,
        reply: JupyterMessage,
        stream: Socket[bytes] | ZMQStream | None,
    ) -> None:
        self._status("busy", request)
        session_of(self._kernel).send(stream, _KINDS[request["msg_type"]], reply, parent=request, ident=idents)
        self._status("idle", request)
        with served_cell.lock:
            if served_cell.parent:
                self._status("busy", served_cell.parent)

    def _status(self, state: str, parent: JupyterMessage) -> None:
        kernel = self._kernel
        session_of(kernel).send(
            kernel.iopub_socket, "status", {"execution_state": state}, parent=parent, ident=kernel._topic("status")
        )
