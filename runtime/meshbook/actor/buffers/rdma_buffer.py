"""`RDMABuffer`: memory of one process that every process of the session can read and write, without the owner's part.

weights = RDMABuffer(tensor.view(-1))             # in the owner; small, to be sent in messages
weights.read_into(mine.view(-1)).get()            # anywhere, whatever the owner is doing
"""

from __future__ import annotations

import contextlib

from meshbook.actor.buffers.atomics import WORD_BYTES, AtomicChange, check_word
from meshbook.actor.buffers.memory import Memory, memory_of
from meshbook.actor.buffers.owned import DROP, READ, WRITE, kept_buffers
from meshbook.actor.buffers.transfer import Exchange, Transfer, TransferFuture, TransferTarget, ask
from meshbook.actor.context import context
from meshbook.actor.errors import BufferDroppedError, BufferKindError, BufferSizeError, SupervisionError
from meshbook.actor.router import current_router
from meshbook.concurrency.background import run_in_background
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
        kept = kept_buffers().add(memory, router)
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
        """How its bytes go between hosts; on one host they are copied from memory to memory."""
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
        """What `read_into` begins."""
        memory = memory_of(dst, "dst")
        if not memory.writable:
            raise BufferKindError("dst is read-only; give memory that can be written, such as a bytearray.")
        if memory.size_bytes < self.size():
            self._misfit("dst has", memory, "at least as much")
        return Transfer(self._target, memory, self.size(), READ, timeout)

    def writing_from(self, src: object, timeout: float | None) -> Transfer:
        """What `write_from` begins."""
        memory = memory_of(src, "src")
        if not self._writable:
            raise BufferKindError(f"{self._target.name} is read-only: its owner has made it of read-only memory.")
        if memory.size_bytes > self.size():
            self._misfit("src has", memory, "at most as much")
        return Transfer(self._target, memory, memory.size_bytes, WRITE, timeout)

    def exchanging(self, dst: object, change: AtomicChange, timeout: float | None) -> Exchange:
        """What changes the number in the first 8 bytes, and copies to ``dst`` what it was; see `RDMAAction`."""
        memory = memory_of(dst, "dst")
        check_word("dst", memory)
        if not self._writable or self.size() < WORD_BYTES:
            check_word(self._target.name, Memory(0, self.size(), self._writable, None))
        return Exchange(self._target, memory._replace(size_bytes=WORD_BYTES), change, timeout)

    def drop(self) -> TransferFuture:
        """Have the owner let go of the memory, from any process: at once, or when accesses under way have ended.

        Later ones get BufferDroppedError. Dropping it again, or when the owner has ended, does nothing.
        """
        future = TransferFuture()
        target = self._target

        def work() -> None:
            try:
                with contextlib.suppress(BufferDroppedError, SupervisionError, MeshStoppedError):
                    ask(target, DROP, (), None)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        if target.is_own:
            if (kept := kept_buffers().find(target.mailbox)) is not None:
                kept.drop()
            future.set_result(None)
            return future

        run_in_background(work)
        return future

    def _misfit(self, has: str, memory: Memory, needs: str) -> None:
        raise BufferSizeError(
            f"{has} {memory.size_bytes} bytes, the buffer {self.size()}: give {needs}, or a slice of its memory."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self._target, self._writable)

    def __repr__(self) -> str:
        return f"RDMABuffer({format_bytes(self.size())} of {self.owner})"


def _restore(target: TransferTarget, writable: bool) -> RDMABuffer:
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._target, buffer._writable = target, writable
    return buffer
