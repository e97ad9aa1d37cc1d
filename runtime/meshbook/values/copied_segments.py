"""Small segments, which their receivers copy: ranks out of mappings that they keep.

    stat /proc/<pid>/fd/<fd> ── inode ──> kept: copy out of the mapping                  one system call, no faults
                                  └─────> new:  open, look whether it is ours, map, keep; where all is taken, read

Owners use the same few segments again. An inode names the same memory for as long as it is mapped here. Mappings are
shared and read-only: they show what the owner has written last, and pin no more than `KEPT_MAX` segments of
`KEPT_MAX_BYTES`.
"""

from __future__ import annotations

import mmap
import os
import threading
import time

from meshbook.system.memory_files import Bytes, map_fd

KEPT_MAX = 32
KEPT_MAX_BYTES = 2 << 20
"""Segments that are larger are read: they would pin too much of what their owner has given up."""

UNUSED_S = 10.0
"""Where all is taken, what was not used for so long makes room."""


class _Kept:
    """One mapping, and when it was used last."""

    def __init__(self, array: Bytes) -> None:
        self.array, self.used_s = array, time.monotonic()


class KeptMappings:
    """Those of one process. Any thread may call any method, a fork as well: it reads what its parent has kept."""

    def __init__(self) -> None:
        self._filling = threading.Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}
        """By device and inode."""

    def copy(self, path: str, size_bytes: int) -> Bytes | None:
        """Copy the first bytes of the file that ``path`` leads to, if it is kept. Raises: OSError."""
        found = os.stat(path)
        kept = self._kept.get((found.st_dev, found.st_ino))
        if kept is None or len(kept.array) < size_bytes:
            return None
        kept.used_s = time.monotonic()
        return kept.array[:size_bytes].copy()

    def keep(self, fd: int) -> None:
        """Map a file, which cannot shrink, for the next time, if there is room and nobody else is at it."""
        found = os.fstat(fd)
        if found.st_size > KEPT_MAX_BYTES or not self._filling.acquire(blocking=False):
            return
        try:
            if len(self._kept) >= KEPT_MAX:
                latest = time.monotonic() - UNUSED_S
                self._kept = {key: kept for key, kept in self._kept.items() if kept.used_s > latest}
            if len(self._kept) < KEPT_MAX:
                array = map_fd(fd, found.st_size, mmap.MAP_SHARED, writable=False)
                self._kept[found.st_dev, found.st_ino] = _Kept(array)
        finally:
            self._filling.release()


def read(fd: int, size_bytes: int) -> Bytes:
    """Read the first bytes of a segment, without mapping it."""
    import numpy as np

    whole = np.empty(size_bytes, dtype=np.uint8)
    done = 0
    while done < size_bytes:
        count = os.preadv(fd, [whole[done:].data], done)
        assert count > 0, "a segment never shrinks"
        done += count
    return whole
