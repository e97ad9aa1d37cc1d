"""The store of a mesh's process groups, on the agents: host 0 keeps it, the other hosts ask there.

    worker of host 0 ──> agent 0: StoreHome ── answers at once, also while there is no controller
    other worker     ──> its agent: StoreRelay ──> controller ──> agent 0 ──> controller ──> StoreRelay ──> worker

A new controller hears all questions without an answer once more, so the home answers a question that it has answered
already with the same words: a counter never counts twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from meshbook.wire import messages as wire
from meshbook.wire.kv_store import DueAnswer, KeyValueStore, StoreOp, StoreResult

REMEMBERED_ANSWERS = 64  # for each rank on another host; far more than a rank has threads that ask at once

# ``deliver(rank, answer)`` gives it to that rank, and returns whether that is a worker of this host
Deliver = Callable[[int, wire.StoreAnswer], bool]

SendUrgent = Callable[[wire.FromHost], None]


StoreMessage: TypeAlias = (
    wire.StoreRequest | wire.StoreAnswer | wire.DropClient | wire.DropKeys | wire.StoreLost | wire.AskAgain
)


class StoreHome:
    """The store itself, on host 0."""

    def __init__(self, mesh: int, deliver: Deliver, send_urgent: SendUrgent) -> None:
        self._mesh, self._deliver, self._send_urgent = mesh, deliver, send_urgent
        self._store: KeyValueStore[int] = KeyValueStore()
        self._open: set[tuple[int, int]] = set()  # (rank, request) of questions from afar that wait
        # the last answers to each rank of another host, by request
        self._answered: dict[int, OrderedDict[int, StoreResult]] = {}

    def on_message(self, message: StoreMessage) -> None:
        """Take a message that the controller sends or passes on."""
        match message:
            case wire.StoreRequest(_, rank, request, op):  # of a worker of another host
                known = self._answered.setdefault(rank, OrderedDict()).get(request)
                if known is not None:
                    self._send_urgent(wire.StoreAnswer(self._mesh, rank, request, known))
                elif (rank, request) not in self._open:
                    self._open.add((rank, request))
                    self._send(self._store.request(rank, request, op))
            case wire.DropClient(_, rank):
                self.drop_client(rank)
            case wire.DropKeys(_, prefix):
                self._send(self._store.drop_prefix(prefix))
            case _:
                pass  # answers come from here, and this host is not lost

    def ask(self, rank: int, request: int, op: StoreOp) -> None:
        """Take a question of a worker of this host."""
        self._send(self._store.request(rank, request, op))

    def drop_client(self, rank: int) -> None:
        """Forget the questions of a rank that has ended."""
        self._store.drop_client(rank)
        self._answered.pop(rank, None)
        self._open = {question for question in self._open if question[0] != rank}

    def _send(self, answers: list[DueAnswer[int]]) -> None:
        for rank, request, result in answers:
            answer = wire.StoreAnswer(self._mesh, rank, request, result)
            if self._deliver(rank, answer):
                continue
            self._open.discard((rank, request))
            if (answered := self._answered.get(rank)) is not None:
                answered[request] = result
                if len(answered) > REMEMBERED_ANSWERS:
                    answered.popitem(last=False)
            self._send_urgent(answer)


class StoreRelay:
    """The relay on the other hosts: the questions on their way to the store."""

    def __init__(self, mesh: int, deliver: Deliver, send_urgent: SendUrgent) -> None:
        self._mesh, self._deliver, self._send_urgent = mesh, deliver, send_urgent
        self._open: dict[tuple[int, int], StoreOp] = {}
        self._lost = ""

    def on_message(self, message: StoreMessage) -> None:
        """Take a message that the controller sends or passes on."""
        match message:
            case wire.StoreAnswer():
                self._answer(message)
            case wire.StoreLost(_, reason):
                self._lost = f"the store of the process groups is gone: {reason}"
                for rank, request in list(self._open):
                    self._answer(wire.StoreAnswer(self._mesh, rank, request, StoreResult(error=self._lost)))
            case wire.AskAgain():  # a new controller does not know the open questions
                for (rank, request), op in self._open.items():
                    self._send_urgent(wire.StoreRequest(self._mesh, rank, request, op))
            case _:
                pass  # the rest is for the home

    def ask(self, rank: int, request: int, op: StoreOp) -> None:
        """Pass on a question of a worker of this host."""
        self._open[rank, request] = op
        if self._lost:
            self._answer(wire.StoreAnswer(self._mesh, rank, request, StoreResult(error=self._lost)))
        else:
            self._send_urgent(wire.StoreRequest(self._mesh, rank, request, op))

    def _answer(self, answer: wire.StoreAnswer) -> None:
        """Pass the home's answer on to a worker of this host."""
        if self._open.pop((answer.rank, answer.request), None) is not None:
            self._deliver(answer.rank, answer)

    def drop_client(self, rank: int) -> None:
        """Forget the questions of a rank that has ended."""
        self._open = {question: op for question, op in self._open.items() if question[0] != rank}
