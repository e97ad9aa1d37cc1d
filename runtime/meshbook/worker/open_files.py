"""Files that user code has left open when its process ends: what is in their buffers is written.

Workers end by `os._exit`, since destructors of native libraries must not hold up an end; so Python closes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat

_FILE = io.IOBase.__base__ or io.IOBase
"""Without the hooks of abstract classes, which would ask classes of the user."""


def write_buffers() -> None:
    """Raises nothing. May wait for whoever reads a pipe: whoever ends the process has a deadline."""
    files: list[io.IOBase] = [each for each in gc.get_objects() if issubclass(type(each), _FILE)]
    for file in sorted(files, key=_turn):
        with contextlib.suppress(Exception):
            if file.closed or file.fileno() <= 2:
                continue
            if _layer(file) == 1:
                file.close()  # a compressed one has an end of its own
            else:
                file.flush()
    del files
    gc.collect()  # what only cycles hold has its last word: now, since the collector may close what a file wraps first


def _turn(file: io.IOBase) -> tuple[bool, int]:
    """Regular files first, since pipes may block; and what wraps another file before that one."""
    try:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # closed, or no file of the system's
        is_regular = False
    return not is_regular, _layer(file)


def _layer(file: io.IOBase) -> int:
    if issubclass(type(file), io.TextIOWrapper):
        return 0
    if issubclass(type(file), io.BufferedWriter | io.BufferedRandom | io.FileIO):
        return 2
    return 1
