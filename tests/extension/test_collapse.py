"""Merging equal lines of ranks: nothing lost, nothing reordered, nothing held for longer than the window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook_extension.collapse import WINDOW_S, ByRank, Collapser, Grouping, Piece, grouping_for
from meshbook_extension.line_reader import REST_S


def shown(pieces: list[Piece]) -> list[tuple[tuple[int, ...], str]]:
    return [(piece.ranks, piece.text) for piece in pieces]


def test_a_line_that_every_rank_prints_is_shown_at_once_and_once() -> None:
    collapser = Collapser(range(4))
    for rank in range(3):
        collapser.feed(rank, "stdout", "step 10\n", 0.0)
        assert collapser.take(0.0) == []
    collapser.feed(3, "stdout", "step 10\n", 0.01)
    assert shown(collapser.take(0.01)) == [((0, 1, 2, 3), "step 10\n")]


def test_a_line_of_some_ranks_waits_for_the_window_and_no_longer() -> None:
    collapser = Collapser(range(4))
    collapser.feed(0, "stdout", "hello\n", 0.0)
    collapser.feed(2, "stdout", "hello\n", 0.1)
    assert collapser.due_at() == WINDOW_S
    assert collapser.take(WINDOW_S - 0.01) == []
    assert shown(collapser.take(WINDOW_S)) == [((0, 2), "hello\n")]
    assert collapser.due_at() is None


def test_a_late_rank_is_shown_alone() -> None:
    collapser = Collapser(range(2))
    collapser.feed(0, "stdout", "a\n", 0.0)
    collapser.take(1.0)
    collapser.feed(1, "stdout", "a\n", 1.1)
    assert shown(collapser.close(1.1)) == [((1,), "a\n")]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    collapser = Collapser(range(3))
    collapser.end(2, 0.0)
    for rank in (0, 1):
        collapser.feed(rank, "stdout", "a\n", 0.0)
    assert shown(collapser.take(0.0)) == [((0, 1), "a\n")]


def test_ranks_that_have_ended_do_not_stand_for_those_that_run() -> None:
    collapser = Collapser(range(3))
    for rank in (0, 1):
        collapser.feed(rank, "stdout", "a\n", 0.0)
        collapser.end(rank, 0.0)
    assert collapser.take(0.01) == []
    collapser.feed(2, "stdout", "a\n", 0.02)
    assert shown(collapser.take(0.02)) == [((0, 1, 2), "a\n")]


def test_the_order_of_a_rank_is_kept_when_others_print_in_another_order() -> None:
    collapser = Collapser(range(3))
    collapser.feed(0, "stdout", "a\nb\nc\n", 0.0)
    collapser.feed(1, "stdout", "a\nc\nb\n", 0.0)
    assert shown(collapser.close(0.0)) == [((0, 1), "a\n"), ((0,), "b\n"), ((0, 1), "c\n"), ((1,), "b\n")]


def test_repeated_lines_are_counted_one_by_one() -> None:
    collapser = Collapser(range(2))
    collapser.feed(0, "stdout", ".\n" * 3, 0.0)
    collapser.feed(1, "stdout", ".\n" * 2, 0.0)
    assert shown(collapser.close(0.0)) == [((0, 1), ".\n"), ((0, 1), ".\n"), ((0,), ".\n")]


def test_stdout_and_stderr_are_never_one_line() -> None:
    collapser = Collapser(range(2))
    collapser.feed(0, "stdout", "a\n", 0.0)
    collapser.feed(1, "stderr", "a\n", 0.0)
    assert {(piece.stream, piece.ranks) for piece in collapser.close(0.0)} == {("stdout", (0,)), ("stderr", (1,))}


def test_streams_that_come_in_another_order_are_merged_all_the_same() -> None:
    collapser = Collapser(range(2))
    for rank, streams in enumerate([("stdout", "stderr"), ("stderr", "stdout")]):
        for stream in streams:
            collapser.feed(rank, stream, f"{stream}\n", 0.0)
    assert shown(collapser.take(0.0)) == [((0, 1), "stdout\n"), ((0, 1), "stderr\n")]


def test_equal_displays_are_one_and_keep_their_place_between_lines() -> None:
    collapser = Collapser(range(2))
    for rank in range(2):
        collapser.feed(rank, "stdout", "before\n", 0.0)
        collapser.feed_display(rank, "plot", {"rank": rank}, 0.0)
        collapser.feed(rank, "stdout", "after\n", 0.0)
    assert [piece.stream for piece in collapser.take(0.0)] == ["stdout", "display", "stdout"]


def test_what_was_begun_comes_before_a_display() -> None:
    collapser = Collapser([0])
    collapser.feed(0, "stdout", "half", 0.0)
    collapser.feed_display(0, "plot", {}, 0.0)
    collapser.feed(0, "stdout", " more\n", 0.0)
    assert [(piece.text, piece.continues) for piece in collapser.take(0.0)] == [
        ("half", False),
        ("", False),
        (" more\n", True),
    ]


def test_at_once_leaves_unfinished_lines_alone() -> None:
    collapser = Collapser(range(2))
    collapser.feed(0, "stdout", "a\nhalf", 0.0)
    assert shown(collapser.take(0.0, at_once=True)) == [((0,), "a\n")]
    assert shown(collapser.close(0.0)) == [((0,), "half")]


def test_blocks_come_when_their_rank_ends() -> None:
    blocks = ByRank(range(2), blocks=True)
    blocks.feed(0, "stdout", "a\n", 0.0)
    blocks.feed(1, "stdout", "x\n", 0.0)
    blocks.feed(0, "stderr", "b", 0.0)
    assert blocks.take(10.0) == []
    blocks.end(1, 10.0)
    assert shown(blocks.take(10.0)) == [((1,), "x\n")]
    blocks.end(0, 11.0)
    assert shown(blocks.take(11.0)) == [((0,), "a\n"), ((0,), "b")]
    blocks.feed(0, "stdout", "late\n", 12.0)
    assert shown(blocks.take(12.0)) == [((0,), "late\n")]


def test_nothing_merged_means_nothing_held() -> None:
    single = ByRank(range(2), blocks=False)
    for rank in range(2):
        single.feed(rank, "stdout", "a\n", 0.0)
    assert single.due_at() == 0.0
    assert shown(single.take(0.0)) == [((0,), "a\n"), ((1,), "a\n")]


CHUNKS = ["a\n", "b\n", "c\n", "a", "b\nc", "\n", "a\nb\nc\n", ".\n.\n"]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["stdout", "stdout", "stderr", "display", "end"]),
        st.sampled_from(CHUNKS),
        st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.7]),
        st.booleans(),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", ["equal", "rank", "none"])
@given(steps=STEPS)
def test_nothing_is_lost_or_reordered_within_a_rank_and_stream(
    name: str, steps: list[tuple[int, str, str, float, bool]]
) -> None:
    grouping = grouping_for(name, range(4))
    sent: dict[tuple[int, str], str] = {}
    pieces: list[Piece] = []
    now = 0.0
    for number, (rank, stream, text, pause, take) in enumerate(steps):
        now += pause
        if stream == "end":
            grouping.end(rank, now)
        elif stream == "display":
            grouping.feed_display(rank, text, number, now)
            sent[rank, stream] = sent.get((rank, stream), "") + text
        else:
            grouping.feed(rank, stream, text, now)
            sent[rank, stream] = sent.get((rank, stream), "") + text
        if take:
            pieces += grouping.take(now)
            _check_due(grouping, now)
    pieces += grouping.close(now)
    got: dict[tuple[int, str], str] = {}
    for piece in pieces:
        for rank in piece.ranks:
            text = steps[piece.display][2] if piece.display is not None else piece.text
            got[rank, piece.stream] = got.get((rank, piece.stream), "") + text
    assert {key: text for key, text in got.items() if text} == {key: text for key, text in sent.items() if text}
    assert grouping.take(now + 10) == [] and grouping.due_at() is None


def _check_due(grouping: Grouping, now: float) -> None:
    due = grouping.due_at()
    assert due is None or now < due <= now + max(WINDOW_S, REST_S)
