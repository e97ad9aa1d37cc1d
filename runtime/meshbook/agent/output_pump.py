"""The output of ranks on its way from their agent to the controller, and the amounts kept while no controller listens.

Text that several ranks have printed alike between two turns travels once. Ranks that are ahead do not wait for the
others: text that waits counts against the amount that a rank may print before it is cut.

Output that is not kept is counted and named by `wire.OutputDropped`, the value of a result by a reply without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

import msgspec

from meshbook.agent.resources import OfflineQuota
from meshbook.agent.worker import AgentWorker
from meshbook.agent.worker_pool import WorkerPool
from meshbook.system.event_loop import EventLoop
from meshbook.wire import messages as wire
from meshbook.wire.link import Uplink
from meshbook.wire.messages import SharedText, StreamText

FLUSH_S = 0.05  # output waits so long for more of it
MESSAGE_CHARS = 1 << 20  # of text in one message
UNDER_WAY_BYTES = 512 << 20  # the ranks' output is counted and left out when so much is on its way to the controller


class OutputPump:
    """The output of one mesh on one host. pool: the workers that print."""

    def __init__(self, loop: EventLoop, uplink: Uplink, quota: OfflineQuota, pool: WorkerPool) -> None:
        self._loop, self._uplink, self._quota, self._pool = loop, uplink, quota, pool
        self._is_due = False

    def on_output(self) -> None:
        """Send output soon, together with more that follows."""
        if not self._is_due and self._quota.listening:
            self._is_due = True
            self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Send the prints of all ranks."""
        self._is_due = False
        if not self._quota.listening:
            return  # it waits, and what is too much is counted and cut
        self._send_texts([self._take(worker) for worker in self._pool.workers.values()])
        if any(worker.output.waiting for worker in self._pool.workers.values()):
            self.on_output()

    def send(self, worker: AgentWorker, *, final: bool = False) -> None:
        """Send the output of one worker. final: all of it, though more could follow."""
        if final:
            worker.drain()
        self._send_own(worker, self._take(worker, final=final))

    def _take(self, worker: AgentWorker, *, final: bool = False) -> list[StreamText]:
        """Send the output up to the last rich one, as far as it may be sent now; return the texts behind that."""
        parts, cuts = worker.output.take(time.monotonic(), final=final)
        self._send_cuts(worker, cuts)
        texts: list[StreamText] = []
        for part in parts:
            if isinstance(part, StreamText):
                texts.append(part)
            else:
                self._send_own(worker, _joined(texts, worker.rank))
                texts = []
                size = sum(map(len, part.payload))
                is_much = size + self._uplink.connection.calls_bytes > UNDER_WAY_BYTES
                if not is_much and self._quota.output(size):
                    self._uplink.send(msgspec.structs.replace(part.message, rank=worker.rank), part.payload)
                else:
                    self._send_cuts(worker, worker.output.cut(part.message.output, size))
        return _joined(texts, worker.rank)

    def _send_own(self, worker: AgentWorker, pieces: list[StreamText]) -> None:
        """Send the texts of one rank, if the quota allows."""
        if not pieces:
            return
        if self._quota.output(sum(len(piece.text) for piece in pieces)):
            self._send_texts([pieces])
        else:
            for piece in pieces:
                self._send_cuts(worker, worker.output.cut(piece.output, len(piece.text)))

    def _send_texts(self, runs: list[list[StreamText]]) -> None:
        """Send the texts of ranks, each its own run; equal texts once."""
        for texts in _in_messages(_shared(runs)):
            self._uplink.send(wire.StreamTexts(texts))

    def send_logged(self, worker: AgentWorker, message: wire.Logged, payload: list[bytes]) -> None:
        """Send scalars; what is beyond the amounts for output is left out, as curves show."""
        size = sum(map(len, payload))
        if size + self._uplink.connection.calls_bytes <= UNDER_WAY_BYTES and self._quota.output(size):
            self._uplink.send(message, payload)

    def _send_cuts(self, worker: AgentWorker, cuts: dict[int, int]) -> None:
        for output, size in cuts.items():
            log = worker.output.log
            self._uplink.send(wire.OutputDropped(worker.rank, size, str(log.path), output, log.lacks))


def _in_messages(texts: Iterable[SharedText]) -> Iterator[tuple[SharedText, ...]]:
    """Group texts into messages of `MESSAGE_CHARS` or little more."""
    taken: list[SharedText] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text.text)
        if size >= MESSAGE_CHARS:
            yield tuple(taken)
            taken, size = [], 0
    if taken:
        yield tuple(taken)


def _joined(pieces: list[StreamText], rank: int) -> list[StreamText]:
    """Join neighbours of one output and stream to one text of ``rank``."""
    runs = [list(run) for _, run in groupby(pieces, lambda piece: (piece.output, piece.stream))]
    return [
        StreamText(rank, run[0].stream, "".join([piece.text for piece in run]), run[0].output, run[0].place)
        for run in runs
    ]


def _shared(runs: list[list[StreamText]]) -> Iterator[SharedText]:
    """Yield the first texts of all ranks, then the second ones, and so on: equal ones as one."""
    for step in zip_longest(*runs):
        ranks: dict[tuple[str, int, int, str], list[int]] = {}
        for piece in step:
            if piece is not None:
                ranks.setdefault((piece.stream, piece.output, piece.place, piece.text), []).append(piece.rank)
        for (stream, output, place, text), of in ranks.items():
            yield SharedText(tuple(of), stream, text, output, place)
