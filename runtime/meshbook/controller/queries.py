"""Questions to ranks and to their agents: plain data both ways, answered while ranks are busy, or in their place.

    any thread ──gather──> put ──Query, urgent──> agents ──> control threads of ranks
               <──answers── `meshbook.calls.table.CallTable` <──Replies── either

A question ends when all who were asked have answered or are lost, at the latest when its time is over.
`HeldDeadlines` tells the ranks of a mesh when one of them stands at a prompt: the others may be waiting for it, so all
of them hold their deadlines.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from meshbook.calls.rank_state import Unresponsive, find_silence
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.controller.io_turns import TurnQueue
from meshbook.controller.mesh_state import MeshState
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import group
from meshbook.wire import messages as wire
from meshbook.wire.link import check_message

T = TypeVar("T")
STATES_TIMEOUT_S = 0.15  # agents answer at once


def ask_rank(endpoint: str, *args: object) -> wire.AskRank:
    """Return a question to control threads, of plain data. Raises: MessageTooLarge."""
    asked = wire.AskRank(endpoint, wire.encode(args))
    check_message(asked.args, ())
    return asked


def put(
    calls: CallTable,
    question: OpenQuestion[T],
    mesh: MeshState,
    by_host: Mapping[HostState, Sequence[int]],
    asked: wire.AskRank | wire.AskAgent | Callable[[Sequence[int]], wire.AskAgent],
    *,
    in_order: bool = False,
) -> None:
    """Ask the ranks of each host, or its agent about them, under the turn. asked: may be made for the ranks of a host.
    in_order: behind the calls that were sent, not before them."""
    for host, ranks in by_host.items():
        if host.lost or mesh.phase is MeshPhase.STOPPED:
            continue
        each = asked(ranks) if callable(asked) else asked
        if isinstance(each, wire.AskRank):
            question.ranks.update(rank for rank in ranks if rank not in mesh.lost)
        else:
            question.hosts.add(host.id)
        query = wire.Query(question.id, mesh.id, group(ranks), each)
        if in_order:
            host.send(query)
        else:
            host.send_urgent(query)
    calls.ask(question)


class Questions:
    """The questions that any thread may ask the ranks of a controller's meshes."""

    def __init__(self, turns: TurnQueue, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._turns, self._calls, self._next_id = turns, calls, next_id

    def gather(
        self,
        mesh: MeshState,
        ranks: Iterable[int],
        asked: wire.AskRank | wire.AskAgent | Callable[[Sequence[int]], wire.AskAgent],
        kind: type[T],
        timeout_s: float,
    ) -> dict[int, T]:
        """Ask ``ranks``, or their agents; return the answers by rank, as far as they came in time."""
        done: Future[None] = Future()
        question = OpenQuestion(self._next_id(), mesh.id, kind, timeout_s, lambda _: done.set_result(None))
        ranks = list(ranks)
        self._turns.submit(lambda: put(self._calls, question, mesh, mesh.by_host(ranks), asked), done.set_exception)
        with contextlib.suppress(TimeoutError):  # the table forgets the question by itself
            done.get(timeout_s)
        return question.told

    def first(
        self,
        mesh: MeshState,
        ranks: Sequence[int],
        asked: wire.AskRank,
        kind: type[T],
        *,
        patience_s: float,
        timeout_s: float,
    ) -> tuple[int, T | None] | None:
        """Ask the first of ``ranks``, after ``patience_s`` of silence the next too, and so on; return the first answer.
        Returns: the rank and its answer; None if no rank has answered within ``timeout_s``."""
        answered: Future[tuple[int, T | None]] = Future()
        deadline = time.monotonic() + timeout_s

        def note(question: OpenQuestion[T]) -> None:
            for answer in question.answers.items():
                answered.set_result(answer)

        for number, rank in enumerate(ranks, 1):
            left_s = deadline - time.monotonic()
            question = OpenQuestion(self._next_id(), mesh.id, kind, left_s, note)
            ask = functools.partial(put, self._calls, question, mesh, mesh.by_host([rank]), asked)
            self._turns.submit(ask, answered.set_exception)
            with contextlib.suppress(TimeoutError):
                return answered.get(left_s if number == len(ranks) else min(patience_s, left_s))
        return None

    def tell(self, mesh: MeshState, ranks: Iterable[int], asked: wire.AskRank) -> None:
        """Put a question without waiting for answers."""
        question = OpenQuestion(self._next_id(), mesh.id, object, 0.0)
        self._turns.submit(lambda: put(self._calls, question, mesh, mesh.by_host(ranks), asked))

    def await_printed(
        self, mesh: MeshState, ranks: Iterable[int], on_come: Callable[[], object], timeout_s: float
    ) -> None:
        """Call ``on_come``, under the turn, when all text has come that ``ranks`` have printed by now. Hosts that are
        silent are not waited for, the others at most ``timeout_s``."""
        question = OpenQuestion(self._next_id(), mesh.id, object, timeout_s, lambda _: on_come())

        def ask() -> None:
            by_host = {host: ranks for host, ranks in mesh.by_host(ranks).items() if not host.suspicion}
            put(self._calls, question, mesh, by_host, wire.AskPrinted())

        self._turns.submit(ask)


def look(
    questions: Questions, mesh: MeshState, ranks: Iterable[int], endpoint: str, kind: type[T], timeout_s: float
) -> dict[int, T | Unresponsive]:
    """Return the answers of ``ranks`` to a query, as ``kind``; for ranks that do not answer in time, the reason."""
    ranks = sorted(ranks)
    told = questions.gather(mesh, ranks, ask_rank(endpoint), kind, timeout_s)
    return {**told, **explain_silence(questions, mesh, [rank for rank in ranks if rank not in told])}


def explain_silence(questions: Questions, mesh: MeshState, ranks: Sequence[int]) -> dict[int, Unresponsive]:
    """Return why the control threads of ``ranks`` do not answer."""
    told = questions.gather(mesh, ranks, wire.AskProcesses(), wire.ProcessState, STATES_TIMEOUT_S) if ranks else {}
    states = {rank: told.state for rank, told in told.items()}
    return {rank: find_silence(states.get(rank), mesh.lost.get(rank), mesh.host_of(rank).suspicion) for rank in ranks}


class HeldDeadlines:
    """The stops of ranks at prompts (`StoppedRanks`), passed on to the ranks of their mesh."""

    def __init__(self, calls: CallTable, next_id: Callable[[], int]) -> None:
        self._calls, self._next_id = calls, next_id

    def on_prompted(self, mesh: MeshState, message: wire.Prompted) -> None:
        """Note that a rank has come to a prompt, has written there, or goes on."""
        with self._telling_of_changes(mesh):
            stop = mesh.stopped_ranks.take(message.rank, message.at, message.output)
        if stop is not None:
            self._calls.tell(message.output, stop)

    def merge(self, mesh: MeshState, prompts: Mapping[int, wire.AtPrompt]) -> None:
        """Take in the ranks' answers about their prompts; a former controller may have held deadlines."""
        for rank, at in prompts.items():
            mesh.stopped_ranks.take(rank, at, 0)
        self._tell_all(mesh)

    def on_ended(self, mesh: MeshState, ranks: Iterable[int]) -> None:
        """Note that ranks are at no prompt any more: they have ended, or are told to."""
        with self._telling_of_changes(mesh):
            for rank in ranks:
                mesh.stopped_ranks.lose(rank)

    def on_ready(self, mesh: MeshState) -> None:
        """Tell new ranks, if others stand at prompts."""
        if mesh.stopped_ranks:
            self._tell_all(mesh)

    @contextlib.contextmanager
    def _telling_of_changes(self, mesh: MeshState) -> Iterator[None]:
        """Tell all ranks if the block makes ranks stopped where none was before, or the other way round."""
        before = bool(mesh.stopped_ranks)
        yield
        if bool(mesh.stopped_ranks) != before:
            self._tell_all(mesh)

    def _tell_all(self, mesh: MeshState) -> None:
        question = OpenQuestion(self._next_id(), mesh.id, object, 0.0)
        everyone = mesh.by_host(range(mesh.extent.nelements))
        put(self._calls, question, mesh, everyone, ask_rank("hold_deadlines", bool(mesh.stopped_ranks)))
