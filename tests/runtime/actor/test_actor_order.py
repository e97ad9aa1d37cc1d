"""Random programs of many senders, compared with a model: each actor has the messages of a sender in order, once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from ordered_actors import AsyncBook, AsyncSender, Book, Sender, Sent, Step, run_program
from patience import wait_until

from meshbook import Future, LocalLauncher, ProcMesh, start_hosts
from meshbook.actor import ActorMesh, SupervisionError
from meshbook.worker import direct_calls

STEPS = 40
"""Of each sender."""
THREADS = 3
"""Senders in this process."""
LONGEST_DELAY_S = 0.1
"""After which a rank is killed."""
HOW = {"broadcast": 5, "call": 6, "await": 1, "cancel": 2}


def _dial_at_once() -> None:
    direct_calls.DIAL_AFTER[False] = 2


@pytest.fixture(scope="module", params=[1, 2], ids=["one agent", "two agents"])
def whole(clean_end: None, request: pytest.FixtureRequest) -> Iterator[ProcMesh]:
    """Agents with three ranks each; where there is one, ranks soon have direct links."""
    hosts = start_hosts({"hosts": request.param}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 3}, name="order", group=False) as mesh:
        mesh.execute(_dial_at_once).get(30)
        yield mesh


@pytest.fixture(params=["one host", "all hosts"])
def procs(whole: ProcMesh, request: pytest.FixtureRequest) -> ProcMesh:
    if request.param == "one host":
        return whole.slice(hosts=-1)
    return whole if len(whole.hosts) == 1 else whole.slice(gpus=slice(0, 2))


def make_program(draw: random.Random, all_ranks: Sequence[int]) -> list[Step]:
    """Random steps to random actors."""
    steps = []
    for how in draw.choices(list(HOW), list(HOW.values()), k=STEPS):
        ranks = draw.sample(all_ranks, draw.choice([1, 1, 2, len(all_ranks)]))
        steps.append(Step(how, draw.randrange(2), tuple(sorted(ranks))))
    return steps


def send_all(
    procs: ProcMesh, books: Sequence[ActorMesh], seed: int, victim: int | None = None
) -> tuple[list[list[Step]], list[list[Sent]]]:
    """Have threads of this process and two actors of each rank run random programs at the same time.

    victim: a rank that is killed meanwhile.
    """
    draw = random.Random(seed)
    senders = [procs.spawn("senders", Sender), procs.spawn("async senders", AsyncSender)]
    ranks = [(mesh, rank) for mesh in senders for rank in procs.ranks]
    programs = [make_program(draw, procs.ranks) for _ in range(THREADS + len(ranks))]
    pids = {status.rank: status.pid for status in procs.status()}
    remote = [
        mesh.select([rank]).run.call_one(THREADS + index, books, programs[THREADS + index])
        for index, (mesh, rank) in enumerate(ranks)
    ]
    with ThreadPoolExecutor(THREADS + 1) as pool:
        if victim is not None:
            pool.submit(_kill_later, draw.uniform(0, LONGEST_DELAY_S), pids[victim])
        own = list(pool.map(lambda me: run_program(me, books, programs[me]), range(THREADS)))
    return programs, [*own, *(_outcomes_of(future) for future in remote)]


def _kill_later(delay_s: float, pid: int) -> None:
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)


def _outcomes_of(run: Future[list[Sent]]) -> list[Sent]:
    """What a sender tells; nothing is known of one that was killed."""
    try:
        return run.get(60)
    except SupervisionError:
        return [Sent("unknown", {})] * STEPS


def check(
    programs: list[list[Step]], sent: list[list[Sent]], books: Sequence[ActorMesh], ranks: Collection[int]
) -> int:
    """Compare what ``ranks`` have written down with what was sent; the number of messages."""
    count = 0
    for index, book in enumerate(books):
        living = book.select(sorted(ranks))
        for rank, lines in zip(living.ranks, living.read.call().get(30).values(), strict=True):
            count += len(lines)
            for me, (program, outcomes) in enumerate(zip(programs, sent, strict=True)):
                got = [number for sender, number in lines if sender == me]
                numbers = [number for number, step in enumerate(program) if step.book == index and rank in step.ranks]
                must = [number for number in numbers if _is_due(outcomes[number], rank)]
                may = [number for number in numbers if outcomes[number].outcome != "refused"]
                told = f"actor {index} of rank {rank} has {got} of sender {me}"
                assert got == sorted(set(got)), f"{told}: out of order, or twice"
                assert set(must) <= set(got) <= set(may), f"{told}; must have {must}, may have {may}"
            for number, outcome in enumerate(outcomes):
                assert outcome.answered.get(rank, number) == number
    return count


def _is_due(sent: Sent, rank: int) -> bool:
    """Whether a living rank must have the message."""
    return sent.outcome in ("sent", "answered", "failed") or rank in sent.answered


@pytest.mark.some()
@pytest.mark.quick("one agent-one host-seed 1")
@pytest.mark.parametrize("seed", [1, None], ids=["seed 1", "a new seed"])
def test_each_actor_has_the_messages_of_each_sender_in_order_and_once(procs: ProcMesh, seed: int | None) -> None:
    seed = random.randrange(2, 10**6) if seed is None else seed
    books = [procs.spawn("books", Book), procs.spawn("async books", AsyncBook)]
    programs, sent = send_all(procs, books, seed)
    outcomes = {outcome.outcome for each in sent for outcome in each}
    assert outcomes <= {"sent", "answered", "cancelled"} and {"sent", "answered"} <= outcomes
    assert check(programs, sent, books, procs.ranks) > 300


@pytest.mark.quick("one agent-all hosts")
def test_the_death_of_an_actor_costs_the_others_no_message(procs: ProcMesh, whole: ProcMesh) -> None:
    seed = random.randrange(10**6)
    victim = random.choice(procs.ranks)
    books = [procs.spawn("books", Book), procs.spawn("async books", AsyncBook)]
    programs, sent = send_all(procs, books, seed, victim)
    living = [rank for rank in procs.ranks if rank != victim]
    try:
        assert check(programs, sent, books, living) > 100, f"seed {seed}, victim {victim}"
    finally:
        wait_until(lambda: bool(whole.lost))  # the programs may have ended before the victim did
        whole.heal(force=True)
