"""`RDMABuffer`: memory of one process that every process of the session can read and write, without the owner's part.

weights = RDMABuffer(tensor.view(-1))             # in the owner; small, to be sent in messages
weights.read_into(mine.view(-1)).get()            # anywhere, whatever the owner is doing

`RDMAAction` is several copies between buffers and memory of this process as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from meshbook.actor.buffers.memory import Memory, memory_of
from meshbook.actor.buffers.transfers import (
    DROP,
    READ,
    WRITE,
    KeptBuffer,
    Transfer,
    TransferFuture,
    TransferTarget,
    begin,
    finish,
)
from meshbook.actor.context import context
from meshbook.actor.errors import BufferDroppedError, BufferKindError, BufferSizeError, SupervisionError
from meshbook.actor.router import current_router
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future, in_background
from meshbook.errors import MeshStoppedError
from meshbook.formatting import format_bytes


class RDMABuffer:
    """Memory of the process that makes it, for all processes of the session. The handle is small and can be sent.

    The owner keeps the memory alive until `drop`, and must not resize it. Reading and writing at the same time is for
    the program to avoid.
    """

    def __init__(self, data: object) -> None:
        """data: a tensor in host memory, an array, a memoryview or a bytearray; one dim, without gaps.

        Raises: BufferKindError; BufferSizeError where there is none.
        """
        memory = memory_of(data, "the memory for the buffer")
        if not memory.size_bytes:
            raise BufferSizeError("the memory for the buffer has no bytes; give some.")
        router = current_router()
        kept = KeptBuffer(router, memory)
        place = router.place
        instance = context().actor_instance
        process = "the notebook's process" if place.mesh == 0 else f"rank {place.rank}"
        owner = instance.actor_id if instance.mailbox else process
        self._target = TransferTarget(router.session, place, kept.mailbox, memory.size_bytes, owner, kept.spot)
        self._writable = memory.writable

    def size(self) -> int:
        """The size of the buffer in bytes."""
        return self._target.size_bytes

    @property
    def backend(self) -> str:
        """The transport between hosts; on one host bytes are copied from memory to memory."""
        return "tcp"

    @property
    def owner(self) -> str:
        """The actor that made it (``main.trainers[3]``), or the process."""
        return self._target.owner

    def read_into(self, dst: object, *, timeout: float | None = None) -> TransferFuture:
        """Copy the whole buffer to the begin of ``dst``: memory as the constructor takes it, at least as large.

        timeout: seconds. Raises: BufferKindError, BufferSizeError, at once; the future: BufferDroppedError,
        SupervisionError if the owner has ended, CallTimeout.
        """
        return self.reading_into(dst, timeout).begin()

    def write_from(self, src: object, *, timeout: float | None = None) -> TransferFuture:
        """Copy ``src``, which is not larger, to the begin of the buffer. Otherwise as `read_into`."""
        return self.writing_from(src, timeout).begin()

    def reading_into(self, dst: object, timeout: float | None) -> Transfer:
        """Return the copy that `read_into` begins."""
        memory = memory_of(dst, "dst")
        if not memory.writable:
            raise BufferKindError("dst is read-only; give memory that can be written, such as a bytearray.")
        if memory.size_bytes < self.size():
            self._misfit("dst has", memory, "at least as much")
        return Transfer(self._target, memory, self.size(), READ, timeout)

    def writing_from(self, src: object, timeout: float | None) -> Transfer:
        """Return the copy that `write_from` begins."""
        memory = memory_of(src, "src")
        if not self._writable:
            raise BufferKindError(f"{self._target.name} is read-only: its owner has made it of read-only memory.")
        if memory.size_bytes > self.size():
            self._misfit("src has", memory, "at most as much")
        return Transfer(self._target, memory, memory.size_bytes, WRITE, timeout)

    def drop(self) -> Future[None]:
        """Have the owner let go of the memory, from any process: at once, or when accesses under way have ended.

        Later ones get BufferDroppedError. Dropping it again, or when the owner has ended, does nothing.
        """

        def work() -> None:
            with contextlib.suppress(BufferDroppedError, SupervisionError, MeshStoppedError):
                finish(self._target, begin(self._target, DROP, ()), None)

        return in_background(work)

    def _misfit(self, has: str, memory: Memory, needs: str) -> None:
        raise BufferSizeError(
            f"{has} {memory.size_bytes} bytes, the buffer {self.size()}: give {needs}, or a slice of its memory."
        )

    def __repr__(self) -> str:
        return f"RDMABuffer({format_bytes(self.size())} of {self.owner})"


class _QueuedCopy(NamedTuple):
    """A copy to be made. local: the memory of this process, which is written if ``reads``."""

    make: Callable[[float | None], Transfer]
    local: Memory
    reads: bool

    def clashes(self, other: _QueuedCopy) -> bool:
        """Whether both use the same bytes of this process, and one of them writes there."""
        ends = [queued.local.address + queued.local.size_bytes for queued in (self, other)]
        apart = ends[0] <= other.local.address or ends[1] <= self.local.address
        return not apart and (self.reads or other.reads)


class RDMAAction:
    """A group of copies that are made side by side and complete together.

    action = RDMAAction().read_remote(mine, weights).write_remote(gradients, update)
    action.submit().get()              # any number of times
    """

    def __init__(self) -> None:
        self._queued: list[_QueuedCopy] = []

    def read_remote(self, dst: object, src: RDMABuffer) -> RDMAAction:
        """Add a copy of the whole of ``src`` to the begin of ``dst``.

        Raises: BufferKindError, BufferSizeError, as `RDMABuffer.read_into`; BufferKindError where ``dst`` shares memory
        with another copy of the action.
        """
        return self._add(src.reading_into, dst, reads=True)

    def write_remote(self, dst: RDMABuffer, src: object) -> RDMAAction:
        """Add a copy of ``src`` to the first bytes of ``dst``. Raises: as `read_remote`."""
        return self._add(dst.writing_from, src, reads=False)

    def _add(self, make: Callable[[object, float | None], Transfer], memory: object, *, reads: bool) -> RDMAAction:
        local = make(memory, None).memory  # now, so that what does not fit is refused where it is written
        queued = _QueuedCopy(lambda timeout: make(memory, timeout), local, reads)
        if any(queued.clashes(other) for other in self._queued):
            raise BufferKindError(
                "two copies of one action use the same memory of this process, and one of them writes there: which "
                "comes first is not known. Make two actions, one after the other."
            )
        self._queued.append(queued)
        return self

    def submit(self, *, timeout: float | None = 60) -> TransferFuture:
        """Make the copies. The future completes when all have ended, well or not.

        timeout: seconds, for each. Raises, when asked: the first error of a copy, with notes of the others.
        """
        copies = [queued.make(timeout).begin() for queued in self._queued]
        submitted = TransferFuture(on_cancel=lambda: [copy.cancel() for copy in copies])

        def settle() -> None:
            errors = [error for copy in copies if (error := copy.exception()) is not None]
            if not errors:
                submitted.set_result(None)
                return
            first, *others = errors
            more = (f"and: {type(error).__name__}: {error}" for error in others)
            first.__notes__ = [*getattr(first, "__notes__", ()), *more]
            submitted.set_exception(first)

        if all(copy.done() for copy in copies):
            settle()
        else:
            run_in_background(settle)
        return submitted

    def __len__(self) -> int:
        return len(self._queued)

    def __repr__(self) -> str:
        return f"RDMAAction({len(self)} copies)"
