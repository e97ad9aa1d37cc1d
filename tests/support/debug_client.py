"""A client of the Debug Adapter Protocol over a socket, as an editor is one."""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

from meshbook.mesh.dap import Message, MessageReader, pack

TIMEOUT_S = 60.0


class DebugClient:
    """Speaks to a debugger at a loopback port."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._reader = MessageReader()
        self._numbers = itertools.count(1)
        self.messages: list[Message] = []

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; returns its number."""
        number = next(self._numbers)
        self._sock.sendall(pack({"type": "request", "seq": number, "command": command, "arguments": arguments}))
        return number

    def ask(self, command: str, **arguments: Any) -> Message:
        """Send a request and return its response, which must be a success."""
        number = self.send(command, **arguments)
        response = self.wait_for(lambda message: message.get("request_seq") == number)
        assert response["success"], response
        return response

    def event(self, name: str) -> Message:
        """The next event of that name."""
        return self.wait_for(lambda message: message.get("event") == name)

    def wait_for(self, wanted: Any) -> Message:
        """The first message, come or to come, that ``wanted`` accepts; it is not found again."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for message in self.messages:
                if wanted(message):
                    self.messages.remove(message)
                    return message
            assert time.monotonic() < deadline, self.messages
            data = self._sock.recv(1 << 16)
            assert data, f"the connection was closed; so far: {self.messages}"
            self.messages += self._reader.feed(data)

    def attach(self, **arguments: Any) -> None:
        """Initialize, attach, and have no breakpoints."""
        self.ask("initialize", adapterID="debugpy", clientID="test", linesStartAt1=True, pathFormat="path")
        self.ask("attach", justMyCode=False, **arguments)
        self.event("initialized")

    def closes(self) -> bool:
        """Whether the other side hangs up; what it says before that is kept."""
        while data := self._sock.recv(1 << 16):
            self.messages += self._reader.feed(data)
        return True

    def close(self) -> None:
        self._sock.close()
