"""Copies between the memory of this process and that of another one on this machine, which takes no part in them.

The kernel looks up and holds each page on its own, so one thread copies at a third or so of the speed of a memcpy. A
large copy is therefore made by several threads, each of which takes the next slice as soon as it has done one:

    |  0  |  1  |  2  |  3  |  4  |  5  |      slices of equal size, at most SLICE_BYTES
     ^ this thread  ^ aside                    a thread that fails leaves none for the others
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable

from meshbook.concurrency.background import run_in_background
from meshbook.system.devices import count_cores

SLICE_BYTES = 16 << 20
"""The size after which a copy looks whether it is still wanted, and waits for a turn of Python."""

THREAD_BYTES = 4 << 20
"""The least size for each thread: less is copied before another thread is awake."""

MAX_THREADS = 4

MOST_RUNS = 1024
"""The most pieces of one call: UIO_MAXIOV."""


class _Run(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    if hasattr(_libc, _name):
        _function = getattr(_libc, _name)
        _run, _count = ctypes.POINTER(_Run), ctypes.c_ulong
        _function.argtypes = [ctypes.c_int, _run, _count, _run, _count, _count]
        _function.restype = ctypes.c_ssize_t


class ProcessMemoryError(Exception):
    """The memory of another process cannot be copied. No `OSError`: the time-outs that a check raises are of these."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        """EPERM or ENOSYS where no copy can be made at all; ESRCH or EFAULT where process or memory is gone."""

    def __str__(self) -> str:
        return f"the memory of another process cannot be copied: {os.strerror(self.code)}"


def copy_process_memory(
    pid: int, there: int, here: int, size_bytes: int, *, write: bool, check: Callable[[], None]
) -> None:
    """Copy from the address ``there`` of process ``pid`` to ``here`` of this one, or, to write, the other way.

    check: called before each slice, by any of the threads; its error ends the copy, which has then been made in
        part. No thread copies any more once this has returned or raised: a main thread holds interrupts back meanwhile.
    Raises: ProcessMemoryError.
    """
    function = getattr(_libc, "process_vm_writev" if write else "process_vm_readv", None)
    if function is None:
        raise ProcessMemoryError(errno.ENOSYS)

    def copy_slice(offset: int, count: int) -> None:
        end = offset + count
        while offset < end:
            check()
            local, remote = _Run(here + offset, end - offset), _Run(there + offset, end - offset)
            copied = function(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if copied <= 0:
                raise ProcessMemoryError(ctypes.get_errno() if copied < 0 else errno.EFAULT)
            offset += copied

    _SharedSlices(copy_slice, size_bytes).copy()


def read_process_runs(pid: int, there: int, here: int, count: int, size_bytes: int) -> None:
    """Read ``count`` pieces of the memory of a process, ``size_bytes`` together, by this thread.

    there, here: where pairs of 64-bit integers begin, an address and a size for each piece. Raises: ProcessMemoryError.
    """
    function = getattr(_libc, "process_vm_readv", None)
    if function is None:
        raise ProcessMemoryError(errno.ENOSYS)
    local, remote = (ctypes.cast(pairs, ctypes.POINTER(_Run)) for pairs in (here, there))
    copied = function(pid, local, count, remote, count, 0)
    if copied != size_bytes:
        raise ProcessMemoryError(ctypes.get_errno() if copied < 0 else errno.EFAULT)


class _SharedSlices:
    """The slices of one copy that nobody has taken yet."""

    def __init__(self, copy_slice: Callable[[int, int], None], size_bytes: int) -> None:
        self._copy_slice = copy_slice
        self._threads = max(1, min(_most_threads(), size_bytes // THREAD_BYTES))
        self._left = deque(_slices(size_bytes, self._threads))
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None

    def copy(self) -> None:
        """Have all threads copy; raise the error of any of them once all have ended."""
        aside = self._threads - 1
        for _ in range(aside):
            run_in_background(self._help)
        self._work()
        for _ in range(aside):
            self._ended.acquire()
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        self._work()
        self._ended.release()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            try:
                self._copy_slice(*taken)
            except BaseException as error:
                self._left.clear()
                self._error = self._error or error

    def _take(self) -> tuple[int, int] | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None


def _slices(size_bytes: int, threads: int) -> list[tuple[int, int]]:
    """Offsets and sizes: as many for each thread, all of equal size but for the last."""
    turns = -(-size_bytes // (SLICE_BYTES * threads))
    each = -(-size_bytes // max(1, turns * threads))
    each = -(-each // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(offset, min(each, size_bytes - offset)) for offset in range(0, size_bytes, max(1, each))]


@functools.cache
def _most_threads() -> int:
    return min(MAX_THREADS, count_cores())
