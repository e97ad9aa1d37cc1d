"""Cutting text into lines: partial lines, carriage returns, tqdm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshbook_extension.output.line_reader import LONGEST_TAIL, REST_S, LineReader


def feed(reader: LineReader, text: str, now: float = 0.0) -> list[str]:
    return [line.text for line in reader.feed(0, "stdout", text, now)]


def test_lines_are_given_out_when_they_end() -> None:
    reader = LineReader()
    assert feed(reader, "one\ntw") == ["one\n"]
    assert feed(reader, "o\n\n") == ["two\n", "\n"]
    assert reader.end(0) == []


def test_the_end_of_a_rank_ends_its_line() -> None:
    reader = LineReader()
    feed(reader, "half")
    assert [(line.text, line.continues) for line in reader.end(0)] == [("half", False)]
    assert reader.ranks() == []


def test_a_line_that_rests_is_shown_as_far_as_it_goes() -> None:
    reader = LineReader()
    feed(reader, "Loading", 1.0)
    feed(reader, "...", 1.4)
    assert reader.due_at() == 1.0 + REST_S
    assert reader.take_rested(1.4) == []
    assert [line.text for line in reader.take_rested(1.5)] == ["Loading..."]
    assert reader.due_at() is None
    (rest,) = reader.feed(0, "stdout", " done\n", 3.0)
    assert (rest.text, rest.continues) == (" done\n", True)
    (fresh,) = reader.feed(0, "stdout", "next\n", 3.0)
    assert not fresh.continues


def test_a_very_long_line_does_not_wait() -> None:
    reader = LineReader()
    feed(reader, "x" * (LONGEST_TAIL + 1), 0.0)
    assert len(reader.take_rested(0.0)) == 1


def test_a_progress_bar_becomes_one_line_with_its_last_state() -> None:
    reader = LineReader()
    for percent in range(0, 100, 10):
        assert feed(reader, f"\r{percent}%|##   |") == []
    assert reader.bars() == [((0,), "90%|##   |")]
    assert reader.take_rested(100.0) == []
    assert feed(reader, "\r100%|#####|\nafter\n") == ["100%|#####|\n", "after\n"]
    assert reader.bars() == []


def test_a_bar_that_puts_the_return_at_the_end_is_one_too() -> None:
    reader = LineReader()
    feed(reader, "1 of 3\r")
    assert reader.bars() == [((0,), "1 of 3")]
    feed(reader, "2 of 3\r")
    assert reader.bars() == [((0,), "2 of 3")]
    assert [line.text for line in reader.end(0)] == ["2 of 3"]


def test_a_bar_that_clears_itself_leaves_nothing() -> None:
    reader = LineReader()
    feed(reader, "\r50%|##  |\r          \r")
    assert reader.bars() == []
    assert feed(reader, "next\n") == ["next\n"]
    feed(reader, "\r50%|##  |\r          \r")
    assert reader.end(0) == []


def test_windows_line_ends_are_line_ends_in_any_cut() -> None:
    reader = LineReader()
    assert feed(reader, "one\r\ntwo\r") == ["one\n"]
    assert feed(reader, "\nthree\r\n") == ["two\n", "three\n"]


def test_a_cursor_that_rich_hides_and_shows_leaves_no_trace_in_any_cut() -> None:
    shown = "\x1b[?25lWorking \x1b[35m100%\x1b[0m\n\x1b[?25h\ndone\x1b[?25h\n"
    lines = ["Working \x1b[35m100%\x1b[0m\n", "done\n"]
    assert feed(LineReader(), shown) == lines
    for cut in range(len(shown)):
        reader = LineReader()
        assert feed(reader, shown[:cut]) + feed(reader, shown[cut:]) == lines, cut


def test_equal_bars_of_ranks_are_named_once() -> None:
    reader = LineReader()
    for rank in range(3):
        reader.feed(rank, "stderr", "\r50%" if rank else "\r40%", 0.0)
    assert reader.bars() == [((0,), "40%"), ((1, 2), "50%")]


def test_nested_bars_of_tqdm_stay_two_bars() -> None:
    reader = LineReader()
    assert feed(reader, "\router 1/2") == []
    for step in range(5):
        assert feed(reader, f"\n\rinner {step}/5\x1b[A") == []
    assert [state for _, state in reader.bars()] == ["outer 1/2", "inner 4/5"]
    assert feed(reader, "\n\r         \x1b[A\router 2/2\n") == ["outer 2/2\n"]
    assert reader.bars() == []


@given(st.lists(st.tuples(st.sampled_from(["ab", "c\n", "\n", "d\ne", ""]), st.floats(0, 1)), max_size=30))
def test_text_without_returns_comes_out_as_it_went_in(chunks: list[tuple[str, float]]) -> None:
    reader = LineReader()
    now, got = 0.0, ""
    for text, pause in chunks:
        now += pause
        got += "".join(feed(reader, text, now))
        got += "".join(line.text for line in reader.take_rested(now))
    got += "".join(line.text for line in reader.end(0))
    assert got == "".join(text for text, _ in chunks)
