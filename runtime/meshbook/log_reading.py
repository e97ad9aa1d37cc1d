"""Reading the logs of ranks, on the host that has them: the last lines, or what came since."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from meshbook.wire import FROM_THE_END, LogPiece, ReadOn

TAIL_BYTES = 256 << 10
"""Last lines are looked for within this much of the end."""


def log_tail(path: Path, lines: int, begin: int = 0, containing: str = "") -> str:
    """The last ``lines`` lines of a log, within its last 256 kB and beyond ``begin``; empty when there is none.

    containing: only lines that have this text.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES, 0))
            return _last_lines(file.read(), lines, containing).decode(errors="backslashreplace")
    except OSError:  # there is none, or no descriptor is left to open it
        return ""


def _last_lines(data: bytes, lines: int, containing: str = "") -> bytes:
    found = data.splitlines()
    if containing:
        wanted = containing.encode(errors="surrogateescape")
        found = [line for line in found if wanted in line]
    return b"\n".join(found[-lines:] if lines else ())


def read_on(paths: Mapping[int, Path], asked: ReadOn) -> tuple[LogPiece, ...]:
    """What was written beyond the offsets asked for, of the logs that have something new."""
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
