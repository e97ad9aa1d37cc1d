"""Who holds the others up, from what ranks tell."""

from __future__ import annotations

from meshbook.groups.deadlock import RankProgress, find_stragglers
from meshbook.groups.progress import ANY_PEER, Collectives, GroupProgress, Waiting

AT = "cell 7, line 5"


def told(
    issued: int,
    waits: str = "",
    *,
    group: str = "0",
    members: tuple[int, ...] = tuple(range(8)),
    place: str = AT,
    peer: int | None = None,
    number: int | None = None,
    since_s: float = 3.0,
    doing: str = "is in time.sleep (train.py:41)",
) -> RankProgress:
    progress = (GroupProgress(group, members, issued, {}, {}),)
    number = issued if number is None else number
    waiting = (Waiting(group, waits, number, peer, place, since_s),) if waits else ()
    return RankProgress(doing, Collectives(1, 5, progress, waiting, ""))


def test_different_operations_under_one_number_are_a_mismatch() -> None:
    poll = {rank: told(41, "all_reduce") for rank in range(8)} | {3: told(41, "barrier", place="cell 7, line 9")}
    verdict = find_stragglers(poll)
    assert verdict is not None and verdict.circular and verdict.odd == (3,)
    assert verdict.text == (
        "rank 3 is in barrier (cell 7, line 9) as operation 41, "
        "where ranks 0-2,4-7 are in all_reduce (cell 7, line 5): they wait for each other"
    )


def test_waits_are_followed_to_their_end() -> None:
    """0 waits for 1 in a group of two, 1 waits for a message of 2, 2 computes."""
    poll = {
        0: told(7, "all_reduce", group="tp", members=(0, 1)),
        1: told(6, "recv", group="tp", members=(0, 1, 2), peer=2, number=1),
        2: told(0, group="tp", members=(0, 1, 2), doing="is at train.py:9"),
    }
    verdict = find_stragglers(poll)
    assert verdict is not None and (verdict.odd, verdict.waiting) == ((2,), (0, 1))
    assert "rank 0 waits in all_reduce (cell 7, line 5), operation 7, rank 1 waits in recv from rank 2" in verdict.text


def test_two_that_wait_for_each_other_are_a_circle() -> None:
    poll = {
        0: told(1, "all_reduce", members=(0, 1)),
        1: told(0, "recv", members=(0, 1), peer=0, number=1, place="cell 7, line 8"),
    }
    verdict = find_stragglers(poll)
    assert verdict is not None and verdict.circular
    assert verdict.text == (
        "ranks 0,1 wait for each other:\n  rank 0 waits in all_reduce (cell 7, line 5), operation 1,\n"
        "  rank 1 waits in recv from rank 0 (cell 7, line 8)"
    )


def test_nothing_is_said_where_nobody_waits_for_another() -> None:
    assert find_stragglers({rank: told(40) for rank in range(8)}) is None
    assert (
        find_stragglers({rank: told(41, "all_reduce", since_s=0.001) for rank in range(8)}) is None
    )  # it is being served
    assert find_stragglers({}) is None


def test_operations_that_are_under_way_name_who_has_not_issued_them() -> None:
    """Ranks that wait for a CUDA stream wait in no operation of ours."""

    def on_stream(rank: int) -> RankProgress:
        look = told(41, "all_reduce")
        assert look.collectives is not None
        return look._replace(collectives=look.collectives._replace(waiting=(), under_way=look.collectives.waiting))

    poll = {rank: on_stream(rank) for rank in range(8)} | {3: told(40)}
    verdict = find_stragglers(poll)
    assert verdict is not None and verdict.odd == (3,)
    assert verdict.text.startswith(
        "ranks 0-2,4-7 wait in all_reduce (cell 7, line 5), operation 41;\n  rank 3 has issued 40"
    )
    poll = {
        0: told(1, "all_reduce", members=(0, 1)),
        1: told(0, "recv", members=(0, 1), peer=0, number=1),
    }
    assert find_stragglers(poll) is not None
    for rank in poll:
        found = poll[rank].collectives
        assert found is not None
        poll[rank] = poll[rank]._replace(collectives=found._replace(waiting=(), under_way=found.waiting))
    assert find_stragglers(poll) is None  # both may still go on


def test_a_receive_from_anybody_waits_for_nobody_when_enough_was_sent() -> None:
    def poll(sent: int) -> dict[int, RankProgress]:
        looks = {0: told(0, "recv", members=(0, 1), peer=ANY_PEER, number=1, since_s=0.1), 1: told(0, members=(0, 1))}
        found = looks[1].collectives
        assert found is not None
        groups = (found.groups[0]._replace(sent={0: sent}),)
        return looks | {1: looks[1]._replace(collectives=found._replace(groups=groups))}

    verdict = find_stragglers(poll(sent=0))
    assert verdict is not None and verdict.odd == (1,)
    assert find_stragglers(poll(sent=1)) is None  # it is on its way
