"""The holes of the C heap, taken up before a fork, so that what children allocate lies side by side.

A process that has imported much has freed small blocks all over its heap. A child's blocks go there, one to a page that
it shared until then: the pages that it has of its own are many more than its blocks. Where nothing is free but the end
of the heap, new blocks share a few new pages.

    before   |##.#|#.##|##.#|#.##|            #: in use, shared with the children    .: free
    after    |####|####|####|####|cccc        c: a child's
"""

from __future__ import annotations

import ctypes

LARGEST_BYTES = 1024
"""Of the blocks to fill holes with: what is larger has most of its pages to itself anyway."""

_SMALLEST_BYTES, _STEP_BYTES = 24, 16
"""The sizes of glibc's blocks, without their heads."""

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _HeapCounts(ctypes.Structure):
    """mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


_libc = ctypes.CDLL(None)


def fill_heap_holes() -> int:
    """Allocate in every hole, for good; returns the bytes. None where the C library does not tell of its heap.

    For a process that is idle and has one thread; it takes some milliseconds.
    """
    if not hasattr(_libc, "mallinfo2"):  # glibc since 2.33
        return 0
    _libc.mallinfo2.restype = _HeapCounts
    _libc.sbrk.argtypes, _libc.sbrk.restype = [ctypes.c_long], ctypes.c_void_p
    _libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    counts = _libc.mallinfo2()
    end = (_libc.sbrk(0) or 0) - counts.keepcost
    begin = end - counts.arena
    filled = 0
    for size_bytes in range(LARGEST_BYTES, _SMALLEST_BYTES - 1, -_STEP_BYTES):
        while begin <= (_libc.malloc(size_bytes) or 0) < end:  # else it lies behind all others: this size has no hole
            filled += size_bytes
    return filled
