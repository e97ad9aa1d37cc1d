"""The controller's end of a debug session: messages to the debugger of one rank, wherever that runs, and back."""

from __future__ import annotations

import contextlib
import secrets
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
"""Beyond `WAIT_MAX_S`: a rank that has not answered by then is looked at, and asked again."""

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
        """The messages that are whole by now. Raises: PeerProtocolError for what is no message, or too long."""
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
    """One debug session. What comes is handed out on a thread of its own, at last the reason of the end."""

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
        """Why the session is over; empty while it is not."""
        return self._closed

    def join(self, timeout_s: float) -> None:
        """Wait until nothing of the session is left here."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- private ------------------------------------------------------------------------------------------------

    def _write(self, piece: bytes) -> None:
        deadline = time.monotonic() + SILENCE_MAX_S
        while True:
            self._check_open()
            problem = _ask(self._rank, str, "debug_write", self._id, self._written, piece, timeout_s=ANSWER_TIMEOUT_S)
            if problem is not None:
                break
            if self._is_lost() or time.monotonic() > deadline:
                self._closed = self._closed or self._why_silent()
        if problem:
            raise DebugError(self._number, problem)
        self._written += len(piece)

    def _check_open(self) -> None:
        if self._closed:
            raise DebugError(self._number, self._closed)

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
                    self._follow(message)
            except MeshError as error:
                self._closed = self._closed or str(error)
            except Exception as error:  # whoever takes the messages: the rank must be let go all the same
                self._closed = self._closed or f"{type(error).__name__}: {error}"
            self._closed = self._closed or answer.ended
        self._hold_deadlines(False)
        _ask(self._rank, bool, "debug_close", self._id, timeout_s=ANSWER_TIMEOUT_S)
        self._on_end(self._closed)

    def _follow(self, message: Message) -> None:
        """While the rank stands still, the collectives in which others wait for it do not time out."""
        if message.get("event") in ("stopped", "continued"):
            self._hold_deadlines(message["event"] == "stopped")

    def _hold_deadlines(self, held: bool) -> None:
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
