"""Rich output of several ranks as grids: which display joins which grid, and how grids look. Time is ours here."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from fakes import RecordingSink

from meshbook_extension.output.display_rounds import (
    DRAW_S,
    WAIT_S,
    DisplayGrid,
    DisplayRounds,
    RankCard,
    fits_card,
    grid_bundle,
)
from meshbook_extension.output.labels import FAILURE, NOTICE, show_message
from meshbook_extension.output.line_merging import LinePiece

PNG = base64.b64encode(b"picture").decode()


def name(ranks: Any) -> str:
    return f"gpus={ranks[0]}" if len(ranks) == 1 else "same"


class Rounds:
    """The rounds of a cell of ``count`` ranks, and what they have shown."""

    def __init__(self, count: int = 4, *, joins: bool = True, replaces: bool = True) -> None:
        self.sink = RecordingSink()
        self.sink.replaces = replaces
        self.rounds = DisplayRounds(self.sink, range(count), name, joins=joins)
        self.now = 0.0
        self.texts: list[str] = []

    def plot(self, rank: int, what: str = "", display_id: str = "", is_result: bool = False) -> None:
        data = {"text/plain": what or f"plot {rank}", "image/png": PNG + (what or str(rank))}
        card = RankCard((rank,), data, {}, display_id or None, is_result)
        self.rounds.expect(card)
        self.rounds.add(LinePiece((rank,), "display", "", display=card), self.now)

    def update(self, display_id: str, data: dict[str, str]) -> None:
        self.rounds.update(RankCard((1,), data, {}, display_id))

    def write(self, rank: int, text: str) -> None:
        self.rounds.add(LinePiece((rank,), "stdout", text), self.now)

    def pump(self, at: float) -> list[str]:
        """Show everything due; returns the kinds of all messages so far, texts in their place."""
        self.now = at
        for item in self.rounds.release(at):
            if isinstance(item, DisplayGrid):
                self.rounds.show(item, at)
            else:
                self.sink.stream("stdout", item.text)
        self.rounds.draw_again(at)
        return self.sink.kinds()

    @property
    def captions(self) -> list[list[str]]:
        """The captions of each grid as it was drawn."""
        shown = [
            content[0].get("text/html", "") for kind, content in self.sink.messages if kind in ("display", "update")
        ]
        return [re.findall(r"<span[^>]*>([^<]*)</span>", html) for html in shown if "<summary" in html]


def test_the_displays_of_all_ranks_are_one_grid_in_their_order_at_once() -> None:
    rounds = Rounds()
    for rank in (3, 1, 0, 2):
        rounds.plot(rank)
    assert rounds.pump(0.0) == ["display"]
    assert rounds.captions == [["[0] gpus=0", "[1] gpus=1", "[2] gpus=2", "[3] gpus=3"]]


def test_a_grid_waits_for_ranks_that_are_late_and_text_behind_it_waits_too() -> None:
    rounds = Rounds()
    rounds.plot(1)
    rounds.write(1, "after\n")
    assert rounds.pump(WAIT_S / 2) == []
    assert rounds.rounds.due_at() == WAIT_S
    rounds.plot(0)
    assert rounds.pump(WAIT_S) == ["display", "stdout"]
    assert rounds.captions == [["[0] gpus=0", "[1] gpus=1"]]


def test_a_rank_that_comes_later_still_gets_its_place() -> None:
    rounds = Rounds()
    rounds.plot(1)
    rounds.plot(2)
    rounds.pump(WAIT_S)
    rounds.plot(0)
    assert rounds.pump(WAIT_S + DRAW_S / 2) == ["display"]
    assert rounds.pump(WAIT_S + 2 * DRAW_S) == ["display", "update"]
    assert rounds.captions[-1] == ["[0] gpus=0", "[1] gpus=1", "[2] gpus=2"]


def test_a_rank_that_has_written_since_begins_a_grid_below() -> None:
    rounds = Rounds()
    rounds.plot(1)
    rounds.plot(2)
    rounds.write(2, "end of 2\n")
    rounds.write(0, "before the plot of 0\n")
    rounds.pump(WAIT_S)
    rounds.plot(0)
    rounds.plot(2)
    rounds.pump(3 * WAIT_S)
    assert rounds.captions == [["[1] gpus=1", "[2] gpus=2"], ["[0] gpus=0", "[2] gpus=2"]]


def test_second_displays_are_the_second_grid() -> None:
    rounds = Rounds(2)
    for rank in (1, 0):
        rounds.plot(rank, f"first {rank}")
        rounds.plot(rank, f"second {rank}")
    rounds.pump(0.0)
    plain = [content[0]["text/plain"] for _, content in rounds.sink.messages]
    assert plain == ["[0] first 0\n[1] first 1", "[0] second 0\n[1] second 1"]


def test_a_single_rank_is_shown_as_any_cell_is_and_may_become_a_grid() -> None:
    rounds = Rounds()
    rounds.plot(2)
    rounds.pump(WAIT_S)
    (_, (ranks, _)), (_, (data, place)) = rounds.sink.messages
    assert ranks == {"text/plain": "[2]"} and data["image/png"] == PNG + "2" and "text/html" not in data
    rounds.plot(0)
    rounds.pump(WAIT_S + DRAW_S)
    (_, (ranks, _)), (_, (data, again)) = rounds.sink.messages[2:]
    assert ranks == {"text/plain": "[0,2]"} and place == again
    assert rounds.captions == [["[0] gpus=0", "[2] gpus=2"]]


def test_where_nothing_can_be_replaced_late_displays_stand_below() -> None:
    rounds = Rounds(replaces=False)
    for rank in range(3):
        rounds.plot(rank)
        rounds.pump((rank + 1) * WAIT_S)
    assert "update" not in rounds.sink.kinds()
    assert [content[0]["text/plain"] for _, content in rounds.sink.messages][::2] == ["[0]", "[1]", "[2]"]


def test_without_merging_each_rank_shows_its_own() -> None:
    rounds = Rounds(2, joins=False)
    for rank in range(2):
        rounds.plot(rank)
    rounds.pump(0.0)
    assert rounds.sink.kinds() == ["display"] * 4 and rounds.captions == []


def test_updates_reach_the_card_of_their_rank_and_an_empty_one_goes() -> None:
    rounds = Rounds(3)
    for rank in range(3):
        rounds.plot(rank, display_id=f"main.{rank}.x")
    rounds.pump(0.0)
    rounds.update("main.1.x", {"text/plain": "new", "text/html": "<b>new</b>"})
    rounds.pump(DRAW_S)
    assert "<b>new</b>" in rounds.sink.messages[-1][1][0]["text/html"]
    rounds.update("main.1.x", {"text/plain": ""})
    rounds.pump(3 * DRAW_S)
    assert rounds.captions[-1] == ["[0] gpus=0", "[2] gpus=2"]


def test_an_update_of_a_display_that_an_earlier_kernel_has_shown_is_sent_on() -> None:
    rounds = Rounds()
    rounds.update("main.1.x", {"image/png": PNG})
    rounds.pump(0.0)
    assert rounds.sink.messages == [("update", ({"image/png": PNG}, "main.1.x"))]


def test_an_update_that_overtakes_its_display_changes_it() -> None:
    rounds = Rounds(1)
    card = RankCard((0,), {"image/png": "old"}, {}, "main.0.x")
    rounds.rounds.expect(card)
    rounds.update("main.0.x", {"image/png": PNG})
    assert rounds.pump(0.0) == []
    rounds.rounds.add(LinePiece((0,), "display", "", display=card), 0.0)
    rounds.pump(0.0)
    assert rounds.sink.messages[-1][1][0] == {"image/png": PNG}


def test_a_grid_of_many_bytes_is_drawn_again_more_seldom() -> None:
    rounds = Rounds(2)
    for rank in range(2):
        rounds.plot(rank, "x" * 1_000_000, display_id=f"{rank}")
    rounds.pump(0.0)
    rounds.update("0", {"image/png": PNG})
    due_at = rounds.rounds.due_at()
    assert due_at is not None and due_at > 1
    rounds.pump(DRAW_S)
    assert rounds.sink.kinds() == ["display"]
    rounds.rounds.draw_again(DRAW_S, at_once=True)
    assert rounds.sink.kinds() == ["display", "update"]


def test_values_join_no_grid_of_displays() -> None:
    rounds = Rounds(2)
    rounds.plot(0)
    for rank in range(2):
        rounds.plot(rank, f"value {rank}", is_result=True)
    rounds.pump(WAIT_S)
    assert rounds.captions == [["[0] gpus=0", "[1] gpus=1"]]
    assert rounds.sink.messages[1][1][0]["text/plain"] == "plot 0"


# ---- looks ----------------------------------------------------------------------------------------------------------


def frame(rank: int, value: object) -> RankCard:
    return RankCard((rank,), {"text/plain": f"<Frame at {rank}>", "text/html": f"<table>{value}</table>"})


def test_equal_cards_are_one_and_the_odd_rank_is_marked() -> None:
    html = str(grid_bundle([frame(rank, 7 if rank == 5 else 1) for rank in range(8)], name)["text/html"])
    assert re.findall(r"<span style=\"([^\"]*)\">([^<]*)</span>", html) == [
        ("", "[0-4,6,7] same"),
        ("color:#ef6c00;color:var(--jp-warn-color1,#ef6c00);font-weight:700", "[5] gpus=5"),
    ]


def test_without_a_majority_none_is_odd() -> None:
    html = str(grid_bundle([frame(rank, rank // 2) for rank in range(4)], name)["text/html"])
    assert "warn-color1" not in html and html.count("same") == 2


def test_more_than_twelve_cards_are_folded() -> None:
    html = str(grid_bundle([frame(rank, rank) for rank in range(64)], name)["text/html"])
    shown, _, folded = html.partition(">52 more</summary>")
    assert shown.count("<table>") == 12 and folded.count("<table>") == 52


def test_pictures_are_embedded_and_words_of_ranks_are_no_html() -> None:
    svg = RankCard((0,), {"text/plain": "<script>", "image/svg+xml": "<svg onload='x'></svg>"})
    png = RankCard((1,), {"image/png": f"{PNG}\n"}, {"image/png": {"width": 300}})
    html = str(grid_bundle([svg, png], name)["text/html"])
    assert "<svg" not in html and "<script" not in html
    assert f'src="data:image/png;base64,{PNG}" alt="" width="300"' in html
    source = re.findall(r"svg\+xml;base64,([^\"]*)", html)
    assert base64.b64decode(source[0]) == b"<svg onload='x'></svg>"


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        ({"image/png": PNG}, True),
        ({"text/html": "<b>1</b>", "text/plain": "1"}, True),
        ({"text/plain": "1"}, False),
        ({"text/html": "<SCRIPT>alert(1)</SCRIPT>"}, False),
        ({"application/vnd.plotly.v1+json": "{}", "text/html": "<b>1</b>"}, False),
        ({"text/latex": "$x$", "text/plain": "x"}, False),
    ],
)
def test_what_a_card_shows(data: dict[str, str], fits: bool) -> None:
    assert fits_card(data) is fits


def test_messages_are_cards_with_the_same_words_as_text_and_no_html_of_ranks() -> None:
    sink = RecordingSink()
    show_message(sink, FAILURE, "rank 1 raised <b>")
    assert sink.messages == [("message", "rank 1 raised <b>\n")]
    terminal = RecordingSink()
    terminal.replaces = False
    show_message(terminal, NOTICE, "freed")
    assert terminal.messages == [("stderr", "freed\n")]


def test_a_traceback_keeps_its_colours_in_html() -> None:
    shown: list[dict[str, Any]] = []
    sink = RecordingSink()
    sink.display = lambda data, *rest: shown.append(dict(data))  # type: ignore[method-assign,assignment]
    text = "\x1b[31mred <\x1b[39m plain \x1b[38;5;28;01mgreen\x1b[0m end"
    show_message(sink, FAILURE, text)
    assert shown[0]["text/plain"] == text
    assert shown[0]["text/html"].partition(">")[2] == (
        '<span style="color:#d9534f;">red &lt;</span> plain '
        '<span style="color:#2e9e4f;font-weight:700">green</span> end</div>'
    )
