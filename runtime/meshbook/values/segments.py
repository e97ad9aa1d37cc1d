"""Large payloads in shared memory: written once by their owner, mapped or copied by any process of the same host.

    owner                                              receivers
    SegmentPool.write(buffers)  -- SegmentRef -->      map_segment(ref, on_release)
      copies into a warm memfd                           opens /proc/<pid>/fd/<fd>, maps it privately
    SegmentPool.release(segment)  <-- all are done --  on_release(segment), when its last view has died

A receiver's mapping is copy-on-write: its writes stay its own. But a page that it has not written yet still shows the
owner's later writes, so the owner must not touch a segment before all receivers have let go, and their forked children
(`meshbook.values.lent_memory`). Memory is anonymous: it has no name in a file system, and it is gone with the last
process that holds it, however that ends.

A new memfd costs six times a warm one (its pages are allocated and zeroed), hence the pool. Two threads copy no faster
than one here. Small segments are copied by the receiver, which is faster than mapping where they are written, and frees
the owner at once: a list of a thousand results must not hold a thousand file descriptors of the owner. Ranks copy them
out of mappings that they keep (`KeptMappings`):

    stat /proc/<pid>/fd/<fd> ── inode ──> kept: copy out of the mapping                  one system call, no faults
                                  └─────> new:  open, look whether it is ours, map, keep; where all is taken, read

Owners use the same few segments again. An inode names the same memory for as long as it is mapped here. Mappings are
shared and read-only: they show the owner's last writes, and pin no more than `KEPT_MAX` segments of `KEPT_MAX_BYTES`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from meshbook.concurrency import forks
from meshbook.concurrency.interrupts import held_back
from meshbook.errors import LocalProtocolError, MeshError
from meshbook.formatting import format_bytes
from meshbook.system.descriptors import open_above
from meshbook.system.memory_files import (
    Bytes,
    create_memory_file,
    forbid_shrinking,
    is_memory_file,
    map_fd,
    may_be_mapped,
)
from meshbook.system.os_errors import explain
from meshbook.values.lent_memory import LentMapping
from meshbook.wire.frames import Buffer
from meshbook.wire.messages import SegmentRef

PAGE_BYTES = 4096
"""The begin of each buffer is on a page, so that it is aligned for any type and none shares a page with another."""

COPY_MAX_BYTES = 1 << 20
"""Segments up to this size are copied by the receiver instead of mapped."""

MAX_IDLE = 32
"""Segments kept warm; each holds a file descriptor."""

_MIN_CAPACITY_BYTES = 1 << 20

_numbers = itertools.count(1)  # of the process, so that two pools never share one


class _Segment:
    """A memfd of this process. Its first ``warm_bytes`` have pages; beyond, a write allocates them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.warm_bytes = 0
        self.fd = create_memory_file(_name(os.getpid()))
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, capacity_bytes)
            forbid_shrinking(self.fd)
            self.array = map_fd(self.fd, capacity_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise

    def fill(self, spans: Sequence[tuple[int, int]], buffers: Sequence[Buffer]) -> None:
        """Copy each buffer to its span; by pwrite where pages are new, which saves zeroing and faults."""
        import numpy as np

        for (offset, length), buffer in zip(spans, buffers, strict=True):
            if not length:
                continue
            source = np.frombuffer(buffer, dtype=np.uint8)
            if offset + length <= self.warm_bytes:
                np.copyto(self.array[offset : offset + length], source)
            else:
                done = 0
                while done < length:
                    done += os.pwrite(self.fd, source[done:].data, offset + done)
        self.warm_bytes = max(self.warm_bytes, _end(spans))

    def close(self) -> None:
        del self.array
        os.close(self.fd)


class SegmentPool:
    """The segments of one process. Any thread may call any method, the garbage collector `release`.

    capacity_bytes: the memory that may stay allocated while unused. Memory in use is not limited.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self._capacity_bytes = capacity_bytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._in_use: dict[int, _Segment] = {}
        self._idle: list[_Segment] = []
        """The segments that are not in use, the least recently used first."""
        self._closed = False

    @property
    def in_use(self) -> tuple[int, ...]:
        """The numbers that were handed out and not yet released."""
        return tuple(self._in_use)

    @property
    def idle_bytes(self) -> int:
        """Return the size of the memory that is kept warm for the next payloads."""
        return sum(segment.capacity_bytes for segment in tuple(self._idle))

    def write(self, buffers: Sequence[Buffer], position: int = 0) -> SegmentRef:
        """Copy ``buffers`` (each contiguous) into one segment, which stays in use until `release`.

        position: how many buffers as large as the first come before it where it is to be joined; it lies as far behind
        the begin of a page as it will there (`meshbook.system.memory_files.join_mapped`).
        The segment's number names this payload, not the memory, and is never used again.

        Raises: MeshError if the host has no memory or this process no file descriptor left for it.
        """
        spans = _lay_out(buffers, position)
        size_bytes = _end(spans)
        try:
            number, segment = self._take(size_bytes)
            try:
                segment.fill(spans, buffers)
            except BaseException:  # a keyboard interrupt too: nobody will ever release it
                self.release(number)
                raise
        except OSError as error:
            raise MeshError(
                f"no shared memory for a payload of {format_bytes(size_bytes)}: {explain(error)}. "
                f"{len(self._in_use)} earlier payloads are still in use on this host: delete results that nobody needs."
            ) from error
        return SegmentRef(self._pid, segment.fd, number, size_bytes, spans)

    def look_at(self, ref: SegmentRef, on_release: Callable[[int], None]) -> list[memoryview]:
        """Return the buffers of a payload of ours, which is in use; nobody may write to them.

        on_release: as of `map_segment`; the owner must not release the segment before it was called.
        """
        whole = self._in_use[ref.segment].array[: ref.size_bytes]
        made_in = forks.generation

        def release(segment: int) -> None:
            if made_in == forks.generation:  # a fork inherits our finalizers
                on_release(segment)

        weakref.finalize(whole, release, ref.segment).atexit = False
        view = whole.data  # all its slices hold it
        return [view[offset : offset + length] for offset, length in ref.spans]

    def release(self, segment: int) -> None:
        """Let the memory of ``segment`` be written again: all receivers are done with it. An unknown one is ignored."""
        self._released.append(segment)
        self._settle()

    def close(self) -> None:
        """Free everything, also segments in use: receivers keep their mappings, and can map no more."""
        with self._lock:
            self._closed = True
            segments = [*self._idle, *self._in_use.values()]
            self._idle.clear()
            self._in_use.clear()
        for segment in segments:
            segment.close()

    def _take(self, size_bytes: int) -> tuple[int, _Segment]:
        assert os.getpid() == self._pid, "a pool belongs to the process that made it"
        with self._lock:
            if self._closed:
                raise LocalProtocolError("this pool of shared memory was closed")
            number = next(_numbers)
            if (segment := self._take_idle(size_bytes)) is None:
                with held_back():  # an interrupt in between would leave memory that belongs to nobody
                    segment = self._in_use[number] = _Segment(_capacity_for(size_bytes))
            self._in_use[number] = segment
        self._settle()
        return number, segment

    def _take_idle(self, size_bytes: int) -> _Segment | None:
        """The smallest that fits, the latest used among equals; none that would waste most of its memory."""
        most = max(4 * size_bytes, 4 * _MIN_CAPACITY_BYTES)
        fitting = [segment for segment in reversed(self._idle) if size_bytes <= segment.capacity_bytes <= most]
        if not fitting:
            return None
        best = min(fitting, key=lambda segment: segment.capacity_bytes)
        self._idle.remove(best)
        return best

    def _settle(self) -> None:
        """Move released segments to the idle ones; a thread that is at it already looks again afterwards."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    if (segment := self._in_use.pop(self._released.popleft(), None)) is not None:
                        self._idle.append(segment)
                while self._idle and (self.idle_bytes > self._capacity_bytes or len(self._idle) > MAX_IDLE):
                    self._idle.pop(0).close()
            finally:
                self._lock.release()


def map_segment(ref: SegmentRef, on_release: Callable[[int], None], kept: KeptMappings | None = None) -> list[Bytes]:
    """Return the payload's buffers, writable; writes stay in this process.

    on_release: called with the segment's number exactly once, also when this raises: as soon as the segment
        is no longer needed: when the last view of the buffers has died, here and in the children that were forked
        meanwhile. It runs wherever that happens (any thread, inside any allocation), so it may only note the
        number. A process that ends does not call it, and neither does a fork of this one.
    kept: where mappings of small segments are kept.
    Raises: MeshError if the owner has ended or has released the segment, or may not be looked at.
    """
    released = LentMapping(on_release, ref.segment)
    try:
        whole = _map_or_copy(ref, released, kept)
    except BaseException as error:
        released()
        if isinstance(error, OSError):
            raise MeshError(_explain(ref, error)) from error
        raise
    return [whole[offset : offset + length] for offset, length in ref.spans]


def _map_or_copy(ref: SegmentRef, released: Callable[[], None], kept: KeptMappings | None) -> Bytes:
    path = f"/proc/{ref.pid}/fd/{ref.fd}"
    small = ref.size_bytes <= COPY_MAX_BYTES
    if small and kept is not None and (whole := kept.copy(path, ref.size_bytes)) is not None:
        released()
        return whole
    if not is_memory_file(path, _name(ref.pid)):
        raise FileNotFoundError  # the owner has closed it, and the number means something else by now
    fd = open_above(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # enough for a private mapping
    try:
        if not may_be_mapped(fd, ref.size_bytes):
            raise OSError(0, "it is shorter than was said, or could become so")
        if not small:
            return map_fd(fd, ref.size_bytes, mmap.MAP_PRIVATE, released)
        whole = read(fd, ref.size_bytes)
        released()
        if kept is not None:
            kept.keep(fd)
        return whole
    finally:
        os.close(fd)


def _explain(ref: SegmentRef, error: OSError) -> str:
    what = f"a payload of {format_bytes(ref.size_bytes)} that process {ref.pid} holds in shared memory"
    if isinstance(error, PermissionError):
        return f"{what} may not be read here: the processes run as different users or in different containers."
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        ended = not Path(f"/proc/{ref.pid}").exists()
        why = "has ended" if ended else "has freed it, or runs in another container"
        return f"{what} is gone: process {ref.pid} {why}."
    return f"{what} could not be mapped: {error.strerror}."


def _name(pid: int) -> str:
    return f"meshbook-{pid}"


def _lay_out(buffers: Sequence[Buffer], position: int) -> tuple[tuple[int, int], ...]:
    spans, offset = [], position * memoryview(buffers[0]).nbytes % PAGE_BYTES if position else 0
    for buffer in buffers:
        length = memoryview(buffer).nbytes
        spans.append((offset, length))
        offset = -(-(offset + length) // PAGE_BYTES) * PAGE_BYTES
    return tuple(spans)


def _end(spans: Sequence[tuple[int, int]]) -> int:
    return max((offset + length for offset, length in spans), default=0)


def _capacity_for(size_bytes: int) -> int:
    """Round up by at most an eighth, so that payloads of similar sizes share segments."""
    step = max(_MIN_CAPACITY_BYTES, (1 << max(size_bytes - 1, 0).bit_length()) // 8)
    return max(1, -(-size_bytes // step)) * step


KEPT_MAX = 32
KEPT_MAX_BYTES = 2 << 20
"""Larger segments are read, since a mapping would pin too much memory that their owner has given up."""

UNUSED_S = 10.0
"""The time after which an unused mapping makes room, where all is taken."""


class _Kept:
    """A mapping, and when it was used last."""

    def __init__(self, array: Bytes) -> None:
        self.array, self.used_s = array, time.monotonic()


class KeptMappings:
    """The mappings of one process. Any thread may call any method, a fork as well: it reads its parent's mappings."""

    def __init__(self) -> None:
        self._filling = threading.Lock()
        self._kept: dict[tuple[int, int], _Kept] = {}
        """The mappings by device and inode."""

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
