"""Process groups that can be aborted, interrupted and formed again, on real ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from forked_ranks import Ranks

from meshbook.groups.progress import ANY_PEER


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_every_collective_is_right_and_counted_alike(ranks: Ranks) -> None:
    results = ranks.run("every_collective")
    for rank, (got, issued, sent, received) in enumerate(results):
        assert all(got.values()), [name for name, right in got.items() if not right]
        assert issued == results[0][1]
        anybody = ({0: 1}, {}) if rank else ({}, {ANY_PEER: 3})
        assert sent == Counter({(rank + 1) % 4: 2}) + Counter(anybody[0])
        assert received == {(rank - 1) % 4: 2, **anybody[1]}


@pytest.mark.slow
def test_an_abort_frees_every_kind_of_wait_and_what_was_made_before_serves_on(ranks: Ranks) -> None:
    for took in ranks.run("aborted")[1:]:
        assert len(took) == 14 and max(took.values()) < 3, took


@pytest.mark.slow
def test_an_interrupt_ends_every_kind_of_wait(ranks: Ranks) -> None:
    for took in ranks.run("interrupted")[1:]:
        assert len(took) == 5 and max(took.values()) < 3, took


@pytest.mark.slow
def test_a_receive_that_was_never_begun_is_no_success(ranks: Ranks) -> None:
    for rank, (counted, told) in enumerate(ranks.run("kept_receives")):
        assert counted == 4
        assert told == [(False, True)] * (2 if rank else 0)


def test_ranks_tell_how_far_they_are_and_what_they_wait_in(ranks: Ranks) -> None:
    results = ranks.run("told_while_waiting")
    idle = results[0]
    assert [(told.call, told.waiting) for told in idle] == [(0, ())] * 3
    for all_reduce, recv, backward in results[1:]:
        for told, operation, peer in (
            (all_reduce, "all_reduce", None),
            (recv, "recv", 0),
            (backward, "all_reduce", None),
        ):
            (waiting,) = told.waiting
            assert (told.call, waiting.group, waiting.operation, waiting.peer) == (7, "0", operation, peer)
            assert waiting.place.startswith("guarded_scenarios.py:") and 0.05 < waiting.since_s < 5
        world = {group.name: group for group in all_reduce.groups}["0"]
        behind = {group.name: group for group in idle[0].groups}["0"]
        assert all_reduce.waiting[0].number == world.issued == behind.issued + 1
        assert {group.name: group for group in recv.groups}["0"].received == {0: 1}


def test_ranks_that_wait_to_form_groups_are_freed(ranks: Ranks) -> None:
    for error, took, counted in ranks.run("forming_is_aborted"):
        assert "rank 0 raised ValueError" in error and took < 3 and counted == 4


@pytest.mark.some()
@pytest.mark.quick("ddp-backward")
@pytest.mark.parametrize("cut", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_goes_on_after_an_iteration_was_cut_off(ranks: Ranks, kind: str, cut: str) -> None:
    assert ranks.run("training_goes_on", kind=kind, cut=cut) == ["same"] * 4


def test_a_fresh_rank_joins_the_groups_of_the_others(ranks: Ranks) -> None:
    for rank, (counted, sums, whole, kept, same_names, backend) in enumerate(ranks.run("a_fresh_rank_joins")):
        row, column = divmod(rank, 2)
        assert counted == 4 and kept and same_names and backend == "gloo"
        assert sums[:2] == [2.0 * column + 2, 4.0 * row + 1]
        assert sums[2:] == ([4.0] if rank in (1, 3) else [])
        assert whole == [2.0 * row, 2.0 * row + 1]


@pytest.mark.slow
def test_handles_of_another_size_say_what_to_make_again(ranks: Ranks) -> None:
    for rank, (counted, errors) in enumerate(ranks.run("another_size")[:3]):
        assert counted == 3 and len(errors) == (2 if rank < 2 else 1)
        for error in errors:
            assert "this process group was made for 4 ranks, and the mesh has 3 now" in error
            assert "Make again, on all ranks" in error
