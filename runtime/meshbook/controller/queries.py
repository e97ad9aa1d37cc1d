"""What ranks are doing, asked of their control threads; and of their agents, where those threads do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from meshbook.calls.rank_state import Unresponsive, find_silence
from meshbook.concurrency.future import Future
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.shape.members import Members, Region
from meshbook.wire import messages as wire

T = TypeVar("T")

STATES_TIMEOUT_S = 0.15
"""Agents answer at once."""


class Asker(Protocol):
    """What questions need of the controller."""

    def submit(self, action: Callable[[], object], fail: Callable[[Exception], object] | None = None) -> None: ...
    def next_id(self) -> int: ...
    def expect_answers(self, id: int, on_answer: Callable[[int, Any], None]) -> None: ...
    def end_query(self, id: int) -> None: ...
    def query(
        self, mesh_id: int, endpoint: str, members: Members, timeout_s: float, args: Sequence[object] = ()
    ) -> dict[int, Any]: ...


def look(
    asker: Asker, mesh: MeshState, ranks: Iterable[int], endpoint: str, kind: type[T], timeout_s: float
) -> dict[int, T | Unresponsive]:
    """The answers of all ``ranks`` to a query, as ``kind``; of those that do not answer in time, why they do not."""
    ranks = sorted(ranks)
    if not ranks:
        return {}
    answers = asker.query(mesh.id, endpoint, Region.of(mesh.extent).select(ranks), timeout_s)
    told = {rank: msgspec.convert(answer, kind) for rank, answer in answers.items()}
    return {**told, **explain_silence(asker, mesh, [rank for rank in ranks if rank not in answers])}


def explain_silence(asker: Asker, mesh: MeshState, ranks: Iterable[int]) -> dict[int, Unresponsive]:
    """Why the control threads of ``ranks`` do not answer."""
    states = process_states(asker, mesh, ranks := list(ranks))
    return {rank: find_silence(states.get(rank), mesh.lost.get(rank), mesh.host_of(rank).suspicion) for rank in ranks}


def process_states(asker: Asker, mesh: MeshState, ranks: Iterable[int]) -> dict[int, str]:
    """Rank to the state of its process (`meshbook.wire.messages.Processes`), as far as the agents answer."""
    answers = ask_agents(
        asker, mesh, ranks, lambda id, target: wire.AskProcesses(id, mesh.id, target), STATES_TIMEOUT_S
    )
    return {rank: state for states in answers for rank, state in states.items()}


def read_stacks(
    asker: Asker, mesh: MeshState, ranks: Iterable[int], native: bool, timeout_s: float
) -> dict[int, wire.RankDump]:
    """The stacks of ranks, as their agents read them from outside."""

    def question(id: int, target: wire.Target) -> wire.ToHost:
        return wire.AskStacks(id, mesh.id, target, native, timeout_s)

    answers = ask_agents(asker, mesh, ranks, question, timeout_s + STATES_TIMEOUT_S)
    return {dump.rank: dump for dumps in answers for dump in dumps}


def ask_agents(
    asker: Asker,
    mesh: MeshState,
    ranks: Iterable[int],
    question: Callable[[int, wire.Target], wire.ToHost],
    timeout_s: float,
) -> list[Any]:
    """What the agents of ``ranks`` answer in time, one value per host."""
    ranks = sorted(ranks)
    if not ranks:
        return []
    members = Region.of(mesh.extent).select(ranks).encode()
    hosts = {mesh.host_of(rank) for rank in ranks}
    return ask_hosts(asker, hosts, lambda id, _host: question(id, members), timeout_s)


def ask_hosts(
    asker: Asker, hosts: Collection[HostState], question: Callable[[int, HostState], wire.ToHost], timeout_s: float
) -> list[Any]:
    """What the agents of ``hosts`` answer in time, one value each. question: makes the message, of an id and a host."""
    asked = [host for host in hosts if not host.lost]
    answers: list[Any] = []
    if not asked:
        return answers
    done: Future[None] = Future()
    id = asker.next_id()

    def on_answer(_host: int, answer: Any) -> None:
        answers.append(answer)
        if len(answers) == len(asked):
            done.set_result(None)

    def send() -> None:
        asker.expect_answers(id, on_answer)
        for host in asked:
            host.send_urgent(question(id, host))

    asker.submit(send, done.set_exception)
    try:
        done.get(timeout_s)
    except TimeoutError:
        pass
    finally:
        asker.submit(lambda: asker.end_query(id))
    return list(answers)


def first_answer(
    asker: Asker,
    mesh: MeshState,
    ranks: Sequence[int],
    endpoint: str,
    args: Sequence[object],
    *,
    patience_s: float,
    timeout_s: float,
) -> tuple[int, Any] | None:
    """Ask the first of ``ranks``, after ``patience_s`` of silence the next too, and so on; who answers first, and what.

    args: plain data. None: nobody has answered within ``timeout_s``.
    """
    answered: Future[tuple[int, Any]] = Future()
    deadline = time.monotonic() + timeout_s
    id = asker.next_id()
    inline = wire.encode(args)

    def on_answer(rank: int, value: Any) -> None:
        if not answered.done():
            answered.set_result((rank, value))

    def send_to(rank: int) -> None:
        host = mesh.host_of(rank)
        asker.expect_answers(id, on_answer)
        if not host.lost:
            members = Region.of(mesh.extent).select([rank]).encode()
            host.send_urgent(wire.Query(id, mesh.id, endpoint, members, inline))

    try:
        for number, rank in enumerate(ranks, 1):
            asker.submit(partial(send_to, rank), answered.set_exception)
            left_s = deadline - time.monotonic()
            try:
                return answered.get(left_s if number == len(ranks) else min(patience_s, left_s))
            except TimeoutError:
                continue
        return None
    finally:
        asker.submit(lambda: asker.end_query(id))
