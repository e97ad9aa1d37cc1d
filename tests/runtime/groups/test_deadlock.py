"""The proof that ranks can never be served, against a simulation of what ranks do."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest

from meshbook.groups.deadlock import differing_groups, find_deadlocked, only_where_shared, where_stuck
from meshbook.groups.progress import ANY_PEER, CellCounts, Collectives, GroupProgress, Waiting


def progress(name: str, members: tuple[int, ...], issued: int, sent=None, received=None) -> GroupProgress:
    return GroupProgress(name, members, issued, sent or {}, received or {})


def snapshot(*groups: GroupProgress, waiting=(), call: int = 7, epoch: int = 3, aborted: str = ""):
    return Collectives(epoch, call, groups, tuple(waiting), aborted)


def collective(number: int, group: str = "0", operation: str = "all_reduce", since_s: float = 0.1) -> Waiting:
    return Waiting(group, operation, number, None, "cell 7, line 5", since_s)


def with_peer(operation: str, number: int, peer: int, since_s: float = 0.1) -> Waiting:
    return Waiting("0", operation, number, peer, "cell 7, line 5", since_s)


WORLD = (0, 1, 2, 3)


def test_ranks_are_stuck_when_the_one_that_they_wait_for_has_ended_or_is_dead() -> None:
    waits = {rank: snapshot(progress("0", WORLD, 41), waiting=[collective(41)]) for rank in (0, 2, 3)}
    stuck = find_deadlocked({**waits, 1: snapshot(progress("0", WORLD, 40), call=0)}, ended=[1])
    assert where_stuck(stuck.items()) == dict.fromkeys((0, 2, 3), "all_reduce (cell 7, line 5)")
    assert {each.absent for each in stuck.values()} == {(1,)}
    assert set(find_deadlocked(waits, ended=[], dead=[1])) == {0, 2, 3}
    assert not find_deadlocked({**waits, 1: snapshot(progress("0", WORLD, 41), call=0)}, ended=[1]), "all have begun it"
    assert not find_deadlocked({**waits, 1: snapshot(progress("0", WORLD, 40))}, ended=[]), (
        "it still runs, and may come"
    )
    assert not find_deadlocked(waits, ended=[1]), "it did not answer"


def test_a_group_that_the_ended_rank_never_made_is_not_served_by_it() -> None:
    told = {
        0: snapshot(progress("0", (0, 1), 3), call=0),
        1: snapshot(progress("0", (0, 1), 3), progress("5", (0, 1), 1), waiting=[collective(1, "5")]),
    }
    assert set(find_deadlocked(told, ended=[0])) == {1}


def test_a_receive_from_anybody_may_take_a_send() -> None:
    def told(from_anybody: int) -> dict[int, Collectives]:
        received = {1: 2, ANY_PEER: from_anybody}
        return {
            0: snapshot(progress("0", (0, 1), 0, received=received), call=0),
            1: snapshot(progress("0", (0, 1), 0, sent={0: 3}), waiting=[with_peer("send", 3, 0)]),
        }

    assert set(find_deadlocked(told(0), ended=[0])) == {1}
    assert not find_deadlocked(told(1), ended=[0])


def test_a_receive_from_anybody_waits_in_vain_only_when_nobody_can_send() -> None:
    def told(sent: int, since_s: float = 0.1) -> dict[int, Collectives]:
        waiting = [with_peer("recv", 1, ANY_PEER, since_s)]
        return {
            0: snapshot(progress("0", (0, 1, 2), 0, received={1: 1, ANY_PEER: 1}), waiting=waiting),
            1: snapshot(progress("0", (0, 1, 2), 0, sent={0: sent}), call=0),
            2: snapshot(progress("0", (0, 1, 2), 0), call=0),
        }

    assert not find_deadlocked(told(0), ended=[1])
    assert find_deadlocked(told(0), ended=[1, 2])[0].absent == (1, 2)
    assert not find_deadlocked(told(1), ended=[1, 2])  # it may be on its way
    assert set(find_deadlocked(told(1, since_s=1.0), ended=[1, 2])) == {0}  # that was taken by the receive from rank 1
    assert not find_deadlocked(told(2, since_s=1.0), ended=[1, 2])


def test_a_rank_is_stuck_only_if_nothing_that_it_waits_in_can_go_on() -> None:
    told = {
        0: snapshot(progress("0", (0, 1), 4), call=0),
        1: snapshot(progress("0", (0, 1), 5), waiting=[collective(5), collective(4)]),
    }
    assert not find_deadlocked(told, ended=[0])


def test_epochs_cannot_be_compared() -> None:
    told = {
        0: snapshot(progress("0", (0, 1), 0), call=0, epoch=4),
        1: snapshot(progress("0", (0, 1), 5), waiting=[collective(5)]),
    }
    assert not find_deadlocked(told, ended=[0])


def test_what_a_rank_left_as_it_was_aborted_is_not_served_by_it() -> None:
    left = progress("0", (0, 1), 5)._replace(aborted="rank 1 raised", broken="all_reduce was given up")
    snapshots = {
        0: snapshot(left, call=0, aborted="rank 1 raised"),
        1: snapshot(progress("0", (0, 1), 5), waiting=[collective(5)]),
    }
    assert {rank: each.absent for rank, each in find_deadlocked(snapshots, ()).items()} == {1: (0,)}
    snapshots[1] = snapshot(progress("0", (0, 1), 4), waiting=[collective(4)])
    assert not find_deadlocked(snapshots, ()), "it had done its part in that one"


@pytest.mark.parametrize(("since_s", "stuck"), [(0.5, set()), (3.0, {1})])
def test_an_aborted_rank_sends_nothing_more(since_s: float, stuck: set[int]) -> None:
    """Its transport may have completed the operation on its own side: what it had sent arrives soon, or never."""
    aborted = progress("0", (0, 1), 5)._replace(aborted="rank 0 raised")
    told = {
        0: snapshot(aborted, call=0, aborted="rank 0 raised"),
        1: snapshot(progress("0", (0, 1), 5), waiting=[collective(5, since_s=since_s)]),
    }
    assert set(find_deadlocked(told, ended=[0])) == stuck


def test_an_aborted_rank_serves_nobody_and_is_not_stuck_itself() -> None:
    told = {
        0: snapshot(progress("0", (0, 1, 2), 4), aborted="rank 2 raised"),
        1: snapshot(progress("0", (0, 1, 2), 5), waiting=[collective(5)]),
        2: snapshot(progress("0", (0, 1, 2), 5), waiting=[collective(5)], aborted="rank 2 raised"),
    }
    assert set(find_deadlocked(told, ended=[])) == {1}


# ---- groups after a call -------------------------------------------------------------------------------------------


def test_groups_that_are_equally_far_are_kept() -> None:
    told = {
        0: snapshot(progress("0", WORLD, 41, sent={1: 2}), call=0),
        1: snapshot(progress("0", WORLD, 41, received={0: 1, ANY_PEER: 1}), call=0),
        2: snapshot(progress("0", WORLD, 41), call=0),
        3: snapshot(progress("0", WORLD, 41), call=0),
    }
    assert differing_groups(told) == []


@pytest.mark.parametrize(
    "odd",
    [
        snapshot(progress("0", (0, 1), 40), call=0),
        snapshot(call=0),
        snapshot(progress("0", (0, 1), 41)._replace(broken="all_reduce failed"), call=0),
        snapshot(progress("0", (0, 1), 41, sent={0: 1}), call=0),
        snapshot(progress("0", (0, 1), 41, received={0: 1}), call=0),
        snapshot(progress("0", (0, 1), 41, received={ANY_PEER: 1}), call=0),
    ],
)
def test_groups_that_differ_are_found(odd: Collectives) -> None:
    assert differing_groups({0: snapshot(progress("0", (0, 1), 41), call=0), 1: odd})


def test_nothing_is_said_of_groups_with_a_busy_or_silent_member() -> None:
    told = {0: snapshot(progress("0", (0, 1), 41), call=0), 1: snapshot(progress("0", (0, 1), 40), call=8)}
    assert differing_groups(told) == []
    assert differing_groups({0: told[0]}) == []


# ---- against a simulation ------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """One step of a rank: an operation of a group, or a send or a receive."""

    kind: str
    group: str
    peer: int = -1


class Simulation:
    """Ranks that run straight-line programs; collectives wait for all members, sends for nobody."""

    def __init__(self, groups: dict[str, tuple[int, ...]], programs: list[list[Op]]) -> None:
        self.groups, self.programs = groups, programs
        self.at = [0] * len(programs)
        self.issued: list[Counter[str]] = [Counter() for _ in programs]
        self.sent: list[Counter[int]] = [Counter() for _ in programs]
        self.received: list[Counter[int]] = [Counter() for _ in programs]
        self.waiting: list[Waiting | None] = [None] * len(programs)

    def ended(self) -> set[int]:
        return {rank for rank, program in enumerate(self.programs) if self.at[rank] == len(program)}

    def step(self, rank: int) -> bool:
        """Let a rank begin its next operation, or come back from the one that it waits in; False if it cannot."""
        if rank in self.ended():
            return False
        if self.waiting[rank] is None:
            self._begin(rank, self.programs[rank][self.at[rank]])
            return True
        if not self._served(rank, self.waiting[rank]):
            return False
        self.waiting[rank] = None
        self.at[rank] += 1
        return True

    def _begin(self, rank: int, op: Op) -> None:
        if op.kind == "send":
            self.sent[rank][op.peer] += 1
            self.at[rank] += 1
        elif op.kind == "recv":
            self.received[rank][op.peer] += 1
            self.waiting[rank] = Waiting("w", "recv", self.received[rank][op.peer], op.peer, "", 0.0)
        else:
            self.issued[rank][op.group] += 1
            self.waiting[rank] = Waiting(op.group, "barrier", self.issued[rank][op.group], None, "", 0.0)

    def _served(self, rank: int, waiting: Waiting) -> bool:
        if waiting.peer is not None:
            return self.sent[waiting.peer][rank] >= waiting.number
        return all(self.issued[m][waiting.group] >= waiting.number for m in self.groups[waiting.group])

    def snapshot(self, rank: int) -> Collectives:
        groups = []
        for name, members in self.groups.items():
            if rank in members:
                p2p = (dict(self.sent[rank]), dict(self.received[rank])) if name == "w" else ({}, {})
                groups.append(GroupProgress(name, members, self.issued[rank][name], *p2p))
        waiting = self.waiting[rank]
        return Collectives(1, 1, tuple(groups), (waiting,) if waiting else (), "")


def random_case(rng: random.Random) -> Simulation:
    """One program that would end on all ranks, of which some ranks then raise at some point."""
    size = rng.randint(2, 5)
    everyone = tuple(range(size))
    groups = {"w": everyone}
    for name in "abc"[: rng.randint(0, 3)]:
        groups[name] = tuple(sorted(rng.sample(everyone, rng.randint(2, size))))
    programs: list[list[Op]] = [[] for _ in everyone]
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.3:
            sender, receiver = rng.sample(everyone, 2)
            programs[sender].append(Op("send", "w", receiver))
            programs[receiver].append(Op("recv", "w", sender))
        else:
            name = rng.choice(list(groups))
            for member in groups[name]:
                programs[member].append(Op("all", name))
    for rank in rng.sample(everyone, rng.randint(1, size - 1)):
        programs[rank] = programs[rank][: rng.randint(0, len(programs[rank]))]
    return Simulation(groups, programs)


def test_the_proof_is_sound_and_complete_in_random_programs() -> None:
    rng = random.Random(3)
    proofs = early = 0
    for _ in range(1500):
        case = random_case(rng)
        ranks = range(len(case.programs))
        claims: list[dict[int, int]] = []
        moving = True
        while moving:
            if rng.random() < 0.3:  # a look: who has ended is known first, and answers come one by one while all go on
                ended = case.ended()
                told = {}
                for rank in rng.sample(ranks, len(ranks)):
                    if rng.random() < 0.95:
                        told[rank] = case.snapshot(rank)
                    case.step(rng.choice(ranks))
                claims.append({rank: case.at[rank] for rank in find_deadlocked(told, ended)})
            moving = sum(case.step(rank) for rank in rng.sample(ranks, len(ranks))) > 0
        for claim in claims:  # sound: who was called stuck has never moved on
            early += len(claim)
            assert all(case.at[rank] == at for rank, at in claim.items())
        found = find_deadlocked({rank: case.snapshot(rank) for rank in ranks}, case.ended())
        assert set(found) == set(ranks) - case.ended()  # complete: all who are left at rest are found
        proofs += len(found)
    assert proofs > 500 and early > 50  # the cases are not trivial


# ---- threads -------------------------------------------------------------------------------------------------------


def test_a_rank_whose_actors_use_the_group_may_still_come() -> None:
    waits = {rank: snapshot(progress("0", WORLD, 41), waiting=[collective(41)]) for rank in (0, 2, 3)}
    used = progress("0", WORLD, 40)._replace(mailboxes=(9,))
    busy = snapshot(used, call=0)._replace(handling={77: 9})
    assert not find_deadlocked({**waits, 1: busy}, ended=[1])
    assert set(find_deadlocked({**waits, 1: busy._replace(handling={77: 8})}, ended=[1])) == {0, 2, 3}
    at_work = snapshot(used._replace(at_work=(77,)), call=0)
    assert not find_deadlocked({**waits, 1: at_work}, ended=[1])


def test_what_an_actor_waits_in_is_no_matter_of_a_cell() -> None:
    in_actor = collective(5, "tp")._replace(thread=77)
    told = {
        0: snapshot(progress("0", (0, 1), 3), progress("tp", (0, 1), 4), call=0),
        1: snapshot(progress("0", (0, 1), 4), progress("tp", (0, 1), 5), waiting=[in_actor, collective(4)]),
    }
    told[1] = told[1]._replace(handling={77: 9})
    stuck = find_deadlocked(told, ended=[0])
    assert stuck[1].waiting.group == "0"
    assert only_where_shared(told, {"0"}) == {"0"}
    assert find_deadlocked(told, ended=[0], mailbox=8) == {}
    assert find_deadlocked(told, ended=[0, 1], mailbox=9)[1].waiting.group == "tp"


def test_where_actors_are_at_work_what_cells_have_begun_is_compared() -> None:
    def told(by_cells: int, busy: bool) -> dict[int, Collectives]:
        group = progress("0", (0, 1), 50)._replace(mailboxes=(9,))
        even = snapshot(group._replace(issued=48, by_cells=CellCounts(3)), call=0)
        odd = snapshot(group._replace(by_cells=CellCounts(by_cells)), call=0)
        return {0: even, 1: odd._replace(handling={77: 9} if busy else {})}

    assert differing_groups(told(3, busy=True)) == []
    assert [odd.is_certain for odd in differing_groups(told(4, busy=True))] == [True]
    assert [odd.is_certain for odd in differing_groups(told(3, busy=False))] == [False]
    assert differing_groups(told(4, busy=True), of_cells=False) == []


def instructions_of(work: Callable[[], object]) -> int:
    """How many lines of Python run."""
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def many(count: int, failed: Callable[[int], bool]) -> tuple[dict[int, Collectives], list[int]]:
    """Ranks that wait in a collective of all but for those that have failed, each in a group of eight as well."""
    everyone, told = tuple(range(count)), {}
    for rank in everyone:
        first, waits = rank // 8 * 8, not failed(rank)
        groups = progress("0", everyone, 40 + waits), progress(f"tp{first}", everyone[first : first + 8], 10)
        told[rank] = snapshot(*groups, waiting=[collective(41)] if waits else [], call=7 * waits)
    return told, [rank for rank in everyone if failed(rank)]


@pytest.mark.parametrize(
    "failed",
    [lambda rank: rank == 3, lambda rank: rank % 2 == 0, lambda rank: rank % 8 == 0],
    ids=["one", "half", "few"],
)
def test_its_price_is_linear_in_ranks(failed: Callable[[int], bool]) -> None:
    (few, few_failed), (more, more_failed) = many(64, failed), many(256, failed)
    assert set(find_deadlocked(more, more_failed)) == set(range(256)) - set(more_failed)
    price = instructions_of(lambda: find_deadlocked(few, few_failed))
    assert instructions_of(lambda: find_deadlocked(more, more_failed)) < 5 * price


def test_the_price_of_comparing_groups_is_linear_in_ranks() -> None:
    (few, _), (more, _) = many(64, lambda rank: True), many(256, lambda rank: True)
    price = instructions_of(lambda: differing_groups(few))
    assert instructions_of(lambda: differing_groups(more)) < 5 * price
