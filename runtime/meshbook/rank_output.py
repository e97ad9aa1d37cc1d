"""What a rank writes to stdout and stderr, as the host agent reads it from the rank's pipes.

    pipe bytes ──> log file (all of it, within a quota)
              └──> pieces tagged with their output id ──> rate limit ──> controller

A worker writes ``marker + id + newline`` into both pipes where another output begins: attribution is exact however
late the agent reads. A rank may burst `BURST_BYTES` and then send `RATE_BYTES_S` to the notebook; beyond that the
newest `TAIL_BYTES` wait, older ones are counted and stay in the log only.
"""

from __future__ import annotations

import codecs
import math
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from meshbook.crash_report import CrashReportCut
from meshbook.limits import explain
from meshbook.wording import format_bytes

BURST_BYTES = 256 << 10
RATE_BYTES_S = 64 << 10
TAIL_BYTES = 64 << 10
LOG_QUOTA_BYTES = 1 << 30
CRASH_REPORT_LINES = 200
"""Enough for what `faulthandler` writes, of which `meshbook.deaths.last_words` keeps the gist."""
RETRY_S = 2.0
"""How often a log that could not be written is tried again."""

_MARK = b"\x1e"
_LONGEST_ID = 24


class Piece(NamedTuple):
    output: int
    stream: str
    text: str


class RankLog:
    """The rank's log file: everything it wrote, up to the quota; a full disk loses the log, not the rank.

    What cannot be written is counted. Later writes try again, once in `RETRY_S`, and the log then says what it lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.begin = os.fstat(self._fd).st_size
        """Where this process's part begins; what stands before is of one that had the rank earlier."""
        self._written = 0
        self._missing = 0
        self._why = ""
        self._retry_at = 0.0
        self._told = False

    def write(self, data: bytes, now: float) -> str:
        """Append ``data``; returns what the person should know, once: that the log has become incomplete, and why."""
        if self._why and now < self._retry_at:
            self._missing += len(data)
            return ""
        if self._written > LOG_QUOTA_BYTES:
            return self._lose(data, f"it holds {format_bytes(LOG_QUOTA_BYTES)}, which is its quota", math.inf)
        try:
            if self._missing:
                gap = f"\n[meshbook: {self._missing:,} bytes are missing here: {self._why}]\n"
                data = gap.encode() + data
                self._missing, self._why = 0, ""
            while data:
                count = os.write(self._fd, data)
                self._written += count
                data = data[count:]
        except OSError as error:
            return self._lose(data, explain(error), now + RETRY_S)
        return ""

    def _lose(self, data: bytes, why: str, retry_at: float) -> str:
        self._missing += len(data)
        self._why, self._retry_at = why, retry_at
        if self._told:
            return ""
        self._told = True
        return f"its log is incomplete from here on: {why}\n"

    def close(self) -> None:
        os.close(self._fd)


class _Stream:
    """One pipe: splits its bytes at markers and decodes them."""

    def __init__(self, name: str, marker: bytes) -> None:
        self.name = name
        self._marker = marker
        self._rest = b""
        self._output = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def split(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return (output id, bytes) pieces without the markers; an incomplete marker waits for the next call."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if _MARK not in data:
            return [(self._output, data)] if data else []
        pieces = []
        while (at := data.find(self._marker)) >= 0:
            end = data.find(b"\n", at, at + len(self._marker) + _LONGEST_ID)
            if end < 0:
                break
            if at:
                pieces.append((self._output, data[:at]))
            self._output = _number(data[at + len(self._marker) : end])
            data = data[end + 1 :]
        held = self._incomplete_marker_at(data)
        data, self._rest = data[:held], data[held:]
        if data:
            pieces.append((self._output, data))
        return pieces

    def _incomplete_marker_at(self, data: bytes) -> int:
        at = data.rfind(_MARK)
        if at >= 0 and (self._marker.startswith(data[at:]) or data[at:].startswith(self._marker)):
            return at
        return len(data)

    def decode(self, data: bytes) -> str:
        return self._decoder.decode(data)


def _number(digits: bytes) -> int:
    """The id in a marker; 0, nobody's, for one that a rank has forged."""
    return number if digits.isdigit() and (number := int(digits)) < 1 << 63 else 0


class RankOutput:
    """Both pipes of one rank. ``now`` is a monotonic time in seconds, given by the caller."""

    def __init__(self, marker: bytes, log: RankLog, now: float) -> None:
        self.log = log
        self._streams = {name: _Stream(name, marker) for name in ("stdout", "stderr")}
        self._crash = CrashReportCut()
        self._pending: deque[Piece] = deque()
        self._pending_bytes = 0
        self._notes: list[Piece] = []
        self._budget = float(BURST_BYTES)
        self._refilled = now
        self._cut: dict[int, int] = {}
        self._cut_news: set[int] = set()

    def feed(self, stream: str, data: bytes, now: float) -> None:
        """Take what was read from the pipe ``stream``."""
        split = self._streams[stream]
        for output, piece in split.split(data):
            self._keep(output, piece, now)
            text = split.decode(piece)
            if stream == "stderr":
                text = self._crash.cut(text)
            if text:
                self._pending.append(Piece(output, stream, text))
                self._pending_bytes += len(text)
        while self._pending_bytes > max(self._budget, TAIL_BYTES) + TAIL_BYTES:
            self._drop(self._pending.popleft())

    def add_late(self, piece: Piece, now: float) -> None:
        """Take text that its worker attributed itself, since it belongs to an earlier output."""
        self._keep(piece.output, piece.text.encode(errors="backslashreplace"), now)
        self._pending.append(piece)
        self._pending_bytes += len(piece.text)

    def _keep(self, output: int, data: bytes, now: float) -> None:
        if note := self.log.write(data, now):
            self._notes.append(Piece(output, "stderr", note))

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to give, now or later."""
        return bool(self._pending or self._notes)

    def take(self, now: float, *, final: bool = False) -> tuple[list[Piece], dict[int, int]]:
        """Return the pieces that may be sent now, and the total cut so far of each output whose total grew.

        final: an output ended: everything that waits is sent, whatever the rate.
        """
        self._budget = min(BURST_BYTES, self._budget + (now - self._refilled) * RATE_BYTES_S)
        self._refilled = now
        pieces, self._notes = self._notes, []
        while self._pending and (final or self._budget > 0):
            piece = self._pending.popleft()
            self._pending_bytes -= len(piece.text)
            self._budget -= len(piece.text)
            pieces.append(piece)
        cuts = {output: self._cut[output] for output in self._cut_news}
        self._cut_news.clear()
        return pieces, cuts

    def cut(self, output: int, size_bytes: int) -> dict[int, int]:
        """So much more of ``output`` will not be shown; returns its total, as `take` does."""
        self._cut[output] = self._cut.get(output, 0) + size_bytes
        return {output: self._cut[output]}

    def renew(self) -> None:
        """A cell has ended: what it printed must not silence the next one."""
        self._budget = float(BURST_BYTES)

    def _drop(self, piece: Piece) -> None:
        size = len(piece.text)
        self._pending_bytes -= size
        self._cut[piece.output] = self._cut.get(piece.output, 0) + size
        self._cut_news.add(piece.output)
