"""Debug sessions of one rank: the controller's end, and a loopback port at which an editor attaches with a token.

The Debug Adapter Protocol has no place for a secret, but the arguments of ``attach`` are free: the editor sends its
whole launch configuration. Before an ``attach`` with the token has come no message reaches a rank. A stranger gets one
answer, the fixed one to ``initialize``, without which no editor would go on.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from meshbook.concurrency.background import hidden_thread
from meshbook.debug.dap_session import PIECE_MAX_BYTES, START_TIMEOUT_S, WAIT_MAX_S, DebugBytes, DebuggerStart
from meshbook.errors import DebugError, MeshError, PeerProtocolError
from meshbook.errors.advice import advice
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.mesh.proc_view import ask

T = TypeVar("T")

Message: TypeAlias = dict[str, Any]

MESSAGE_MAX_BYTES = 1 << 24
_HEADER_MAX_BYTES = 1 << 10
_END = b"\r\n\r\n"
_decode = msgspec.json.Decoder(Message).decode

ANSWER_TIMEOUT_S = 2.0
"""The time beyond `WAIT_MAX_S` after which a silent rank is checked, and asked again."""

SILENCE_MAX_S = 30.0
"""A living rank that does not answer for so long is given up."""


def pack(message: Message) -> bytes:
    """The bytes of a message."""
    body = msgspec.json.encode(message)
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


class MessageReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_bytes: int = MESSAGE_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole by now. Raises: PeerProtocolError for bytes that are no message, or too long."""
        self._data += data
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> Message | None:
        end = self._data.find(_END)
        if end < 0:
            if len(self._data) > _HEADER_MAX_BYTES:
                raise PeerProtocolError("a debugger's message without a header")
            return None
        start, size = end + len(_END), self._body_bytes(bytes(self._data[:end]))
        if len(self._data) < start + size:
            return None
        body = bytes(self._data[start : start + size])
        del self._data[: start + size]
        try:
            return _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerProtocolError(f"a debugger's message that is not JSON: {error}") from None

    def _body_bytes(self, header: bytes) -> int:
        for line in header.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length" and value.strip().isdigit() and len(value) < 20:
                size = int(value)
                if size <= self._max_bytes:
                    return size
        raise PeerProtocolError("a debugger's message without a sensible length")


def answer(request: Message, body: Message | None = None, *, failure: str = "") -> Message:
    """The response to a request, its failure where ``failure`` says why."""
    response: Message = {
        "type": "response",
        "seq": 0,
        "request_seq": request.get("seq", 0),
        "command": request.get("command", ""),
        "success": not failure,
        "body": body or {},
    }
    return {**response, "message": failure} if failure else response


def prepare(rank: ProcMesh) -> None:
    """Have the one rank of ``rank`` import its debugger, which takes a second. Raises: DebugError."""
    _start(rank, "debug_prepare", timeout_s=START_TIMEOUT_S)


class DebugTunnel:
    """A debug session of one rank. A thread of its own hands out the messages, and at last the reason of the end."""

    def __init__(self, rank: ProcMesh, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        """rank: a mesh of one rank. Begins the session, which ends any other of that rank. Raises: DebugError."""
        self._rank, self._on_message, self._on_end = rank, on_message, on_end
        self._id = secrets.token_hex(8)
        self._written = 0
        self._writing = threading.Lock()
        self._closed = ""
        self._held = False
        self.hidden = _start(rank, "debug_open", self._id, timeout_s=START_TIMEOUT_S + 5).hidden
        self._thread = hidden_thread(self._receive, "meshbook.tunnel")
        self._thread.start()

    def send(self, message: Message) -> None:
        """Bring a message to the rank; returns when it is there. Raises: DebugError."""
        data = pack(message)
        with self._writing:
            for start in range(0, len(data), PIECE_MAX_BYTES):
                self._write(data[start : start + PIECE_MAX_BYTES])

    def close(self) -> None:
        """End the session: the rank goes on, untraced. Does not wait."""
        self._closed = self._closed or "it was detached"

    @property
    def ended(self) -> str:
        """The reason why the session is over; empty while it is not."""
        return self._closed

    def join(self, timeout_s: float) -> None:
        """Wait until nothing of the session is left here."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- private ------------------------------------------------------------------------------------------------

    def _write(self, piece: bytes) -> None:
        deadline = time.monotonic() + SILENCE_MAX_S
        while True:
            if self._closed:
                raise DebugError(self._number, self._closed)
            problem = _ask(self._rank, str, "debug_write", self._id, self._written, piece, timeout_s=ANSWER_TIMEOUT_S)
            if problem is not None:
                break
            if self._is_lost() or time.monotonic() > deadline:
                self._closed = self._closed or self._why_silent()
        if problem:
            raise DebugError(self._number, problem)
        self._written += len(piece)

    def _receive(self) -> None:
        reader, at, heard = MessageReader(), 0, time.monotonic()
        while not self._closed:
            wait = (self._id, at, WAIT_MAX_S)
            answer = _ask(self._rank, DebugBytes, "debug_read", *wait, timeout_s=WAIT_MAX_S + ANSWER_TIMEOUT_S)
            if answer is None:
                if self._is_lost() or time.monotonic() - heard > SILENCE_MAX_S:
                    self._closed = self._closed or self._why_silent()
                continue
            heard = time.monotonic()
            data = answer.data[max(0, at - answer.at) :]
            at += len(data)
            try:
                for message in reader.feed(data):
                    self._on_message(message)
                    if message.get("event") in ("stopped", "continued"):
                        self._hold_deadlines(message["event"] == "stopped")
            except MeshError as error:
                self._closed = self._closed or str(error)
            except Exception as error:  # whoever takes the messages: the rank must be let go all the same
                self._closed = self._closed or f"{type(error).__name__}: {error}"
            self._closed = self._closed or answer.ended
        self._hold_deadlines(False)
        _ask(self._rank, bool, "debug_close", self._id, timeout_s=ANSWER_TIMEOUT_S)
        self._on_end(self._closed)

    def _hold_deadlines(self, held: bool) -> None:
        """Hold the deadlines of collectives while the rank is stopped, so that those of other ranks do not time out."""
        if held != self._held:
            self._held = held
            with contextlib.suppress(MeshError):
                ask(self._rank.base(), object, "hold_deadlines", held, timeout_s=ANSWER_TIMEOUT_S)

    @property
    def _number(self) -> int:
        return self._rank.ranks[0]

    def _is_lost(self) -> bool:
        return not self._rank.alive or bool(self._rank.lost)

    def _why_silent(self) -> str:
        if not self._rank.alive:
            return "its mesh was stopped"
        return "the rank has ended" if self._rank.lost else "the rank does not answer"


def _ask(rank: ProcMesh, kind: type[T], endpoint: str, *args: object, timeout_s: float) -> T | None:
    """The answer of the one rank; None when it gives none."""
    try:
        return ask(rank, kind, endpoint, *args, timeout_s=timeout_s).get(rank.ranks[0])
    except MeshError:  # stopped, or its ranks have other numbers now
        return None


def _check_alive(rank: ProcMesh) -> None:
    if rank.lost:
        raise DebugError(rank.ranks[0], f"it has ended; bring it back: {advice().heal}")


def _start(rank: ProcMesh, endpoint: str, *args: object, timeout_s: float) -> DebuggerStart:
    """Have the rank load its debugger, or begin a session. Raises: DebugError."""
    _check_alive(rank)
    number = rank.ranks[0]
    answer = _ask(rank, DebuggerStart, endpoint, *args, timeout_s=timeout_s)
    if answer is None:
        _check_alive(rank)
        raise DebugError(number, f"it does not answer; look: {advice().stacks}")
    if answer.problem:
        install = f"install debugpy for the Python of the ranks: {answer.python} -m pip install debugpy"
        raise DebugError(number, f"{answer.problem}; {install}" if answer.python else answer.problem)
    return answer


HOST = "127.0.0.1"
TOKEN = "meshbookToken"
"""The name of the token among the arguments of ``attach``."""

STRANGER_S = 10.0
"""The time in which a new connection must send the token."""

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
"""The requests ``initialize`` and ``attach``, and the bytes that came behind them."""


class DebugDoor:
    """Listens until it is closed; each connection has a thread of its own."""

    def __init__(self, open_tunnel: OpenTunnel) -> None:
        """open_tunnel: gets the callbacks for a message and for the end. Raises: OSError."""
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
        """Return the ``initialize`` and ``attach`` of a client with the token, and later bytes; None for others."""
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
    """Shut the connection down, so that readers and writers on both sides end; it stays to be closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
