"""How pieces of output are written."""

from __future__ import annotations

from meshbook.errors import Failure
from meshbook_extension.output.labels import Labeller, Text, headline, join_runs, label_block
from meshbook_extension.output.line_merging import LinePiece


def write(*pieces: LinePiece) -> str:
    labeller = Labeller()
    return "".join(text for piece in pieces for _, text in labeller.write(piece))


def test_a_line_stands_behind_its_ranks() -> None:
    assert (
        write(LinePiece((0, 1, 2, 3), "stdout", "step 10\n"), LinePiece((0, 2), "stdout", "x\n"))
        == "[0-3] step 10\n[0,2] x\n"
    )


def test_an_empty_line_has_no_trailing_space() -> None:
    assert write(LinePiece((0,), "stdout", "\n")) == "[0]\n"


def test_the_rest_of_a_line_follows_without_a_label() -> None:
    assert write(
        LinePiece((0,), "stdout", "a"), LinePiece((0,), "stdout", "b", True), LinePiece((0,), "stdout", "c\n", True)
    ) == ("[0] abc\n")


def test_the_rest_of_some_of_the_ranks_is_a_new_line() -> None:
    assert write(LinePiece((0, 1), "stdout", "a"), LinePiece((0,), "stdout", "b\n", True)) == "[0,1] a\n[0] b\n"


def test_a_missing_newline_goes_to_the_stream_that_lacks_it() -> None:
    labeller = Labeller()
    labeller.write(LinePiece((0,), "stdout", "a"))
    assert labeller.write(LinePiece((0,), "stderr", "b\n")) == [Text("stdout", "\n"), Text("stderr", "[0] b\n")]
    assert labeller.end_line() == []


def test_blocks_are_indented() -> None:
    assert label_block([0, 1], "a\nb") == "[0,1] a\n      b"


def test_runs_of_a_stream_become_one_message() -> None:
    assert join_runs([Text("stdout", "a"), Text("stdout", "b"), Text("stderr", "c")]) == [
        Text("stdout", "ab"),
        Text("stderr", "c"),
    ]


def test_the_headline_of_a_failure_has_the_first_line_of_its_text() -> None:
    failure = Failure(1, "here", "ValueError", "bad shard\nin all of its rows", (), "cell 7, line 3")
    assert headline(failure, [0, 1]) == "ranks 0,1 raised ValueError: bad shard"
    assert headline(failure, [0, 1], brief=True) == "ranks 0,1 raised ValueError: bad shard (cell 7, line 3)"
