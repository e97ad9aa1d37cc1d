"""The last lines of a log."""

from __future__ import annotations

import os
from pathlib import Path

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
