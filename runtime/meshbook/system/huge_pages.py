"""Memory in huge pages: a fork copies the page tables, and one entry stands for 2 MB in place of 512 for 4 KB each.

A child that writes gets a small page of its own, as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_COLLAPSE = 25
"""Since Linux 6.1; madvise(2)."""

PIECE_BYTES = 16 << 20
"""Of memory, to be moved at a time: some 40 ms."""

MIN_PRIVATE = 0.75
"""So much of a mapping has to be there, and this process's alone: what is shared would no longer be."""

_HUGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$")
_PRIVATE = re.compile(r"Private_(?:Clean|Dirty): *(\d+) kB")


def use_huge_pages() -> Iterator[None]:
    """Move memory of this process into huge pages, a piece at each step; without them, or on an older kernel, none."""
    try:
        page_bytes = int(_HUGE_SIZE.read_text())
    except (OSError, ValueError):
        return
    for start, end in _private_mappings():
        at, end = -(-start // page_bytes) * page_bytes, end // page_bytes * page_bytes
        while at < end:
            size_bytes = min(PIECE_BYTES, end - at)
            _libc.madvise(at, size_bytes, _MADV_COLLAPSE)  # best effort: the system may have no such page left
            at += size_bytes
            yield


def _private_mappings() -> list[tuple[int, int]]:
    """Where writable memory without a file begins and ends, if nearly all of it is this process's alone."""
    found: list[tuple[int, int]] = []
    mapping: re.Match[str] | None = None
    private_bytes = 0
    with contextlib.suppress(OSError), open("/proc/self/smaps") as lines:
        for line in lines:
            if line[0] in "0123456789abcdef":
                mapping, private_bytes = _MAPPING.match(line), 0
            elif mapping is not None and (private := _PRIVATE.match(line)):
                private_bytes += int(private[1]) << 10
            elif mapping is not None and line.startswith("VmFlags"):
                start, end = (int(address, 16) for address in mapping.groups()[:2])
                if private_bytes >= MIN_PRIVATE * (end - start):
                    found.append((start, end))
    return found
