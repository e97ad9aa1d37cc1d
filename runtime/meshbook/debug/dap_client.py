"""The controller's end of a debug session: messages to the debugger of one rank, wherever that runs, and back."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from meshbook.concurrency.background import hide_from_debuggers
from meshbook.debug.dap_messages import Message, MessageReader, pack
from meshbook.debug.dap_session import PIECE_MAX_BYTES, START_TIMEOUT_S, WAIT_MAX_S
from meshbook.debug.ranks import DebuggedRanks
from meshbook.errors import DebugError, MeshError
from meshbook.errors.advice import advice

ANSWER_TIMEOUT_S = 2.0
"""Beyond `WAIT_MAX_S`: a rank that has not answered by then is looked at, and asked again."""

SILENCE_MAX_S = 30.0
"""A living rank that does not answer for so long is given up."""


def prepare(rank: DebuggedRanks) -> None:
    """Have the one rank of ``rank`` import its debugger, which takes a second. Raises: DebugError."""
    _check_alive(rank)
    _check(rank, _ask(rank, "debug_prepare", timeout_s=START_TIMEOUT_S))


class DebugTunnel:
    """One debug session. What comes is handed out on a thread of its own, at last the reason of the end."""

    def __init__(
        self, rank: DebuggedRanks, on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        """rank: a mesh of one rank. Begins the session, which ends any other of that rank. Raises: DebugError."""
        _check_alive(rank)
        self._rank, self._on_message, self._on_end = rank, on_message, on_end
        self._id = secrets.token_hex(8)
        self._written = 0
        self._writing = threading.Lock()
        self._closed = ""
        self._held = False
        answer = _check(rank, _ask(rank, "debug_open", self._id, timeout_s=START_TIMEOUT_S + 5))
        self.hidden: tuple[str, ...] = tuple(answer["hidden"])
        """Folders on the rank's host whose code need not be seen."""
        self._thread = threading.Thread(target=self._receive, name="meshbook.tunnel", daemon=True)
        hide_from_debuggers(self._thread)
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
            problem = _ask(self._rank, "debug_write", self._id, self._written, piece, timeout_s=ANSWER_TIMEOUT_S)
            if problem is not None:
                break
            if self._is_lost() or time.monotonic() > deadline:
                self._closed = self._closed or self._why_silent()
        if problem:
            raise DebugError(self._number, str(problem))
        self._written += len(piece)

    def _check_open(self) -> None:
        if self._closed:
            raise DebugError(self._number, self._closed)

    def _receive(self) -> None:
        reader, at, heard = MessageReader(), 0, time.monotonic()
        while not self._closed:
            answer = _ask(self._rank, "debug_read", self._id, at, WAIT_MAX_S, timeout_s=WAIT_MAX_S + ANSWER_TIMEOUT_S)
            if answer is None:
                if self._is_lost() or time.monotonic() - heard > SILENCE_MAX_S:
                    self._closed = self._closed or self._why_silent()
                continue
            heard = time.monotonic()
            data = answer["data"][max(0, at - answer["at"]) :]
            at += len(data)
            try:
                for message in reader.feed(data):
                    self._on_message(message)
                    self._follow(message)
            except MeshError as error:
                self._closed = self._closed or str(error)
            except Exception as error:  # whoever takes the messages: the rank must be let go all the same
                self._closed = self._closed or f"{type(error).__name__}: {error}"
            if answer["ended"]:
                self._closed = self._closed or answer["ended"]
        self._hold_deadlines(False)
        _ask(self._rank, "debug_close", self._id, timeout_s=ANSWER_TIMEOUT_S)
        self._on_end(self._closed)

    def _follow(self, message: Message) -> None:
        """While the rank stands still, the collectives in which others wait for it do not time out."""
        if message.get("event") in ("stopped", "continued"):
            self._hold_deadlines(message["event"] == "stopped")

    def _hold_deadlines(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            with contextlib.suppress(MeshError):
                self._rank.base().ask("hold_deadlines", held, timeout_s=ANSWER_TIMEOUT_S)

    @property
    def _number(self) -> int:
        return self._rank.ranks[0]

    def _is_lost(self) -> bool:
        return not self._rank.alive or bool(self._rank.lost)

    def _why_silent(self) -> str:
        if not self._rank.alive:
            return "its mesh was stopped"
        return "the rank has ended" if self._rank.lost else "the rank does not answer"


def _ask(rank: DebuggedRanks, endpoint: str, *args: object, timeout_s: float) -> Any:
    """The answer of the one rank; None when it gives none."""
    try:
        return rank.ask(endpoint, *args, timeout_s=timeout_s).get(rank.ranks[0])
    except MeshError:  # stopped, or its ranks have other numbers now
        return None


def _check_alive(rank: DebuggedRanks) -> None:
    if rank.lost:
        raise DebugError(rank.ranks[0], f"it has ended; bring it back: {advice().heal}")


def _check(rank: DebuggedRanks, answer: Any) -> Any:
    number = rank.ranks[0]
    if answer is None:
        _check_alive(rank)
        raise DebugError(number, f"it does not answer; look: {advice().stacks}")
    if answer["problem"]:
        python = answer.get("python")
        hint = f"; install debugpy for the Python of the ranks: {python} -m pip install debugpy" if python else ""
        raise DebugError(number, f"{answer['problem']}{hint}")
    return answer
