"""A loopback port at which an editor attaches to the debugger of a rank, if it knows the token.

The Debug Adapter Protocol has no place for a secret, but the arguments of ``attach`` are free: the editor sends its
whole launch configuration. Until an ``attach`` with the token has come nothing reaches a rank, and a stranger learns
nothing: the one answer is the fixed one to ``initialize``, without which an editor would not go on.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from meshbook.concurrency.background import hidden_thread
from meshbook.errors import DebugError, PeerProtocolError
from meshbook.mesh.dap_client import DebugTunnel, Message, MessageReader, answer, pack

HOST = "127.0.0.1"
TOKEN = "meshbookToken"
"""The name of the token among the arguments of ``attach``."""

STRANGER_S = 10.0
"""How long a connection may take to show the token."""

STRANGERS_MAX = 8
_STRANGERS_MESSAGE_MAX_BYTES = 1 << 16
_CAPABILITIES: Message = {
    f"supports{name}": True
    for name in (
        "ClipboardContext",
        "CompletionsRequest",
        "ConditionalBreakpoints",
        "ConfigurationDoneRequest",
        "DelayedStackTraceLoading",
        "EvaluateForHovers",
        "ExceptionInfoRequest",
        "ExceptionOptions",
        "FunctionBreakpoints",
        "GotoTargetsRequest",
        "HitConditionalBreakpoints",
        "LogPoints",
        "ModulesRequest",
        "SetExpression",
        "SetVariable",
        "StepInTargetsRequest",
        "ValueFormattingOptions",
    )
}

OpenTunnel = Callable[[Callable[[Message], None], Callable[[str], None]], DebugTunnel]


_Hello: TypeAlias = tuple[Message, Message, list[Message]]
"""``initialize`` and ``attach``, and what has come behind them."""


class DebugDoor:
    """Listens until it is closed; each connection has a thread of its own."""

    def __init__(self, open_tunnel: OpenTunnel) -> None:
        """open_tunnel: gets what to do with a message, and at the end. Raises: OSError."""
        self.token = secrets.token_urlsafe(24)
        self._open_tunnel = open_tunnel
        self._listener = socket.create_server((HOST, 0), backlog=STRANGERS_MAX)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._strangers = 0
        self._closed = False
        self._threads = [hidden_thread(self._accept, "meshbook.door")]
        self._threads[0].start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Listen no more, and end the sessions."""
        self._closed = True
        with self._lock:
            for sock in (self._listener, *self._open):
                _shut(sock)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))
        self._listener.close()

    # ---- private ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptor left
                continue
            with self._lock:
                if self._closed or self._strangers >= STRANGERS_MAX:
                    sock.close()
                    continue
                self._strangers += 1
                self._open.add(sock)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = hidden_thread(self._serve, "meshbook.editor", sock)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                hello = self._authenticate(sock)
            finally:
                with self._lock:
                    self._strangers -= 1
            if hello is not None:
                _carry(sock, hello, self._open_tunnel)
        except (OSError, PeerProtocolError):
            pass  # who is there has gone, or is no debugger
        finally:
            with self._lock:
                self._open.discard(sock)
            _shut(sock)  # a fork of this process may have it still
            sock.close()

    def _authenticate(self, sock: socket.socket) -> _Hello | None:
        """The ``initialize`` and ``attach`` of who knows the token, and what followed; None for anybody else."""
        deadline = time.monotonic() + STRANGER_S
        reader, initialize = MessageReader(_STRANGERS_MESSAGE_MAX_BYTES), None
        while True:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            if not (data := sock.recv(1 << 16)) or time.monotonic() > deadline:
                return None
            messages = iter(reader.feed(data))
            for message in messages:
                if initialize is None and message.get("command") == "initialize":
                    initialize = message
                    sock.sendall(pack(answer(message, _CAPABILITIES)))
                elif initialize is not None and self._is_attach(message):
                    sock.settimeout(None)
                    return initialize, message, list(messages)
                else:
                    return None

    def _is_attach(self, message: Message) -> bool:
        arguments = message.get("arguments")
        token = arguments.get(TOKEN) if isinstance(arguments, dict) else None
        if message.get("command") != "attach" or not isinstance(token, str):
            return False
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())


def _carry(sock: socket.socket, hello: _Hello, open_tunnel: OpenTunnel) -> None:
    """Carry the messages of an editor that may come in, until one side ends."""
    initialize, attach, ahead = hello

    def to_editor(message: Message) -> None:
        if message.get("type") == "response" and message.get("request_seq") == initialize.get("seq"):
            return  # it has one already
        with contextlib.suppress(OSError):  # the other thread sees the end
            sock.sendall(pack(message))

    try:
        tunnel = open_tunnel(to_editor, lambda _reason: _shut(sock))
    except DebugError as error:
        sock.sendall(pack(answer(attach, failure=str(error))))
        return
    try:
        arguments = {name: value for name, value in attach["arguments"].items() if name != TOKEN}
        rules = [*arguments.get("rules", ()), *({"path": folder, "include": False} for folder in tunnel.hidden)]
        for message in (initialize, {**attach, "arguments": {**arguments, "rules": rules}}, *ahead):
            tunnel.send(message)
        reader = MessageReader()
        while data := sock.recv(1 << 16):
            for message in reader.feed(data):
                tunnel.send(message)
    except DebugError:
        pass  # the rank is gone: the editor sees the end of the connection
    finally:
        tunnel.close()
        tunnel.join(5)


def _shut(sock: socket.socket) -> None:
    """Have whoever reads or writes there, on either side, come to the end; it stays to be closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
