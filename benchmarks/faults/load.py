"""The load that faults meet: calls, cells with output, collectives, payloads, each watched until it has ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.faults import on_rank
from benchmarks.faults.findings import Findings
from meshbook import Future, ProcMesh, errors
from meshbook.calls.output import OutputEvent, RankDone, StreamText
from meshbook.mesh.rank_calls import start_cell

ANSWERED_S = 60.0
PAYLOAD_ELEMENTS = 100_000  # float32: 400 kB, which travels in shared memory

numbers = itertools.count(1)  # one number per call, over all loads


class Watched:
    """A call under way: what it must give, when it ended and how."""

    def __init__(self, future: Future[Any], number: int, sort: str, expected: object) -> None:
        self.future, self.number, self.sort, self.expected = future, number, sort, expected
        self.sent_at = time.monotonic()
        self.ended_at = 0.0
        future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[Any]) -> None:
        self.ended_at = time.monotonic()

    def wait(self, deadline: float) -> bool:
        """Whether it ended by ``deadline``, a monotonic time."""
        try:
            self.future.exception(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return self.future.done()
        return True

    @property
    def error(self) -> BaseException | None:
        return self.future.exception(0)

    def results(self) -> Mapping[int, Any]:
        """Rank to result, of those that succeeded."""
        error = self.error
        if error is None:
            values = self.future.get(0)
            return dict(zip(values.ranks, values.values(), strict=True))
        return error.partial if isinstance(error, errors.CallError) else {}

    def wrong_results(self) -> list[str]:
        """A line for each rank whose result is not what it must be."""
        return [
            f"{self.sort} {self.number}: rank {rank} gave {value!r}"
            for rank, value in self.results().items()
            if self.expected is not None and value != self.expected
        ]


class NumberedCalls:
    """Calls of all ranks that note their number: each runs once, in order, and is answered."""

    def __init__(self, mesh: ProcMesh, findings: Findings) -> None:
        self.mesh = mesh
        self.findings = findings
        self._watched: list[Watched] = []
        mesh.run("ledger = []").get(ANSWERED_S)

    def send(self, count: int) -> None:
        for _ in range(count):
            number = len(self._watched) + 1
            self._watched.append(Watched(self.mesh.execute(on_rank.note, number), number, "call", number))

    def await_answers(self, after: str) -> None:
        """Wait for all answers, and time that. after: a fault."""
        began = time.monotonic()
        self.findings.hangs += [f"call {each.number}" for each in self._watched if not each.wait(began + ANSWERED_S)]
        self.findings.time(f"all answered after {after}", time.monotonic() - began)

    def judge(self) -> None:
        """Look at each answer, and at the ledgers."""
        self.findings.count("calls", len(self._watched))
        for each in self._watched:
            if each.error is not None:
                self.findings.wrong.append(f"call {each.number} failed with {each.error!r}")
            self.findings.wrong += each.wrong_results()
        expected = list(range(1, len(self._watched) + 1))
        for rank, ledger in enumerate(self.mesh.pull("ledger").get(ANSWERED_S).values()):
            if ledger != expected:
                self.findings.wrong.append(f"rank {rank} ran {len(ledger)} calls of {len(expected)}, or out of order")


class Printed:
    """Listens to a cell: what each rank printed, and when it ended."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.ended_at: dict[int, float] = {}
        self._changed = threading.Condition()

    def wait_for_end(self, rank: int, deadline: float) -> bool:
        """Whether ``rank`` has ended by ``deadline``, a monotonic time."""
        with self._changed:
            return self._changed.wait_for(lambda: rank in self.ended_at, max(0.0, deadline - time.monotonic()))

    def wait_for_text(self, rank: int, deadline: float) -> bool:
        """Whether ``rank`` has printed something by ``deadline``."""
        with self._changed:
            return self._changed.wait_for(lambda: rank in self.texts, max(0.0, deadline - time.monotonic()))

    def __call__(self, event: OutputEvent) -> None:
        if isinstance(event, RankDone):
            with self._changed:
                self.ended_at[event.rank] = time.monotonic()
                self._changed.notify_all()
        elif isinstance(event, StreamText) and event.stream == "stdout":
            with self._changed:
                self.texts[event.rank] = self.texts.get(event.rank, "") + event.text
                self._changed.notify_all()


class Load:
    """Sends calls to a mesh and remembers them."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.watched: list[Watched] = []
        self._printed: dict[int, Printed] = {}

    def send(self, each: int) -> None:
        """``each`` calls of every sort, without waiting for any."""
        for _ in range(each):
            self._watch("call", lambda number: self.mesh.execute(on_rank.note, number))
            self._watch("cell", self._start_cell)
            self._watch("payload", self._send_payload)
            self._watch("collective", lambda number: self.mesh.run(on_rank.COLLECTIVE.format(number=number)))

    def hold(self, code: str, **fields: int) -> tuple[Watched, Printed]:
        """Start a cell that lasts until something ends it."""
        number = next(numbers)
        printed = Printed()
        cell = start_cell(self.mesh, code.format(number=number, **fields), on_output=printed)
        held = Watched(cell.future, number, "held cell", None)
        self.watched.append(held)
        return held, printed

    def wrong_output(self) -> list[str]:
        """A line for each rank that ended a cell well and whose print did not arrive once."""
        return [
            f"cell {watched.number}: of rank {rank} came {self._printed[watched.number].texts.get(rank, '')!r}"
            for watched in self.watched
            if watched.number in self._printed
            for rank in watched.results()
            if self._printed[watched.number].texts.get(rank, "") != f"cell {watched.number}\n"
        ]

    def _watch(self, sort: str, start: Callable[[int], Future[Any]]) -> None:
        number = next(numbers)
        self.watched.append(Watched(start(number), number, sort, number))

    def _start_cell(self, number: int) -> Future[Any]:
        printed = self._printed[number] = Printed()
        return start_cell(self.mesh, on_rank.CELL.format(number=number), on_output=printed).future

    def _send_payload(self, number: int) -> Future[Any]:
        payload = torch.full((PAYLOAD_ELEMENTS,), float(number))
        return self.mesh.execute(on_rank.note, number, payload)
