"""Groups that ranks make have one name on all their members, whatever each of them has made before."""

from __future__ import annotations

import pytest
from collector import Collector
from patience import wait_until

from meshbook import ProcMesh, errors
from meshbook.groups.deadlock import differing_groups
from meshbook.groups.meeting import Greeting, agree
from meshbook.groups.progress import Collectives, GroupProgress, Made
from meshbook.mesh.rank_calls import start_cell

LIMIT_S = 30.0
LOCALLY = ", use_local_synchronization=True"

SUM = """
def group_of(*ranks):
    return dist.new_group(list(ranks), use_local_synchronization=True) if rank in ranks else None

def add(group):
    t = torch.tensor(10.0 ** rank)
    if group is not None:
        dist.all_reduce(t, group=group)
    return int(t)
"""


def test_ranks_that_have_made_other_numbers_of_groups_meet_in_theirs(mesh4: ProcMesh) -> None:
    mesh4.run(f"{SUM}\npairs = [group_of(0, 1) for _ in range(3)]\nfirst = group_of(3, 1)").get(LIMIT_S)
    mesh4.run("second = group_of(1, 2); third = group_of(3, 1); of_all = group_of(0, 1, 2, 3)").get(LIMIT_S)
    code = "[add(each) for each in (second, of_all, third, first, pairs[2], pairs[0])]"
    assert mesh4.run(code).get(LIMIT_S).values() == [
        [1, 1111, 1, 1, 11, 11],
        [110, 1111, 1010, 1010, 11, 11],
        [110, 1111, 100, 100, 100, 100],
        [1000, 1111, 1010, 1010, 1000, 1000],
    ]
    names = mesh4.run("second and second.group_name").get(LIMIT_S).values()
    assert names[1] == names[2] and names[1].startswith("local_1:3:1_")


def test_a_group_that_was_destroyed_lends_its_name_to_none(mesh4: ProcMesh) -> None:
    """Rank 2 has destroyed the first before it makes the second, and rank 3 has not."""
    code = (
        f"{SUM}\na = group_of(2, 3)\nif rank == 2: dist.destroy_process_group(a)\n"
        "b = group_of(2, 3)\nif rank == 3: dist.destroy_process_group(a)\nadd(b)"
    )
    assert mesh4.run(code).get(LIMIT_S).values()[2:] == [1100, 1100]


@pytest.mark.parametrize("locally", ["", LOCALLY], ids=["together", "locally"])
@pytest.mark.parametrize("odd", [1, 3], ids=["member", "stranger"])
def test_a_rank_that_failed_before_it_made_its_group_meets_the_others_later(
    mesh4: ProcMesh, odd: int, locally: str
) -> None:
    with pytest.raises(errors.CallFailed, match=rf"rank {odd} raised"):
        mesh4.run(f"if rank == {odd}: 1 / 0\ng = dist.new_group([0, 1]{locally})").get(LIMIT_S)
    code = f"{SUM}\ng = dist.new_group([0, 1]{locally})\nadd(g if rank < 2 else None)"
    assert mesh4.run(code).get(LIMIT_S).values() == [11, 11, 100, 1000]


def test_an_interrupted_rank_makes_its_group_again_and_older_groups_go_on(mesh4: ProcMesh) -> None:
    mesh4.run(f"{SUM}\nold = group_of(0, 1, 2)\nadd(old)").get(LIMIT_S)
    code = "if rank == 1:\n    import time; time.sleep(60)\nlost = group_of(0, 1)\nadd(lost)"
    run = start_cell(mesh4, code, on_output=Collector())
    wait_until(lambda: mesh4.stacks()[0].state == "waiting")
    run.interrupt()
    wait_until(lambda: not run.waiting)
    code = "new = group_of(0, 1)\n[add(new), add(old), add(dist.group.WORLD)]"
    assert mesh4.run(code).get(LIMIT_S).values() == [
        [11, 111, 1111], [11, 111, 1111], [100, 111, 1111], [1000, 1000, 1111]
    ]  # fmt: skip


def test_a_rank_that_was_started_again_has_the_groups_and_names_the_next_one_alike(mesh4: ProcMesh) -> None:
    mesh4.run(f"{SUM}\nold = [group_of(0, 1), group_of(0, 1), group_of(1, 2)]").get(LIMIT_S)
    with pytest.raises(errors.WorkerLost):
        mesh4.run("if rank == 1:\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)").get(LIMIT_S)
    mesh4.heal()
    mesh4.run(SUM).get(LIMIT_S)
    code = "new = group_of(0, 1)\n[add(new), dist.group.WORLD.size()]"
    assert mesh4.run(code).get(LIMIT_S).values() == [[11, 4], [11, 4], [100, 4], [1000, 4]]


def told(made: tuple[Made, ...], call: int = 0) -> Collectives:
    return Collectives(3, call, (GroupProgress("0", (0, 1, 2), 5, {}, {}),), (), "", made=made)


def test_ranks_that_count_their_groups_differently_are_found_when_all_members_are_at_rest() -> None:
    even, ahead = Made((), 1), Made((0, 1), 2)
    of_two = {0: told((even, ahead)), 1: told((even, ahead)), 2: told((even,))}
    assert differing_groups(of_two) == []
    (odd,) = differing_groups({**of_two, 1: told((even,))})
    assert (odd.name, odd.reason) == ("", "ranks 0,1 have made different numbers of groups") and not odd.is_certain
    assert differing_groups({**of_two, 1: told((even,), call=8)}) == []
    (odd,) = differing_groups({**of_two, 2: told((Made((), 2),))})
    assert odd.reason == "ranks 0-2 have made different numbers of groups"


def test_ranks_that_form_groups_again_go_on_from_the_highest_numbers() -> None:
    greetings = [
        Greeting("a", (Made((), 3), Made((0, 1), 1))),
        Greeting("a", (Made((), 2), Made((0, 1), 4))),
        Greeting("", (Made((), 0),)),
    ]
    agreement = agree(greetings, "epoch7/x", ("localhost", "1"))
    assert agreement.fresh == (2,) and set(agreement.made) == {Made((), 3), Made((0, 1), 4)}
