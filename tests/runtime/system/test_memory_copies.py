"""Memory of another process: every byte is copied once, whoever fails ends it, and nobody copies afterwards."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from meshbook.system import memory_copies
from meshbook.system.memory_copies import SLICE_BYTES, THREAD_BYTES, ProcessMemoryError, copy_process_memory
from meshbook.system.memory_files import Bytes

pytestmark = pytest.mark.slow

SIZES = [1, 4097, THREAD_BYTES * 2 - 1, THREAD_BYTES * 2, SLICE_BYTES * 2 + 12_345, SLICE_BYTES * 5 + 1]
MARGIN = 64
"""Bytes around what is copied, which stay as they are."""


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many threads as that, whatever the cores of this machine."""
    count: int = request.param
    monkeypatch.setattr(memory_copies, "_most_threads", lambda: count)
    return count


@contextmanager
def fork_holding(memory: Bytes) -> Iterator[int]:
    """A process with these bytes at the same address."""
    ends, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    try:
        yield pid
    finally:
        os.close(tell)
        os.waitpid(pid, 0)


def numbered(size_bytes: int) -> Bytes:
    """Bytes of which no slice is like another."""
    return (np.arange(size_bytes, dtype=np.uint32) * 2_654_435_761 >> 13).astype(np.uint8)


def never() -> None:
    """A copy that is always wanted."""


@pytest.mark.some()
@pytest.mark.quick("1-1-0")
@pytest.mark.parametrize("shift", [0, 1, 13])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_each_byte_is_read_and_written_and_none_beside_it(size_bytes: int, shift: int) -> None:
    theirs = numbered(size_bytes + 2 * MARGIN)
    mine = np.full(size_bytes + 2 * MARGIN, 7, np.uint8)
    with fork_holding(theirs) as pid:
        there, here = theirs.ctypes.data + shift, mine.ctypes.data + MARGIN
        copy_process_memory(pid, there, here, size_bytes, write=False, check=never)
        assert np.array_equal(mine[MARGIN:-MARGIN], theirs[shift : shift + size_bytes])
        assert (mine[:MARGIN] == 7).all() and (mine[-MARGIN:] == 7).all()

        mine[MARGIN:-MARGIN] = numbered(size_bytes)[::-1]
        copy_process_memory(pid, there, here, size_bytes, write=True, check=never)
        back = np.zeros_like(theirs)
        copy_process_memory(pid, theirs.ctypes.data, back.ctypes.data, back.nbytes, write=False, check=never)
        assert np.array_equal(back[shift : shift + size_bytes], mine[MARGIN:-MARGIN])
        assert np.array_equal(back[:shift], theirs[:shift])
        assert np.array_equal(back[shift + size_bytes :], theirs[shift + size_bytes :])


@pytest.mark.some("1")
def test_what_the_check_raises_ends_the_copy_for_all_threads(threads: int) -> None:
    memory = numbered(SLICE_BYTES * 12)
    mine = np.zeros_like(memory)
    asked: list[int] = []
    lock = threading.Lock()

    def check() -> None:
        with lock:
            asked.append(1)
            if len(asked) > 3:
                raise TimeoutError("it is late")

    with fork_holding(memory) as pid:
        with pytest.raises(TimeoutError, match="it is late"):
            copy_process_memory(pid, memory.ctypes.data, mine.ctypes.data, mine.nbytes, write=False, check=check)
        before = mine.copy()
        assert len(asked) < 4 + threads and not np.array_equal(mine, memory)
        assert np.array_equal(before, mine)


@pytest.mark.quick("3")
def test_a_process_that_dies_in_the_midst_is_told_of() -> None:
    memory = numbered(SLICE_BYTES * 12)
    mine = np.zeros_like(memory)
    lock = threading.Lock()
    asked: list[int] = []
    with fork_holding(memory) as pid:

        def kill_at_the_third() -> None:
            with lock:
                asked.append(1)
                if len(asked) == 3:
                    os.kill(pid, signal.SIGKILL)
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        with pytest.raises(ProcessMemoryError) as told:
            copy_process_memory(
                pid, memory.ctypes.data, mine.ctypes.data, mine.nbytes, write=False, check=kill_at_the_third
            )
    assert told.value.code in (errno.ESRCH, errno.EFAULT)
    assert str(told.value).startswith("the memory of another process cannot be copied: ")


def test_memory_that_is_not_there_is_told_of() -> None:
    mine = np.zeros(SLICE_BYTES * 3, np.uint8)
    with fork_holding(mine) as pid, pytest.raises(ProcessMemoryError) as told:
        copy_process_memory(pid, 4096, mine.ctypes.data, mine.nbytes, write=False, check=never)
    assert told.value.code == errno.EFAULT


def test_a_kernel_that_knows_no_such_copies_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copies, "_libc", object())
    memory = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessMemoryError) as told:
        copy_process_memory(
            os.getpid(), ctypes.addressof(memory), ctypes.addressof(memory), 8, write=False, check=never
        )
    assert told.value.code == errno.ENOSYS
