"""JupyterLab's debugger panel as the kernel sees it: debug_request on the control channel, debug_event on iopub."""

from __future__ import annotations

import time
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

TIMEOUT_S = 90.0


class Panel:
    """Sends the panel's requests over a client whose channels run."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self.output = ""
        self._idle: set[str] = set()

    def ask(self, command: str, *, fails: bool = False, **arguments: Any) -> dict[str, Any]:
        """The response to one request."""
        self._number += 1
        request = {"type": "request", "seq": self._number, "command": command, "arguments": arguments}
        message = self._client.session.msg("debug_request", request)
        self._client.control_channel.send(message)
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            reply = self._client.get_control_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                content = dict(reply["content"])
                assert content.get("success", True) is not fails, content
                return content

    def attach(self) -> None:
        """What the panel does when its bug button is pressed."""
        self.ask("debugInfo")
        self.ask("initialize", clientID="jupyterlab", adapterID="", linesStartAt1=True, pathFormat="path")
        self.ask("attach")

    def set_breakpoint(self, cell: str, line: int) -> str:
        """A breakpoint in a cell; returns the cell's file."""
        path = str(self.ask("dumpCell", code=cell)["body"]["sourcePath"])
        found = self.ask("setBreakpoints", breakpoints=[{"line": line}], source={"path": path}, sourceModified=False)
        assert found["body"]["breakpoints"][0]["verified"], found
        assert found["body"]["breakpoints"][0]["source"]["path"] == path
        self.ask("configurationDone")
        return path

    def event(self, name: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The body of the next event of that name."""
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if event["event"] == name:
                    self.events.remove(event)
                    return dict(event.get("body") or {})
            assert time.monotonic() < deadline, (self.events, self.output)
            self.read_iopub(0.2)

    def read_iopub(self, timeout_s: float) -> None:
        """Take what has come."""
        if self._client.iopub_channel.socket.poll(timeout_s * 1000):
            message = self._client.iopub_channel.get_msg(timeout=1)
            if message["msg_type"] == "debug_event":
                self.events.append(message["content"])
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                self._idle.add(message["parent_header"].get("msg_id"))
            elif message["msg_type"] == "stream":
                self.output += message["content"]["text"]
            elif message["msg_type"] == "error":
                self.output += "\n".join(message["content"]["traceback"])

    def run(self, cell: str) -> str:
        """Start a cell; returns its request."""
        return str(self._client.execute(cell, allow_stdin=False, stop_on_error=False))

    def reply(self, request: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """How the cell ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == request:
                while request not in self._idle:
                    assert time.monotonic() < deadline, self.output
                    self.read_iopub(0.2)
                return dict(reply["content"])

    def do(self, cell: str) -> str:
        """Run a cell that must succeed; returns all text since the last call."""
        reply = self.reply(self.run(cell))
        assert reply["status"] == "ok", (reply, self.output)
        text, self.output = self.output, ""
        return text
