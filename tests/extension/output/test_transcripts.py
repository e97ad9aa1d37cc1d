"""The output that cells have shown, kept and shown again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from meshbook.errors import UsageError
from meshbook_extension.output import transcripts
from meshbook_extension.output.transcripts import CELL_LIMIT, LONG_S, Transcript, Transcripts


class Sink:
    """A front end that keeps each message in words."""

    replaces = True

    def __init__(self) -> None:
        self.shown: list[str] = []

    def stream(self, name: str, text: str) -> None:
        self.shown.append(text)

    def display(
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object],
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        self.shown.append(f"{'update' if update else 'display'} {display_id}: {data['text/plain']}")

    def bars(self, lines: Sequence[str]) -> None:
        self.shown.append(f"bars {list(lines)}")


def write(transcript: Transcript) -> None:
    transcript.stream("stdout", "one\n")
    transcript.stream("stdout", "two\n")
    transcript.display({"text/plain": "1"}, {}, "a")
    transcript.display({"text/plain": "2"}, {}, "a", update=True)
    transcript.bars(["10%"])
    transcript.bars(["20%"])


def test_messages_go_on_and_are_shown_again_as_they_stand() -> None:
    page, later = Sink(), Sink()
    transcript = Transcript("cell 1", page, "page")
    write(transcript)
    assert page.shown == [
        "one\n", "two\n", "display a: 1", "update a: 2", "bars ['10%']", "bars ['20%']",
    ]  # fmt: skip
    transcript.show(later)
    assert later.shown == ["one\ntwo\n", "display a: 2", "bars ['20%']"]
    transcript.stream("stdout", "three\n")
    assert later.shown[-1] == "bars ['20%']", "the cell has ended"


def test_the_rest_of_a_running_cell_goes_to_both() -> None:
    page, later = Sink(), Sink()
    transcript = Transcript("cell 1", page, "page", is_running=lambda: True)
    transcript.display({"text/plain": "1"}, {}, "a")
    transcript.show(later)
    transcript.stream("stdout", "more\n")
    transcript.display({"text/plain": "2"}, {}, "a", update=True)
    transcript.bars([])
    assert later.shown == ["display a: 1", "more\n", "bars []"], "an update reaches each display with its id"
    assert page.shown == ["display a: 1", "more\n", "update a: 2", "bars []"]


def test_the_oldest_of_too_much_goes_and_is_counted() -> None:
    transcript, sink = Transcript("cell 1", Sink(), "page"), Sink()
    line = "x" * 999 + "\n"
    for number in range(5000):
        transcript.stream("stdout", line)
        if number % 1000 == 0:
            transcript.display({"text/plain": "a display between"}, {}, str(number))
    transcript.show(sink)
    assert "are not kept; all of it is in the logs: %mesh logs" in sink.shown[0]
    kept = sum(map(len, sink.shown))
    assert CELL_LIMIT / 2 < kept < 2.1 * CELL_LIMIT
    assert sink.shown[-1].endswith(line)


def test_cells_are_found_by_number_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "CELLS", 3)
    kept = Transcripts()
    with pytest.raises(UsageError, match="no cell has run on a mesh yet"):
        kept.find()
    for number in range(1, 6):
        kept.open(f"cell {number}", Sink(), "page")
    assert kept.find().what == "cell 5" and kept.find("3").what == "cell 3"
    with pytest.raises(UsageError, match="no output of a cell 1 on a mesh is kept; there are cells 3, 4, 5"):
        kept.find("1")


def test_another_page_is_told_once_of_cells_that_outlived_theirs() -> None:
    kept = Transcripts()
    assert kept.unseen_by("first") == []
    short, long, silent = (kept.open(f"cell {number}", Sink(), "first") for number in range(3))
    for each in (short, long):
        each.stream("stdout", "text\n")
    long.began = short.began - 2 * LONG_S
    silent.began = long.began
    assert kept.unseen_by("first") == [], "it is their own page"
    long.stream("stdout", "more\n")
    assert kept.unseen_by("second") == [long] and long.lines == 2
    assert kept.unseen_by("second") == [] and kept.unseen_by("third") == []
