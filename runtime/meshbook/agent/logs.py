"""Reading the logs of ranks, on the host that has them: the last lines, or what came since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from meshbook.system.exits import TAIL_BYTES, _last_lines
from meshbook.wire.messages import FROM_THE_END, LogPiece, ReadOn


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
