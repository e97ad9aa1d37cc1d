"""What ranks print, on its way from their agent to the controller; and how much is kept while that does not listen.

What several ranks have printed alike between two turns travels once. Ranks that are ahead do not wait for the others:
what waits takes from what a rank may print before it is cut.

Whatever is not kept is counted and named: output as `wire.OutputDropped`, the value of a result by a reply without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

import msgspec

from meshbook.agent.output import ShownDisplay
from meshbook.agent.worker import AgentWorker
from meshbook.agent.worker_pool import WorkerPool
from meshbook.system.event_loop import EventLoop
from meshbook.wire import messages as wire
from meshbook.wire.messages import SharedText, StreamText
from meshbook.wire.uplink import Uplink

FLUSH_S = 0.05
"""How long output may wait for more of it."""

MESSAGE_CHARS = 1 << 20
"""Of text in one message."""

UNDER_WAY_BYTES = 512 << 20
"""With so much on its way to the controller what ranks show is counted and left out."""

KEPT_OUTPUT_BYTES = 16 << 20
"""Of all meshes of the host; the logs have the rest."""

KEPT_RESULT_BYTES = 1 << 30
"""Of all meshes of the host, payloads in the shared memory of workers included."""


class OfflineQuota:
    """Counts from the moment when nobody listens any more."""

    def __init__(self) -> None:
        self.listening = True
        self._output_bytes = self._result_bytes = 0

    def begin(self) -> None:
        """Nobody listens from now on."""
        self.listening = False
        self._output_bytes = self._result_bytes = 0

    def end(self) -> None:
        """Somebody listens again from now on."""
        self.listening = True

    def output(self, size_bytes: int) -> bool:
        """Whether to send output, or keep it; False: it must be cut."""
        if self.listening:
            return True
        self._output_bytes += size_bytes
        return self._output_bytes <= KEPT_OUTPUT_BYTES

    def result(self, size_bytes: int) -> bool:
        """Whether to send a result, or keep it; False: the value must go, and the reply says so."""
        if self.listening:
            return True
        self._result_bytes += size_bytes
        return self._result_bytes <= KEPT_RESULT_BYTES


class OutputPump:
    """The output of one mesh on one host. pool: of those that print."""

    def __init__(self, loop: EventLoop, uplink: Uplink, quota: OfflineQuota, pool: WorkerPool) -> None:
        self._loop, self._uplink, self._quota, self._pool = loop, uplink, quota, pool
        self._is_due = False

    def on_output(self) -> None:
        """Something was printed: send it soon, together with what follows."""
        if not self._is_due and self._quota.listening:
            self._is_due = True
            self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Send what all ranks have printed."""
        self._is_due = False
        if not self._quota.listening:
            return  # it waits, and what is too much is counted and cut
        self._send_texts([self._take(worker) for worker in self._pool.workers.values()])
        if any(worker.output.waiting for worker in self._pool.workers.values()):
            self.on_output()

    def send(self, worker: AgentWorker, *, final: bool = False) -> None:
        """Send what one worker has printed. final: all of it, also what more could follow."""
        if final:
            worker.drain()
        self._send_own(worker, self._take(worker, final=final))

    def _take(self, worker: AgentWorker, *, final: bool = False) -> list[StreamText]:
        """What may be sent now; of that, send what stands before rich output, and return the texts behind it."""
        parts, cuts = worker.output.take(time.monotonic(), final=final)
        self._send_cuts(worker, cuts)
        texts: list[StreamText] = []
        for part in parts:
            if isinstance(part, StreamText):
                texts.append(part)
            else:
                self._send_own(worker, _joined(texts, worker.rank))
                texts = []
                self._send_shown(worker, part)
        return _joined(texts, worker.rank)

    def _send_own(self, worker: AgentWorker, pieces: list[StreamText]) -> None:
        """Send what one rank has printed, if the quota allows."""
        if not pieces:
            return
        if self._quota.output(sum(len(piece.text) for piece in pieces)):
            self._send_texts([pieces])
        else:
            for piece in pieces:
                self._send_cuts(worker, worker.output.cut(piece.output, len(piece.text)))

    def _send_texts(self, runs: list[list[StreamText]]) -> None:
        """Send what ranks have printed, each its own run; equal texts once."""
        for texts in _in_messages(_shared(runs)):
            self._uplink.send(wire.StreamTexts(texts))

    def _send_shown(self, worker: AgentWorker, shown: ShownDisplay) -> None:
        is_much = (size := sum(map(len, shown.payload))) + self._uplink.unacked_bytes > UNDER_WAY_BYTES
        if not is_much and self._quota.output(size):
            self._uplink.send(msgspec.structs.replace(shown.message, rank=worker.rank), shown.payload)
        else:
            self._send_cuts(worker, worker.output.cut(shown.message.output, size))

    def _send_cuts(self, worker: AgentWorker, cuts: dict[int, int]) -> None:
        for output, size in cuts.items():
            log = worker.output.log
            self._uplink.send(wire.OutputDropped(worker.rank, size, str(log.path), output, log.lacks))


def _in_messages(texts: Iterable[SharedText]) -> Iterator[tuple[SharedText, ...]]:
    """Cut at `MESSAGE_CHARS` or soon after."""
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
    """Neighbours of one output and stream as one text of ``rank``."""
    runs = [list(run) for _, run in groupby(pieces, lambda piece: (piece.output, piece.stream))]
    return [
        StreamText(rank, run[0].stream, "".join([piece.text for piece in run]), run[0].output, run[0].place)
        for run in runs
    ]


def _shared(runs: list[list[StreamText]]) -> Iterator[SharedText]:
    """The first texts of all ranks, then the second ones, and so on: equal ones as one."""
    for step in zip_longest(*runs):
        ranks: dict[tuple[str, int, int, str], list[int]] = {}
        for piece in step:
            if piece is not None:
                ranks.setdefault((piece.stream, piece.output, piece.place, piece.text), []).append(piece.rank)
        for (stream, output, place, text), of in ranks.items():
            yield SharedText(tuple(of), stream, text, output, place)
