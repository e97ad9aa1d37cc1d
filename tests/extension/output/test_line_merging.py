"""Merging equal lines of ranks: nothing lost, nothing reordered, nothing held for longer than the window."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshbook.calls.output import JOINS
from meshbook_extension.output import line_merging
from meshbook_extension.output.line_merging import WINDOW_S, ByRank, Grouping, LineMerger, LinePiece, grouping_for
from meshbook_extension.output.line_reader import REST_S

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For a busy machine."""


def shown(pieces: list[LinePiece]) -> list[tuple[tuple[int, ...], str]]:
    return [(piece.ranks, piece.text) for piece in pieces]


def test_a_line_that_every_rank_prints_is_shown_at_once_and_once() -> None:
    merger = LineMerger(range(4))
    for rank in range(3):
        merger.feed(rank, "stdout", "step 10\n", 0.0)
        assert merger.take(0.0) == []
    merger.feed(3, "stdout", "step 10\n", 0.01)
    assert shown(merger.take(0.01)) == [((0, 1, 2, 3), "step 10\n")]


def test_a_line_of_some_ranks_waits_for_the_window_and_no_longer() -> None:
    merger = LineMerger(range(4))
    merger.feed(0, "stdout", "hello\n", 0.0)
    merger.feed(2, "stdout", "hello\n", 0.1)
    assert merger.due_at() == WINDOW_S
    assert merger.take(WINDOW_S - 0.01) == []
    assert shown(merger.take(WINDOW_S)) == [((0, 2), "hello\n")]
    assert merger.due_at() is None


def test_a_late_rank_is_shown_alone() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.take(1.0)
    merger.feed(1, "stdout", "a\n", 1.1)
    assert shown(merger.close(1.1)) == [((1,), "a\n")]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    merger = LineMerger(range(3))
    merger.end(2, 0.0)
    for rank in (0, 1):
        merger.feed(rank, "stdout", "a\n", 0.0)
    assert shown(merger.take(0.0)) == [((0, 1), "a\n")]


def test_ranks_that_have_ended_do_not_stand_for_those_that_run() -> None:
    merger = LineMerger(range(3))
    for rank in (0, 1):
        merger.feed(rank, "stdout", "a\n", 0.0)
        merger.end(rank, 0.0)
    assert merger.take(0.01) == []
    merger.feed(2, "stdout", "a\n", 0.02)
    assert shown(merger.take(0.02)) == [((0, 1, 2), "a\n")]


def test_after_the_end_of_all_ranks_lines_wait_for_each_other_and_for_nothing_else() -> None:
    merger = LineMerger(range(3))
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.end(0, 0.0)
    merger.feed(2, "stdout", "b\n", 0.0)
    merger.end(2, 0.0)
    merger.feed(1, "stdout", "b\n", 0.0)
    merger.end(1, 0.0)
    merger.feed(2, "stdout", "late\n", 0.01)
    assert merger.due_at() == 0.0
    assert shown(merger.take(0.01)) == [((0,), "a\n"), ((1, 2), "b\n")]
    merger.feed(0, "stdout", "late\n", 0.1)
    assert merger.take(0.1) == []
    merger.feed(1, "stdout", "late\n", 0.15)
    assert shown(merger.take(0.15)) == [((0, 1, 2), "late\n")]
    merger.feed(1, "stdout", "mine\n", 1.0)
    assert shown(merger.take(1.0 + WINDOW_S)) == [((1,), "mine\n")]


def test_the_order_of_a_rank_is_kept_when_others_print_in_another_order() -> None:
    merger = LineMerger(range(3))
    merger.feed(0, "stdout", "a\nb\nc\n", 0.0)
    merger.feed(1, "stdout", "a\nc\nb\n", 0.0)
    assert shown(merger.close(0.0)) == [((0, 1), "a\n"), ((0,), "b\n"), ((0, 1), "c\n"), ((1,), "b\n")]


def test_repeated_lines_are_counted_one_by_one() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, "stdout", ".\n" * 3, 0.0)
    merger.feed(1, "stdout", ".\n" * 2, 0.0)
    assert shown(merger.close(0.0)) == [((0, 1), ".\n"), ((0, 1), ".\n"), ((0,), ".\n")]


def test_stdout_and_stderr_are_never_one_line() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, "stdout", "a\n", 0.0)
    merger.feed(1, "stderr", "a\n", 0.0)
    assert {(piece.stream, piece.ranks) for piece in merger.close(0.0)} == {("stdout", (0,)), ("stderr", (1,))}


def test_streams_that_come_in_another_order_are_merged_all_the_same() -> None:
    merger = LineMerger(range(2))
    for rank, streams in enumerate([("stdout", "stderr"), ("stderr", "stdout")]):
        for stream in streams:
            merger.feed(rank, stream, f"{stream}\n", 0.0)
    assert shown(merger.take(0.0)) == [((0, 1), "stdout\n"), ((0, 1), "stderr\n")]


def test_equal_displays_are_one_and_keep_their_place_between_lines() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, "stdout", "before\n", 0.0)
        merger.feed_display(rank, "plot", {"rank": rank}, 0.0)
        merger.feed(rank, "stdout", "after\n", 0.0)
    assert [piece.stream for piece in merger.take(0.0)] == ["stdout", "display", "stdout"]


def test_what_was_begun_comes_before_a_display() -> None:
    merger = LineMerger([0])
    merger.feed(0, "stdout", "half", 0.0)
    merger.feed_display(0, "plot", {}, 0.0)
    merger.feed(0, "stdout", " more\n", 0.0)
    assert [(piece.text, piece.continues) for piece in merger.take(0.0)] == [
        ("half", False),
        ("", False),
        (" more\n", True),
    ]


def test_at_once_leaves_unfinished_lines_alone() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, "stdout", "a\nhalf", 0.0)
    assert shown(merger.take(0.0, at_once=True)) == [((0,), "a\n")]
    assert shown(merger.close(0.0)) == [((0,), "half")]


def test_blocks_come_in_the_order_of_ranks_when_those_before_have_ended() -> None:
    blocks = ByRank(range(3), blocks=True)
    blocks.feed(0, "stdout", "a\n", 0.0)
    blocks.feed(1, "stdout", "x\n", 0.0)
    blocks.feed(0, "stderr", "b", 0.0)
    blocks.end(1, 10.0)
    blocks.feed(1, "stdout", "late\n", 10.0)
    assert blocks.take(10.0) == []
    blocks.end(0, 11.0)
    assert shown(blocks.take(11.0)) == [((0,), "a\n"), ((0,), "b"), ((1,), "x\n"), ((1,), "late\n")]
    blocks.feed(0, "stdout", "late\n", 12.0)
    assert shown(blocks.take(12.0)) == [((0,), "late\n")]


def test_equal_lines_meet_behind_lines_that_differ() -> None:
    merger = LineMerger(range(8))
    for rank in range(8):
        merger.feed(rank, "stdout", f"rank {rank}\nsame\n", 0.1 * rank / 8)
    different = [((rank,), f"rank {rank}\n") for rank in range(8)]
    assert shown(merger.take(WINDOW_S)) == [*different, (tuple(range(8)), "same\n")]


def test_an_equal_line_further_back_is_waited_for_no_longer_than_the_window() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, "stdout", "same\n", 0.0)
    merger.feed(1, "stdout", "1\n2\nsame\n3\n", 0.1)
    assert merger.take(0.14) == []
    assert shown(merger.take(WINDOW_S)) == [((1,), "1\n"), ((1,), "2\n"), ((0, 1), "same\n")]
    assert merger.due_at() == 0.1 + WINDOW_S


def test_stdout_and_stderr_keep_an_order_that_is_known() -> None:
    merger = LineMerger(range(2))
    for rank, streams in enumerate([("stdout", "stderr"), ("stderr", "stdout")]):
        for place, stream in enumerate(streams):
            merger.feed(rank, stream, f"{stream}\n", 0.0, place)
    assert shown(merger.close(0.0)) == [((0,), "stdout\n"), ((0, 1), "stderr\n"), ((1,), "stdout\n")]


@pytest.mark.parametrize("name", ["equal", "none"])
def test_results_wait_for_the_ranks_that_run_and_are_sorted(name: str) -> None:
    grouping = grouping_for(name, range(3))
    for rank in (2, 0):
        grouping.feed(rank, "stdout", f"print of {rank}\n", 0.0)
        grouping.feed_display(rank, rank, rank, 0.0, is_result=True)
        grouping.feed_display(rank, ("figure", rank), 10 + rank, 0.0)
        grouping.end(rank, 0.1)
    assert sorted(shown(grouping.take(1.0, at_once=True))) == [((rank,), f"print of {rank}\n") for rank in (0, 2)]
    assert grouping.due_at() is None and grouping.close(1.0, results=False) == []
    grouping.end(1, 2.0)
    pieces = grouping.take(2.0, at_once=True)
    shows = [piece.display for piece in pieces]
    assert shows == ([0, 2, 10, 12] if name == "equal" else [0, 10, 2, 12])


def test_equal_results_are_one_however_late_a_rank_is() -> None:
    merger = LineMerger(range(3))
    for rank, at in ((2, 0.0), (1, 5.0), (0, 9.0)):
        merger.take(at)
        merger.feed(rank, "stdout", "ends\n", at)
        merger.feed_display(rank, rank and "looks", rank, at, is_result=True)
        merger.end(rank, at)
    assert [(piece.stream, piece.ranks) for piece in merger.take(9.0)] == [
        ("stdout", (0,)), ("display", (0,)), ("display", (1, 2)),
    ]  # fmt: skip


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
@patient
@given(steps=STEPS)
def test_nothing_is_lost_or_reordered_within_a_rank_and_stream(
    name: str, steps: list[tuple[int, str, str, float, bool]]
) -> None:
    grouping = grouping_for(name, range(4))
    sent: dict[tuple[int, str], str] = {}
    pieces: list[LinePiece] = []
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


@patient
@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.integers(0, 2)),
            st.sampled_from([*CHUNKS, "err\n", "a bar |\r", "display", "end", f"a{JOINS}\n", f"{JOINS}\nb"]),
            st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.7]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_texts_that_are_compared_as_they_are_give_what_their_lines_give(
    steps: list[tuple[set[int], str, float, bool]],
) -> None:
    quick, plain = LineMerger(range(3)), LineMerger(range(3))
    now = 0.0
    for ranks, text, pause, take in steps:
        now += pause
        for merger in quick, plain:
            # what is special is never compared as a whole
            with patch.object(line_merging, "_SPECIAL", line_merging._SPECIAL if merger is quick else re.compile("")):
                for rank in ranks:
                    if text == "end":
                        merger.end(rank, now)
                    elif text == "display":
                        merger.feed_display(rank, text, text, now)
                    else:
                        merger.feed(rank, "stderr" if text == "err\n" else "stdout", text, now)
        if take:
            assert quick.take(now) == plain.take(now)
            _check_due(quick, now)
    assert quick.close(now) == plain.close(now)


def test_lines_of_one_write_are_shown_together() -> None:
    merger = LineMerger(range(3))
    for rank in range(3):
        table = f"a  b{JOINS}\n1  {rank // 2}{JOINS}\n2  0"
        merger.feed(rank, "stdout", f"table\n{table}\nend\n"[:9], 0.0)  # in the midst of it
        merger.feed(rank, "stdout", f"table\n{table}\nend\n"[9:], 0.0)
    assert shown(merger.take(WINDOW_S)) == [
        ((0, 1, 2), "table\n"),
        ((0, 1), "a  b\n1  0\n2  0\n"),
        ((2,), "a  b\n1  1\n2  0\n"),
        ((0, 1, 2), "end\n"),
    ]


def test_equal_texts_of_all_ranks_are_not_aligned() -> None:
    merger = LineMerger(range(2))
    text = "".join(f"line {number}\n" for number in range(100))
    merger.feed(0, "stdout", text, 0.0)
    merger.feed(1, "stdout", text[:-3], 0.0)
    with patch.object(merger._alignment, "add", side_effect=AssertionError):
        assert shown(merger.take(0.0)) == [((0, 1), f"line {number}\n") for number in range(99)]
        merger.feed(1, "stdout", text[-3:], 0.1)
        assert shown(merger.take(0.1)) == [((0, 1), "line 99\n")]
    assert merger.due_at() is None


def _check_due(grouping: Grouping, now: float) -> None:
    due = grouping.due_at()
    assert due is None or now < due <= now + max(WINDOW_S, REST_S)


LINES = st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "display"]), st.sampled_from("abc")), max_size=8)


@patient
@given(
    programs=st.lists(st.tuples(LINES, LINES), min_size=1, max_size=5),
    tail=LINES,
    skews=st.lists(st.floats(0, WINDOW_S * 0.4), min_size=5, max_size=5),
    pumps=st.lists(st.floats(0, 2 * WINDOW_S), max_size=6),
)
def test_equal_tails_are_merged_whatever_comes_before(
    programs: list[tuple[list[tuple[str, str]], list[tuple[str, str]]]],
    tail: list[tuple[str, str]],
    skews: list[float],
    pumps: list[float],
) -> None:
    """Each rank shows lines of its own, then what all show, all within the window."""
    ranks = range(len(programs))
    merger = LineMerger(ranks)
    events: list[tuple[float, int, str, str]] = []
    for rank, (first, second) in enumerate(programs):
        steps = [(stream, f"{text} of {rank}") for stream, text in first + second] + tail
        events += [(skews[rank] * (1 + 1.4 * (at >= len(first))), rank, *step) for at, step in enumerate(steps)]
    pieces: list[LinePiece] = []
    for place, (at, rank, stream, text) in enumerate(sorted(events, key=lambda event: event[:1])):
        while pumps and min(pumps) <= at:
            pumps.remove(earliest := min(pumps))
            pieces += merger.take(earliest)
        if stream == "display":
            merger.feed_display(rank, text, text, at)
        else:
            merger.feed(rank, stream, f"{text}\n", at, place)
    for at in sorted(pumps):
        pieces += merger.take(max(at, max(skews) * 2.4))
    pieces += merger.close(10.0)
    assert len([piece for piece in pieces if len(piece.ranks) == len(ranks)]) >= len(tail)
    for rank, (first, second) in enumerate(programs):
        mine = [(p.stream, p.display or p.text.rstrip("\n")) for p in pieces if rank in p.ranks]
        assert mine == [(stream, f"{text} of {rank}") for stream, text in first + second] + tail


@pytest.mark.parametrize("name", ["equal", "rank", "none"])
@patient
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["stdout", "stderr", "display", "result", "end"]),
            st.sampled_from("abc"),
            st.integers(0, 1),
            st.sampled_from([0.0, 0.01, 0.1, 0.3]),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_lines_displays_and_results_of_a_rank_keep_their_order(
    name: str, steps: list[tuple[int, str, str, int, float, bool]]
) -> None:
    """Two lines change their order only where nobody knows it: one of stdout and one of stderr, of one place."""
    grouping = grouping_for(name, range(4))
    sent: dict[int, list[tuple[str, str, int]]] = {rank: [] for rank in range(4)}
    pieces: list[LinePiece] = []
    places = [0] * 4
    now = 0.0
    for rank, kind, text, further, pause, take in steps:
        now += pause
        places[rank] += further
        if kind == "end":
            grouping.end(rank, now)
        elif kind in ("display", "result"):
            places[rank] += 1
            grouping.feed_display(rank, text, text, now, is_result=kind == "result")
            sent[rank].append(("display", text, places[rank]))
            places[rank] += 1
        else:
            grouping.feed(rank, kind, f"{text}\n", now, places[rank])
            sent[rank].append((kind, text, places[rank]))
        if take:
            pieces += grouping.take(now)
    pieces += grouping.close(now)
    assert len({rank for piece in pieces for rank in piece.ranks}) == sum(map(bool, sent.values()))
    for rank, mine in sent.items():
        got = [(p.stream, p.display or p.text.rstrip("\n")) for p in pieces if rank in p.ranks]
        left = {
            stream: [(text, place) for kind, text, place in mine if kind == stream]
            for stream in ("stdout", "stderr", "display")
        }
        at_place = []
        for stream, text in got:
            expected, place = left[stream].pop(0)
            assert text == expected
            at_place.append(place)
        assert not any(left.values())
        assert at_place == sorted(at_place)
