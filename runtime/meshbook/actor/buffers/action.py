"""`RDMAAction`: several copies between buffers and memory of this process, and changes of counters, as one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from meshbook.actor.buffers.atomics import AtomicChange, check_operand
from meshbook.actor.buffers.memory import Memory
from meshbook.actor.buffers.rdma_buffer import RDMABuffer
from meshbook.actor.buffers.transfer import Exchange, Transfer, TransferFuture
from meshbook.actor.errors import BufferKindError


class _QueuedCopy(NamedTuple):
    """A copy to be made. local: the memory of this process; it is written where ``reads``."""

    begin: Callable[[float | None], Transfer | Exchange]
    local: Memory
    reads: bool

    def clashes(self, other: _QueuedCopy) -> bool:
        """Whether both use the same bytes of this process, and one of them writes there."""
        ends = [queued.local.address + queued.local.size_bytes for queued in (self, other)]
        apart = ends[0] <= other.local.address or ends[1] <= self.local.address
        return not apart and (self.reads or other.reads)


class RDMAAction:
    """Copies that are made side by side and are done together.

    action = RDMAAction().read_remote(mine, weights).write_remote(gradients, update)
    action.submit().get()              # any number of times
    """

    def __init__(self) -> None:
        self._queued: list[_QueuedCopy] = []

    def read_remote(self, dst: object, src: RDMABuffer) -> RDMAAction:
        """Add a copy of the whole of ``src`` to the begin of ``dst``.

        Raises: BufferKindError, BufferSizeError, as `RDMABuffer.read_into`; BufferKindError where ``dst`` has memory in
        common with what another copy of the action reads or writes.
        """
        return self._add(src.reading_into, dst, reads=True)

    def write_remote(self, dst: RDMABuffer, src: object) -> RDMAAction:
        """Add a copy of ``src`` to the begin of ``dst``. Raises: as `read_remote`."""
        return self._add(dst.writing_from, src, reads=False)

    def fetch_add(self, src: RDMABuffer, dst: object, add: int) -> RDMAAction:
        """Add ``add`` to the number in the first 8 bytes of ``src``; ``dst`` gets what it was.

        Numbers are of 64 bits, the lowest byte first, and wrap around. Of several that change one buffer, wherever
        they are, each comes before or after the others; copies of the same bytes are not kept apart from them.
        Raises: as `read_remote`; BufferSizeError for less than 8 bytes, UsageError for other numbers.
        """
        change = AtomicChange(check_operand("add", add))
        return self._add(lambda memory, timeout: src.exchanging(memory, change, timeout), dst, reads=True)

    def compare_and_swap(self, src: RDMABuffer, dst: object, compare: int, swap: int) -> RDMAAction:
        """Where the number is ``compare``, have it be ``swap``; ``dst`` gets what it was. As `fetch_add` otherwise."""
        change = AtomicChange(check_operand("swap", swap), check_operand("compare", compare))
        return self._add(lambda memory, timeout: src.exchanging(memory, change, timeout), dst, reads=True)

    def _add(
        self, make: Callable[[object, float | None], Transfer | Exchange], memory: object, *, reads: bool
    ) -> RDMAAction:
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
        """Make the copies. Done when all have ended, well or not.

        timeout: seconds, for each. Raises, when asked: what the first of them raises, with notes of the others.
        """
        transfers = [queued.begin(timeout) for queued in self._queued]
        return _SubmittedCopies(transfers).begin()

    def __len__(self) -> int:
        return len(self._queued)

    def __repr__(self) -> str:
        return f"RDMAAction({len(self)} copies)"


class _SubmittedCopies:
    def __init__(self, transfers: list[Transfer | Exchange]) -> None:
        self._transfers, self._left = transfers, len(transfers)
        self._lock = threading.Lock()
        self._future = TransferFuture(on_cancel=self._cancel)

    def begin(self) -> TransferFuture:
        if not self._transfers:
            self._future.set_result(None)
        for transfer in self._transfers:
            transfer.begin().add_done_callback(lambda _: self._on_end())
        return self._future

    def _on_end(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        errors = [error for each in self._transfers if (error := each.future.exception(0)) is not None]
        if not errors:
            self._future.set_result(None)
            return
        first, *others = errors
        notes = [*getattr(first, "__notes__", ()), *(f"and: {type(error).__name__}: {error}" for error in others)]
        first.__notes__ = notes
        self._future.set_exception(first)

    def _cancel(self) -> None:
        for transfer in self._transfers:
            transfer.future.cancel()
