"""JupyterLab's debugger panel on a rank: this module answers for a rank as ipykernel's Debugger answers for itself.

All of it runs on the loop of ipykernel's control thread; messages of the rank come on the tunnel's thread.

The panel names a cell by the file that ipykernel would give its whole text, magic line included. A rank compiles it
under a short name made of the same hash: breakpoints can be set before the cell has run, and again for the same text.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

from meshbook.errors import DebugError, MeshError
from meshbook.mesh.dap import DebugTunnel, Message, answer
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask

_ON_RANK = re.compile(r"<cell @(\w+)>")


def panel_path(text: str) -> str:
    """Return the file that stands for a cell in the panel."""
    from ipykernel.compiler import get_file_name

    return str(get_file_name(text))


def rank_name(text: str) -> str:
    """Return the file name of the same cell on a rank."""
    return f"<cell @{Path(panel_path(text)).stem}>"


def panel_folder() -> str:
    """Return the folder of the panel's files."""
    from ipykernel.compiler import get_tmp_directory

    return str(get_tmp_directory())


def to_rank(message: Message) -> Message:
    """Return the message with the rank's names for cells."""
    folder = panel_folder() + os.sep

    def rename(path: str) -> str:
        return f"<cell @{Path(path).stem}>" if path.startswith(folder) else path

    return cast("Message", _with_paths(message, rename))


def to_panel(message: Message) -> Message:
    """Return the message with the panel's names for cells."""
    folder = panel_folder()

    def rename(path: str) -> str:
        return _ON_RANK.sub(lambda found: f"{folder}{os.sep}{found[1]}.py", path)

    return cast("Message", _with_paths(message, rename))


def _with_paths(value: object, rename: Callable[[str], str]) -> object:
    if isinstance(value, dict):
        return {
            key: rename(each) if key == "path" and isinstance(each, str) else _with_paths(each, rename)
            for key, each in value.items()
        }
    return [_with_paths(each, rename) for each in value] if isinstance(value, list) else value


ANSWER_TIMEOUT_S = 60.0
NAMES_TIMEOUT_S = 2.0
HASH_SEED = 0xC70F6907
"""The seed with which ipykernel and the front end hash a cell's text."""

_HIDDEN = {"exit", "quit", "open", "In", "Out", "get_ipython", "special variables", "function variables"}


class RankPanel:
    """The panel's debugger for one rank, started from ``initialize`` to ``disconnect`` or the rank's end."""

    def __init__(self, rank: ProcMesh, publish: Callable[[Message], None]) -> None:
        """publish: sends an event to the front end, on the control thread."""
        self._rank, self._publish = rank, publish
        self._tunnel: DebugTunnel | None = None
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._breakpoints: dict[str, list[Message]] = {}
        self._references: dict[str, int] = {}
        """The numbers under which the rank gives the text of files that only it has."""
        self._requests: dict[str, Message] = {}
        """The requests that set the session up, in order: for `go_on_from`."""
        self._is_moving = False
        self._stopped: list[int] = []
        self._initialized = asyncio.Event()
        self._sender = ThreadPoolExecutor(1, "meshbook.panel")
        self._handlers: dict[str, Callable[[Message], Awaitable[Message]]] = {
            "initialize": self._initialize,
            "attach": self._attach,
            "configurationDone": self._accept,
            "dumpCell": self._dump_cell,
            "setBreakpoints": self._set_breakpoints,
            "source": self._source,
            "stackTrace": self._stack_trace,
            "variables": self._variables,
            "debugInfo": self._debug_info,
            "inspectVariables": self._inspect,
            "richInspectVariables": self._inspect_richly,
            "copyToGlobals": self._copy_to_globals,
            "disconnect": self._disconnect,
        }

    @property
    def is_started(self) -> bool:
        """Whether the rank is under the panel's debugger."""
        return self._tunnel is not None and not self._tunnel.ended

    async def process_request(self, message: Message) -> Message:
        """Answer one request of the panel; a failure is an answer too."""
        self._loop = asyncio.get_running_loop()
        if message["command"] in ("initialize", "attach"):
            self._requests[message["command"]] = message
        handler = self._handlers.get(message["command"], self._forward)
        try:
            return await handler(message)
        except (DebugError, MeshError) as error:
            return answer(message, failure=str(error))

    def go_on_from(self, other: RankPanel, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Bring the session that the panel has on another rank here, with its breakpoints. On the main thread.

        Raises: DebugError; the panel is off then.
        """
        requests, other._is_moving = tuple(other._requests.values()), True
        other.close()
        moving = asyncio.run_coroutine_threadsafe(self._repeat(requests), other._loop)
        try:
            moving.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise DebugError(self._rank.ranks[0], "the panel could not be brought there in time") from None
        finally:
            moving.cancel()

    async def _repeat(self, requests: Sequence[Message]) -> None:
        for request in requests:
            response = await self.process_request(request)
            if not response.get("success"):
                raise DebugError(self._rank.ranks[0], response.get("message", "no reason given"))

    def close(self) -> None:
        """End the session, on any thread; the rank goes on."""
        tunnel = self._tunnel
        if tunnel is not None:
            tunnel.close()
            tunnel.join(5)
        self._sender.shutdown(wait=False)  # what is queued there ends at once

    # ---- to the rank and back -----------------------------------------------------------------------------------

    async def _forward(self, message: Message) -> Message:
        """Return the rank's answer to a request. Raises: DebugError."""
        tunnel = self._tunnel
        if tunnel is None or tunnel.ended:
            why = tunnel.ended if tunnel is not None else "the panel is not attached"
            raise DebugError(self._rank.ranks[0], f"{why}; turn the panel off and on again")
        number = next(self._numbers)
        self._pending[number] = future = self._loop.create_future()
        try:
            await self._loop.run_in_executor(self._sender, tunnel.send, to_rank({**message, "seq": number}))
            response = await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise DebugError(self._rank.ranks[0], f"no answer to {message['command']}") from None
        finally:
            self._pending.pop(number, None)
        return {**response, "request_seq": message["seq"]}

    def _on_message(self, message: Message) -> None:
        """Handle a message of the rank, on the tunnel's thread."""
        self._loop.call_soon_threadsafe(self._take, to_panel(message))

    def _on_end(self, reason: str) -> None:
        """Handle the end of the rank, of its mesh, or of our turn at it, on the tunnel's thread."""
        self._loop.call_soon_threadsafe(self._take_end, reason)

    def _take(self, message: Message) -> None:
        if message.get("type") == "response":
            future = self._pending.get(message.get("request_seq", 0))
            if future is not None and not future.done():
                future.set_result(message)
            return
        event, body = message.get("event"), message.get("body") or {}
        if event == "initialized":
            self._initialized.set()
        elif event == "stopped":
            self._stopped = [body.get("threadId", 1)]
        elif event == "continued":
            self._stopped = []
        if event != "output":  # what a rank prints is in its cell already
            self._publish(message)

    def _take_end(self, reason: str) -> None:
        error = DebugError(self._rank.ranks[0], reason)
        self._initialized.set()  # who waits for that finds the session ended
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        if self._stopped:
            self._stopped = []
            self._publish(_event("continued", {"threadId": 1, "allThreadsContinued": True}))
        if not self._is_moving:
            self._publish(_event("terminated", {}))

    # ---- requests -----------------------------------------------------------------------------------------------

    async def _initialize(self, message: Message) -> Message:
        if not self.is_started:
            self._initialized.clear()
            self._requests, self._breakpoints, self._stopped = {"initialize": message}, {}, []
            open_tunnel = lambda: DebugTunnel(self._rank, self._on_message, self._on_end)  # noqa: E731
            self._tunnel = await self._loop.run_in_executor(self._sender, open_tunnel)
            Path(panel_folder()).mkdir(mode=0o700, parents=True, exist_ok=True)
        return await self._forward(message)

    async def _attach(self, message: Message) -> Message:
        hidden = self._tunnel.hidden if self._tunnel is not None else ()
        rules = [{"path": folder, "include": False} for folder in hidden]
        arguments = {**(message.get("arguments") or {}), "justMyCode": False, "rules": rules}
        response = await self._forward({**message, "arguments": arguments})
        try:
            await asyncio.wait_for(self._initialized.wait(), ANSWER_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise DebugError(self._rank.ranks[0], "its debugger did not get ready") from None
        await self._forward(_request("configurationDone"))
        return response

    async def _accept(self, message: Message) -> Message:
        return answer(message)  # `_attach` has done it

    async def _dump_cell(self, message: Message) -> Message:
        path = panel_path(message["arguments"]["code"])
        Path(path).write_text(message["arguments"]["code"], encoding="utf-8")
        return answer(message, {"sourcePath": path})

    async def _set_breakpoints(self, message: Message) -> Message:
        path = message["arguments"]["source"]["path"]
        self._requests[path] = message
        response = await self._forward(message)
        if response["success"]:
            self._breakpoints[path] = [
                {"line": one["line"]} for one in response["body"]["breakpoints"] if "line" in one
            ]
        return response

    async def _source(self, message: Message) -> Message:
        path = message["arguments"]["source"]["path"]
        if (reference := self._references.get(path)) is not None:
            arguments = {"sourceReference": reference, "source": {"path": path, "sourceReference": reference}}
            return await self._forward({**message, "arguments": arguments})
        if not Path(path).is_file():
            return answer(message, failure="source unavailable")
        return answer(message, {"content": Path(path).read_text(encoding="utf-8", errors="replace")})

    async def _stack_trace(self, message: Message) -> Message:
        response = await self._forward(message)
        for frame in (response.get("body") or {}).get("stackFrames", ()):
            source = frame.get("source") or {}
            if Path(source.get("path", "")).is_file():
                source["sourceReference"] = 0
            elif source.get("sourceReference"):
                self._references[source["path"]] = source["sourceReference"]
        return response

    async def _variables(self, message: Message) -> Message:
        if not self._stopped:
            return await self._inspect(message)
        response = await self._forward(message)
        if response["success"]:
            found = response["body"]["variables"]
            response["body"]["variables"] = [one for one in found if one["name"] not in _HIDDEN]
        return response

    async def _debug_info(self, message: Message) -> Message:
        breakpoints = [{"source": path, "breakpoints": lines} for path, lines in self._breakpoints.items() if lines]
        return answer(
            message,
            {
                "isStarted": self.is_started,
                "hashMethod": "Murmur2",
                "hashSeed": HASH_SEED,
                "tmpFilePrefix": panel_folder() + os.sep,
                "tmpFileSuffix": ".py",
                "breakpoints": breakpoints,
                "stoppedThreads": self._stopped,
                "richRendering": True,
                "exceptionPaths": ["Python Exceptions"],
                "copyToGlobals": True,
            },
        )

    async def _inspect(self, message: Message) -> Message:
        """Return the rank's variables in short: the panel asks after each cell."""
        variables = [
            {"name": name, "type": type_name, "value": text, "evaluateName": name, "variablesReference": 0}
            for name, type_name, text in await self._names()
            if name not in _HIDDEN
        ]
        return answer(message, {"variables": variables})

    async def _inspect_richly(self, message: Message) -> Message:
        name, frame = message["arguments"]["variableName"], message["arguments"].get("frameId")
        if not name.isidentifier():
            return answer(message, {"data": {}, "metadata": {}})
        if self._stopped and frame is not None:
            arguments = {"expression": name, "frameId": frame, "context": "clipboard"}
            response = await self._forward(_request("evaluate", arguments))
            text = response["body"].get("result", "") if response["success"] else response.get("message", "")
        else:
            text = next((text for each, _, text in await self._names() if each == name), "")
        return answer(message, {"data": {"text/plain": text}, "metadata": {}})

    async def _copy_to_globals(self, message: Message) -> Message:
        arguments = message["arguments"]
        source, target = arguments["srcVariableName"], arguments["dstVariableName"]
        if not (source.isidentifier() and target.isidentifier()):
            return answer(message, failure="both names must be those of variables")
        setting = {"expression": f"globals()['{target}']", "value": source, "frameId": arguments["srcFrameId"]}
        return {**await self._forward(_request("setExpression", setting)), "command": message["command"]}

    async def _disconnect(self, message: Message) -> Message:
        with contextlib.suppress(DebugError):  # it has ended by itself
            await self._forward({**message, "arguments": {"terminateDebuggee": False}})
        if (tunnel := self._tunnel) is not None:
            tunnel.close()
            await self._loop.run_in_executor(self._sender, tunnel.join, 5)  # its end is told before the next session
        self._breakpoints, self._stopped = {}, []
        return answer(message)

    async def _names(self) -> list[tuple[str, str, str]]:
        kind = list[tuple[str, str, str]]
        ask_names = partial(ask, self._rank, kind, "debug_names", timeout_s=NAMES_TIMEOUT_S)
        found = await self._loop.run_in_executor(self._sender, ask_names)
        return [each for names in found.values() for each in names]


def _request(command: str, arguments: Message | None = None) -> Message:
    return {"type": "request", "seq": 0, "command": command, "arguments": arguments or {}}


def _event(name: str, body: Message) -> Message:
    return {"type": "event", "seq": 0, "event": name, "body": body}
