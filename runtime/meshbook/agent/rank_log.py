"""The log file of a rank, written on a thread aside: a disk that hangs, as network disks do, holds up no agent.

    the agent's loop ── write ──> queue, at most `QUEUE_BYTES` of each log ──> a thread aside, for all logs ──> file

A rank that prints faster than its disk writes waits for the disk: its pipes are not read meanwhile. After `PATIENCE_S`
the disk counts as hanging and the rank goes on; output that is not written then is counted, and the log tells the gap.
`read_on` reads logs for the controller: their last lines, or the text that was added.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from meshbook.concurrency.background import SerialQueue, attempt
from meshbook.formatting import format_bytes
from meshbook.system.exits import TAIL_BYTES, _last_lines
from meshbook.system.os_errors import explain
from meshbook.wire.messages import FROM_THE_END, LogPiece, ReadOn

LOG_QUOTA_BYTES = 1 << 30
RETRY_S = 2.0  # a log that could not be written is tried again so often
QUEUE_BYTES = 4 << 20
PATIENCE_S = 5.0  # a rank waits so long for its disk
REST_S = 0.01
SETTLE_S = 0.5  # a reader of a log waits so long for the disk, which takes far less
SLOW = "its disk does not keep up"


class _Writer:
    """The writes of all logs, one after the other on a thread aside. Before them it rests, so that much is written at
    once. Else it and the loop would hand the interpreter to each other at every line: that costs ten times the work."""

    def __init__(self) -> None:
        self.hurry = threading.Event()  # set when a reader waits for the text
        # whether a reader has waited in vain, and no text was written since: no log is waited for meanwhile
        self.hangs = False
        self._jobs: deque[Callable[[], object]] = deque()
        self._lane = SerialQueue()

    def do(self, job: Callable[[], object]) -> None:
        self._jobs.append(job)
        self._lane.add(self._work)

    def settle(self, timeout_s: float) -> None:
        done = threading.Event()
        self.do(done.set)
        self.hurry.set()
        done.wait(timeout_s)

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the agent's loop
        if self._jobs:  # else those before have done it
            self.hurry.wait(REST_S)
            self.hurry.clear()
        while self._jobs:
            attempt(self._jobs.popleft(), "the log of a rank")


_writer = _Writer()


def settle_logs(timeout_s: float) -> None:
    """Wait until all text that was written by now is in the logs."""
    _writer.settle(timeout_s)


class RankLog:
    """The log of all text that a rank wrote, up to the quota; a full disk loses the log, not the rank. Text that cannot
    be written is counted. Later writes try again, once in `RETRY_S`, and the log then tells the gap."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError if the file cannot be opened."""
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # where this process's part begins; text before it is of one that had the rank earlier
        self.begin = os.fstat(self._fd).st_size
        self._lock = threading.Lock()
        self._queued_bytes = self._skipped_bytes = 0
        # pieces that the thread has not begun with, each with how many bytes are missing before it
        self._queued: list[tuple[int, bytes]] = []
        self._empty = threading.Event()
        self._empty.set()
        self._full_since = math.inf
        self.note = ""  # that the log has become incomplete, and why; until `take_note`
        self._told = False
        self._written = self._missing = 0  # from here on the thread's
        self.lacks = ""  # why the last text is missing; empty where it is not
        self._retry_at = 0.0

    def write(self, data: bytes, now: float) -> None:
        """Append ``data``, soon."""
        if self._queued_bytes + len(data) > QUEUE_BYTES:
            self.settle()
        with self._lock:
            if self._queued_bytes + len(data) > QUEUE_BYTES:
                self._skipped_bytes += len(data)
                self._tell(SLOW)
                return
            self._queued_bytes += len(data)
            skipped_bytes, self._skipped_bytes = self._skipped_bytes, 0
            self._queued.append((skipped_bytes, data))
            if len(self._queued) > 1:
                return
            self._empty.clear()
        _writer.do(lambda: self._write_queued(now))

    def is_full(self, now: float) -> bool:
        """Whether the rank should wait for its disk before more of its output is read."""
        if self._queued_bytes < QUEUE_BYTES // 2:
            self._full_since = math.inf
            return False
        self._full_since = min(self._full_since, now)
        return now - self._full_since < PATIENCE_S

    def take_note(self) -> str:
        """Return, once, that the log has become incomplete, and why."""
        note, self.note = self.note, ""
        return note

    @property
    def behind(self) -> bool:
        """Whether some text has not come to the file."""
        return not self._empty.is_set()

    def settle(self) -> None:
        """Wait a moment until all text is in the file; not again until the disk has caught up."""
        if _writer.hangs or self._empty.is_set():
            return
        _writer.hurry.set()
        _writer.hangs = not self._empty.wait(SETTLE_S)

    def close(self) -> None:
        """Close the log after all text is written."""
        _writer.do(self._end)

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _write_queued(self, now: float) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
        parts: list[bytes] = []
        for skipped_bytes, data in queued:
            if skipped_bytes:
                self._append(b"".join(parts), now)
                parts.clear()
                self._missing += skipped_bytes
                self.lacks = self.lacks or SLOW
            parts.append(data)
        self._append(b"".join(parts), now)
        with self._lock:
            self._queued_bytes -= sum(len(data) for _, data in queued)
            if not self._queued_bytes:
                self._empty.set()
        _writer.hangs = False

    def _append(self, data: bytes, now: float) -> None:
        if self.lacks and now < self._retry_at:
            self._missing += len(data)
            return
        if self._written > LOG_QUOTA_BYTES:
            self._lose(data, f"it holds {format_bytes(LOG_QUOTA_BYTES)}, which is its quota", math.inf)
            return
        try:
            if self._missing:
                gap = f"\n[meshbook: {self._missing:,} bytes are missing here: {self.lacks}]\n"
                data = gap.encode() + data
                self._missing, self.lacks = 0, ""
            while data:
                count = os.write(self._fd, data)
                self._written += count
                data = data[count:]
        except OSError as error:
            self._lose(data, explain(error), now + RETRY_S)

    def _lose(self, data: bytes, why: str, retry_at: float) -> None:
        self._missing += len(data)
        self.lacks, self._retry_at = why, retry_at
        with self._lock:
            self._tell(why)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            self.note = f"its log is incomplete from here on: {why}\n"

    def _end(self) -> None:
        if self._skipped_bytes:
            self._queued.append((self._skipped_bytes, b""))
            self._write_queued(0.0)
        os.close(self._fd)


def read_on(paths: Mapping[int, Path], asked: ReadOn) -> tuple[LogPiece, ...]:
    """Return the text beyond the offsets asked for, of the logs that have any."""
    pieces = [
        _read_on(rank, paths[rank], offset, asked.lines, asked.limit_bytes)
        for rank, offset in asked.offsets
        if rank in paths
    ]
    return tuple(piece for piece in pieces if piece is not None)


def _read_on(rank: int, path: Path, offset: int, lines: int, limit_bytes: int) -> LogPiece | None:
    try:
        size = path.stat().st_size
        if size == offset:
            return None
        with path.open("rb") as file:
            if offset == FROM_THE_END:
                return LogPiece(rank, _before_end(file, size, lines)[-limit_bytes:], size, 0)
            offset = offset if offset < size else 0  # it was written anew
            begin = max(offset, size - limit_bytes)
            file.seek(begin)
            data = file.read(size - begin)
    except OSError:
        return None
    if begin > offset:  # the middle of a line
        kept = data[data.find(b"\n") + 1 :]
        begin, data = begin + len(data) - len(kept), kept
    return LogPiece(rank, data, size, begin - offset)


def _before_end(file: BinaryIO, size: int, lines: int) -> bytes:
    file.seek(max(0, size - TAIL_BYTES))
    data = file.read(min(size, TAIL_BYTES))  # what is written meanwhile comes with the next look
    last = _last_lines(data, lines)
    return last + b"\n" if last and data.endswith(b"\n") else last
