"""When a running cell says who holds it up, and when it says nothing."""

from __future__ import annotations

from meshbook.groups.progress import Collectives, GroupProgress, Waiting
from meshbook.stacks.mesh_stacks import RankTold
from meshbook_extension.cells.hang_watch import ALONE, HELD, MOST, SLOW, Ended, HangDetector, Sign

RANKS = tuple(range(4))


def told(issued: int, waits_s: float = 0.0, *, waited_s: float = 0.0, operation: str = "all_reduce", paused: str = ""):
    waiting = (Waiting("0", operation, issued, None, "cell 7, line 5", waits_s),) if waits_s else ()
    group = GroupProgress("0", RANKS, issued, {}, {})
    return RankTold(5.0, "", paused, Collectives(1, 5, (group,), waiting, "", waited_s), ())


def test_ranks_that_wait_long_for_one_give_a_sign_once() -> None:
    signs = HangDetector()
    assert signs.look(3, {0: told(9, 2), 1: told(8), 2: told(9, 2), 3: told(9, 2)}, RANKS) is None
    poll = {0: told(9, 5), 1: told(8), 2: told(9, 5), 3: told(9, 5)}
    sign = signs.look(6, poll, RANKS)
    assert sign == Sign(HELD, (1,))
    signs.given(sign)
    assert signs.look(9, poll, RANKS) is None


def test_a_rank_that_does_not_answer_is_one_that_does_not_come() -> None:
    assert HangDetector().look(6, {rank: told(9, 5) for rank in (0, 2, 3)}, RANKS) == Sign(HELD, (1,))


def test_different_operations_give_a_sign_sooner() -> None:
    poll = {rank: told(9, 2.5) for rank in RANKS} | {3: told(9, 2.5, operation="barrier")}
    assert HangDetector().look(3, poll, RANKS) == Sign(HELD, (3,))


def test_the_slow_rank_is_the_one_that_hardly_waits() -> None:
    signs = HangDetector()
    assert signs.look(2, {rank: told(10) for rank in RANKS}, RANKS) is None
    later = {rank: told(20, waited_s=9.0) for rank in RANKS} | {2: told(20, waited_s=0.1)}
    sign = signs.look(12, later, RANKS)
    assert sign is not None and (sign.kind, sign.odd) == (SLOW, (2,))
    assert (round(sign.share, 2), round(sign.times)) == (0.9, 10)


def test_ranks_that_keep_pace_give_no_sign_however_long_and_much_they_wait() -> None:
    signs = HangDetector()
    for second in range(0, 600, 2):
        poll = {rank: told(10 * second, 0.01, waited_s=0.7 * second + 0.1 * rank) for rank in RANKS}
        assert signs.look(second, poll, RANKS) is None
    signs = HangDetector()  # and without collectives
    for second in range(0, 600, 2):
        assert signs.look(second, {rank: told(1) for rank in RANKS}, RANKS) is None


def test_a_rank_that_runs_on_when_the_others_have_ended_gives_a_sign() -> None:
    poll = {rank: told(1) for rank in RANKS}
    assert HangDetector().look(9, poll, [3], Ended(3, 0.5, 2)) is None
    assert HangDetector().look(11, poll, [3], Ended(3, 0.5, 2)) == Sign(ALONE, (3,))
    assert HangDetector().look(11, poll, [3], Ended(3, 60, 2)) is None  # the others took a minute
    assert HangDetector().look(11, poll, [1, 2, 3], Ended(1, 0.5, 2)) is None


def test_nothing_is_said_while_a_rank_is_in_pdb_nor_more_than_a_few_times() -> None:
    signs = HangDetector()
    poll = {0: told(9, 5), 1: told(8, paused="cell 7, line 4"), 2: told(9, 5), 3: told(9, 5)}
    assert signs.look(6, poll, RANKS) is None
    poll[1] = told(8)
    assert signs.look(8, poll, RANKS) is None
    assert signs.look(12, poll, RANKS) == Sign(HELD, (1,))
    for rank in range(MOST):
        signs.given(Sign(HELD, (rank,)))
    assert signs.spent
