"""From events to what a cell shows: order, grouping, limits, failures. Time is ours here; no thread runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from fakes import RecordingSink, cut, done, failure, out, shown
from patience import wait_until

from meshbook.calls.output import OutputEvent
from meshbook_extension.cells import output as cell_output
from meshbook_extension.cells.output import CellOutput
from meshbook_extension.output import budget
from meshbook_extension.output.line_merging import grouping_for
from meshbook_extension.output.publisher import Publisher, Scheduled


class StillPublisher:
    """Keeps the schedule; the test is the thread."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.is_stopping = False
        self.pumps_at_once = False

    def schedule(self, output: Scheduled, at: float) -> None:
        self.at.append(at)
        if self.pumps_at_once:
            output.pump(at)


class Cell:
    """One cell of ``count`` ranks."""

    def __init__(self, count: int = 4, group: str = "equal") -> None:
        self.sink = RecordingSink()
        self.publisher = StillPublisher()
        self.asked: list[Callable[[], None]] = []
        self.holds_answers = False
        self.output = CellOutput(
            range(count),
            self.sink,
            grouping_for(group, range(count)),
            cast(Publisher, self.publisher),
            lambda: {rank: f"/logs/rank-{rank}.log" for rank in range(count)},
            self.await_printed,
            "main",
        )

    def receive(self, *events: OutputEvent) -> None:
        for event in events:
            self.output.receive(event)

    def await_printed(self, on_come: Callable[[], None], timeout_s: float) -> None:
        """All that was printed has come, unless the test holds the answer back."""
        self.asked.append(on_come)
        if not self.holds_answers:
            on_come()

    def pump(self, later_s: float = 0.0) -> float | None:
        """Pump, and once more where that has asked for what was printed, and has the answer."""
        now, asked = time.monotonic() + later_s, len(self.asked)
        due = self.output.pump(now)
        return self.output.pump(now) if len(self.asked) > asked and not self.holds_answers else due

    def finish(self) -> str:
        self.publisher.pumps_at_once = True
        self.output.finish()
        self.publisher.pumps_at_once = False
        return self.sink.text()


@pytest.fixture
def cell() -> Cell:
    return Cell()


def test_a_line_that_has_waited_is_shown_with_what_was_printed_meanwhile(cell: Cell) -> None:
    cell.holds_answers = True
    cell.receive(out(0, "same\n"))
    cell.pump()
    due = cell.pump(later_s=0.2)
    assert len(cell.asked) == 1 and due is not None
    cell.pump(later_s=0.3)
    assert len(cell.asked) == 1 and cell.sink.messages == []
    cell.receive(*(out(rank, f"of {rank}\nsame\n") for rank in range(1, 4)))
    cell.asked[0]()
    cell.pump(later_s=0.4)
    assert cell.sink.text() == "[1] of 1\n[2] of 2\n[3] of 3\n[0-3] same\n"


def test_a_host_that_does_not_say_what_was_printed_is_not_waited_for_long(cell: Cell) -> None:
    cell.holds_answers = True
    cell.receive(out(0, "same\n"))
    cell.pump()
    cell.pump(later_s=0.2)
    due = cell.pump(later_s=0.1 + cell_output.PATIENCE_S)
    assert cell.sink.messages == [] and due is not None
    cell.pump(later_s=0.3 + cell_output.PATIENCE_S)
    assert cell.sink.text() == "[0] same\n"


def test_in_a_flood_nobody_is_asked(cell: Cell) -> None:
    cell.receive(out(0, "line\n" * cell_output.FLOOD_CHARACTERS))
    cell.pump()
    cell.pump(later_s=0.2)
    cell.pump(later_s=0.2)
    assert not cell.asked and cell.sink.text().startswith("[0] line\n")


def test_what_waits_is_shown_when_the_notebook_ends(cell: Cell) -> None:
    cell.receive(out(0, "only me\n"))
    cell.pump()
    cell.publisher.is_stopping = True
    cell.pump()
    assert cell.sink.text() == "[0] only me\n"


def test_messages_keep_their_distance(cell: Cell) -> None:
    cell.receive(*(out(rank, "a\n") for rank in range(4)))
    cell.pump()
    cell.receive(*(out(rank, "b\n") for rank in range(4)))
    due = cell.pump()
    assert len(cell.sink.messages) == 1 and due is not None
    cell.pump(later_s=cell_output.TEXT_INTERVAL_S)
    assert len(cell.sink.messages) == 2


def test_what_comes_out_together_is_sorted_by_rank(cell: Cell) -> None:
    for rank in (2, 0, 3, 1):
        cell.receive(out(rank, f"first {rank}\nsecond {rank}\n"))
    lines = [f"[{rank}] {which} {rank}\n" for which in ("first", "second") for rank in range(4)]
    assert cell.finish() == "".join(lines)


def test_stderr_goes_to_stderr_in_its_place(cell: Cell) -> None:
    cell.receive(out(0, "a\n"), out(0, "careful\n", "stderr"), out(0, "b\n"))
    cell.finish()
    assert cell.sink.messages == [("stdout", "[0] a\n"), ("stderr", "[0] careful\n"), ("stdout", "[0] b\n")]


def test_streams_that_alternate_a_lot_are_sorted_into_few_messages(cell: Cell) -> None:
    for number in range(100):
        cell.receive(out(0, f"{number}\n"), out(0, f"{number}\n", "stderr"))
    cell.finish()
    assert cell.sink.kinds() == ["stdout", "stderr"]
    assert cell.sink.text("stdout").split() == cell.sink.text("stderr").split()


def test_a_line_without_its_end_is_shown_and_goes_on_in_place(cell: Cell) -> None:
    cell.receive(out(0, "Loading"))
    cell.pump(later_s=0.6)
    cell.pump(later_s=0.8)
    assert cell.sink.text() == "[0] Loading"
    cell.receive(out(0, " done\n"))
    assert cell.finish() == "[0] Loading done\n"


def test_another_rank_begins_a_line_of_its_own(cell: Cell) -> None:
    cell.receive(out(0, "Loading"))
    cell.pump(later_s=0.6)
    cell.pump(later_s=0.8)
    cell.receive(out(1, "hello\n"))
    cell.pump(later_s=1.0)
    cell.receive(out(0, " done\n"))
    assert cell.finish() == "[0] Loading\n[1] hello\n[0]  done\n"


def test_late_lines_of_all_ranks_are_one(cell: Cell) -> None:
    cell.receive(out(0, "late\n"), *(done(rank) for rank in range(4)))
    cell.pump()
    assert cell.sink.text() == "[0] late\n"
    for rank in range(4):
        cell.pump(later_s=0.1)
        cell.receive(out(rank, "later\n"))
    cell.pump(later_s=0.2)
    assert cell.sink.text() == "[0] late\n[0-3] later\n"


def test_a_plot_is_shown_below_its_rank(cell: Cell) -> None:
    plot = {"text/plain": "<Figure>", "image/png": "iVBOR"}
    cell.receive(out(3, "plotting"), shown(3, plot))
    cell.finish()
    assert [(kind, content[0] if kind == "display" else content) for kind, content in cell.sink.messages] == [
        ("stdout", "[3] plotting\n"),
        ("display", {"text/plain": "[3]"}),
        ("display", plot),
    ]


def test_updates_of_a_display_go_to_the_display_of_their_rank(cell: Cell) -> None:
    for rank in range(2):
        cell.receive(shown(rank, {"text/plain": "0 %"}, display_id="x"))
    cell.pump(later_s=0.2)
    for percent in range(100):
        cell.receive(shown(1, {"text/plain": f"{percent} %"}, display_id="x", update=True))
    cell.finish()
    assert cell.sink.messages == [
        ("display", ({"text/plain": "[0] 0 %"}, "main.0.x")),
        ("display", ({"text/plain": "[1] 0 %"}, "main.1.x")),
        ("update", ({"text/plain": "[1] 99 %"}, "main.1.x")),
    ]


def test_a_widget_of_a_rank_is_shown_as_text(cell: Cell) -> None:
    cell.receive(shown(0, {"text/plain": "IntSlider(value=7)", cell_output.WIDGET_VIEW: "{}"}))
    cell.finish()
    assert cell.sink.messages == [("display", ({"text/plain": "[0] IntSlider(value=7)"}, None))]


def test_progress_bars_replace_each_other(cell: Cell) -> None:
    for percent in range(0, 100, 10):
        for rank in range(4):
            cell.receive(out(rank, f"\r{percent}%", "stderr"))
        cell.pump(later_s=percent / 100)
    bars = [content for kind, content in cell.sink.messages if kind == "bars"]
    assert 2 <= len(bars) <= 5 and bars[0] == ["[0-3] 0%"]
    for rank in range(4):
        cell.receive(out(rank, "\r100%\n", "stderr"))
    assert cell.finish() == "[0-3] 100%\n"
    assert cell.sink.messages[-1] == ("bars", [])


def test_bars_of_ranks_that_go_at_different_rates_are_one(cell: Cell) -> None:
    for rank, step in enumerate((12, 11, 5, 12)):
        cell.receive(out(rank, f"\repoch 1: {5 * step:3d}%|###   | {step}/20 [00:01<00:01, 9.{rank}it/s]", "stderr"))
    cell.pump(later_s=1)
    bars = [content for kind, content in cell.sink.messages if kind == "bars"]
    assert bars[-1] == ["[0-3] epoch 1:  25%|###   | 5/20 [00:01<00:01, 9.2it/s]  rank 2 last, rank 3 at 60%"]
    for rank in range(4):
        cell.receive(out(rank, f"\repoch 1: 100%|######| 20/20 [00:0{rank}<00:00, 9.{rank}it/s]\n", "stderr"))
    assert cell.finish() == "[0-3] epoch 1: 100%|######| 20/20 [00:03<00:00, 9.3it/s]\n"


def test_what_ended_bars_say_is_not_lost(cell: Cell) -> None:
    for rank in range(4):
        cell.receive(out(rank, f"\r100%|###| 2/2 [00:0{rank}<00:00, 9.{rank}it/s, loss={rank // 2}]\n", "stderr"))
    assert cell.finish().splitlines() == [
        "[0,1] 100%|###| 2/2 [00:01<00:00, 9.1it/s, loss=0]",
        "[2,3] 100%|###| 2/2 [00:03<00:00, 9.3it/s, loss=1]",
    ]


# ---- failures ------------------------------------------------------------------------------------------------------


def test_a_failure_is_shown_while_others_run_with_what_was_printed_before_it(cell: Cell) -> None:
    cell.receive(out(1, "about to fail\n"), done(1, failure(1)))
    assert max(cell.publisher.at) <= time.monotonic() + 0.05
    cell.pump(later_s=0.02)
    assert cell.sink.messages == [
        ("stdout", "[1] about to fail\n"),
        ("message", "rank 1 raised ValueError: bad shard\nTraceback\nValueError: bad shard\n"),
    ]


def test_equal_failures_are_shown_once_and_later_ones_in_a_line(cell: Cell) -> None:
    cell.receive(done(0, failure(0)), done(2, failure(2)))
    cell.pump(later_s=0.02)
    cell.receive(done(3, failure(3)))
    cell.pump(later_s=0.2)
    (_, error), (_, line) = cell.sink.messages
    assert error.startswith("ranks 0,2 raised ValueError: bad shard\n")
    assert line == "rank 3 raised ValueError: bad shard (cell 7, line 3)\n"


def test_a_failure_like_an_earlier_one_is_left_to_the_error_of_the_cell(cell: Cell) -> None:
    cell.output.summary_follows = True
    cell.receive(done(0, failure(0, "bad shard\nmore of it")))
    cell.pump(later_s=0.02)
    cell.receive(done(1, failure(1, "bad shard\nmore of it")), done(2, failure(2, "other")), done(3))
    cell.finish()
    assert [text.partition("\n")[0] for _, text in cell.sink.messages] == [
        "rank 0 raised ValueError: bad shard",
        "rank 2 raised ValueError: other",
    ]


def test_many_different_failures_do_not_fill_the_screen() -> None:
    cell = Cell(64)
    cell.receive(*(done(rank, failure(rank, f"shard {rank}")) for rank in range(64)))
    cell.finish()
    assert cell.sink.text("message").count("Traceback") == 4
    assert cell.sink.messages[-1][1].count("\n") == 21
    assert cell.sink.text("message").endswith("ranks 24-63 raised too, each something else\n")


def test_a_dead_rank_is_told_as_it_is(cell: Cell) -> None:
    cell.receive(
        done(3, failure(3, "killed by SIGKILL", "WorkerLost")._replace(traceback=("its last line",))),
        done(2, failure(2, "killed by SIGKILL", "WorkerLost")._replace(traceback=())),
    )
    cell.pump(later_s=0.02)
    text = "ranks 2,3 on here ended: killed by SIGKILL"
    assert cell.sink.messages == [("message", f"{text}\n")], "its last lines have been shown"


def test_ranks_that_stopped_at_our_interrupt_are_no_news(cell: Cell) -> None:
    cell.output.hide_interrupts = True
    cell.receive(*(done(rank, failure(rank, "", "KeyboardInterrupt")) for rank in range(4)))
    assert cell.finish() == ""
    other = Cell()
    other.receive(*(done(rank, failure(rank, "", "KeyboardInterrupt")) for rank in range(4)))
    assert other.finish() == "ranks 0-3 stopped at an interrupt (cell 7, line 3)\n"


# ---- limits --------------------------------------------------------------------------------------------------------


def test_a_flood_is_bounded_and_counted_exactly(cell: Cell) -> None:
    line = "x" * 99 + "\n"
    lines = 4000
    for number in range(lines):
        cell.receive(out(0, line if number < lines - 1 else "the end\n"))
    text = cell.finish()
    assert len(text) < budget.SHOWN_CHARACTERS * 1.1
    assert text.endswith("[0] the end\n")
    (note,) = [part for part in text.splitlines() if part.startswith("not shown: ")]
    hidden = int(note.split()[2].replace(",", ""))
    visible = text.count("x" * 99) * 100 + len("the end\n")
    assert hidden + visible == (lines - 1) * 100 + len("the end\n")
    assert "of rank 0 (the last lines follow)" in note
    assert "  all of it: /logs/rank-0.log; or %mesh logs -n 1000" in text


def test_what_the_host_agent_kept_back_is_part_of_the_count(cell: Cell) -> None:
    cell.receive(out(1, "a\n"), cut(1, 1_000_000), cut(1, 5_000_000), cut(3, 7))
    cell.pump(later_s=0.2)
    limit = "more is printed than can be shown here; all of it goes to the logs: %mesh logs -n 100\n"
    assert cell.sink.text("message") == limit
    text = cell.finish()
    assert "not shown: 5,000,007 bytes of ranks 1,3\n  all of it: /logs/rank-1.log, /logs/rank-3.log; or %mesh" in text
    assert text.count(limit) == 1 and text.count("not shown") == 1


def test_the_count_does_not_promise_what_the_logs_could_not_take(cell: Cell) -> None:
    cell.receive(out(0, "y" * 1_000_000 + "\n"), cut(0, 0, "no space left on device"))
    cell.pump(later_s=0.2)
    text = cell.finish()
    assert "  the logs lack some of it (no space left on device): /logs/rank-0.log; or %mesh logs -n 1000" in text
    assert "all of it" not in text


def test_a_log_that_lacks_something_is_no_reason_to_tell_of_a_limit(cell: Cell) -> None:
    cell.receive(out(0, "y\n"), cut(0, 0, "no space left on device"))
    cell.pump(later_s=0.2)
    assert cell.finish() == "[0] y\n"


def test_merged_lines_count_for_each_of_their_ranks(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4000):
        cell.receive(*(out(rank, f"{number:099}\n") for rank in range(4)))
    text = cell.finish()
    hidden = int(text.split("not shown: ")[1].split()[0].replace(",", ""))
    assert hidden + sum(part.startswith("[0-3] ") for part in text.splitlines()) * 400 == 4000 * 400


def test_a_single_endless_line_is_cut_with_its_length(cell: Cell) -> None:
    cell.receive(out(0, "y" * 1_000_000 + "\n"))
    text = cell.finish()
    assert len(text) < 2000
    assert "... 999,001 more characters\n" in text or "... 999,000 more characters\n" in text


def test_a_late_flood_is_counted_again_later(cell: Cell) -> None:
    cell.receive(out(0, "z" * 300_000 + "\n"))
    cell.finish()
    for number in range(100):
        cell.receive(out(0, f"late {number}\n"))
    due = cell.pump(later_s=0.2)
    assert due is not None
    cell.pump(later_s=cell_output.COUNT_INTERVAL_S + 1)
    assert cell.sink.text().count("not shown") == 2
    assert cell.sink.text().endswith("[0] late 99\n")


def test_plots_beyond_the_limit_are_counted(cell: Cell) -> None:
    picture = {"image/png": "p" * (budget.SHOWN_DISPLAY_CHARACTERS // 2)}
    for number in range(5):
        cell.receive(shown(0, {**picture, "text/plain": str(number)}))
    assert "not shown: 4 plots or other rich outputs, after 20 MB of them in one cell" in cell.finish()


def test_notes_stand_on_a_line_of_their_own(cell: Cell) -> None:
    cell.receive(out(0, "half"))
    cell.pump(later_s=0.6)
    cell.pump(later_s=0.8)
    cell.output.note("job 1 done")
    cell.pump()
    assert cell.sink.text() == "[0] half\njob 1 done\n"


def test_an_update_is_not_sent_before_the_display_that_it_is_of(cell: Cell) -> None:
    half = shown(0, {"text/html": "50 %"}, display_id="bar", update=True)
    cell.receive(shown(0, {"text/html": "0 %"}, display_id="bar"), half)
    cell.pump()
    cell.pump(later_s=0.2)
    cell.pump(later_s=0.6)
    cell.receive(shown(0, {"text/html": "100 %"}, display_id="bar", update=True))
    cell.finish()
    displays = [(kind, data) for kind, (data, _) in cell.sink.messages if "text/html" in data]
    assert displays == [("display", {"text/html": "50 %"}), ("update", {"text/html": "100 %"})]


def test_a_rank_that_fails_is_shown_at_once_while_results_wait(cell: Cell) -> None:
    cell.receive(shown(0, {"text/plain": "value"}, is_result=True), done(0), done(1, failure(1)))
    cell.pump(later_s=0.5)
    assert cell.sink.kinds() == ["message"]
    cell.finish()
    assert cell.sink.kinds() == ["message", "display"]


# ---- the end of a cell that has much to show ------------------------------------------------------------------------


class SlowSink(RecordingSink):
    """Takes a while for each message, or does not come back before it is let go."""

    def __init__(self, each_s: float) -> None:
        super().__init__()
        self.each_s = each_s
        self.let_go = threading.Event()

    def stream(self, name: str, text: str) -> None:
        self.let_go.wait(self.each_s)
        super().stream(name, text)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.stop(20)


def slow_cell(publisher: Publisher, each_s: float) -> tuple[CellOutput, SlowSink]:
    sink = SlowSink(each_s)
    paths = {rank: f"/logs/rank-{rank}.log" for rank in range(2)}
    grouping = grouping_for("none", range(2))
    return CellOutput(range(2), sink, grouping, publisher, lambda: paths, lambda on_come, _: on_come()), sink


def test_a_cell_waits_for_its_output_and_says_so(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_output, "REST_NOTE_S", 0.1)
    output, sink = slow_cell(publisher, 0.3)
    for turn in range(3):
        output.receive(out(turn % 2, f"line {turn}\n"))
    output.receive(done(0))
    output.receive(done(1))
    output.finish()
    assert [f"line {turn}" in sink.text() for turn in range(3)] == [True] * 3
    assert capsys.readouterr().err == "showing the rest of what ranks printed; an interrupt leaves it to the logs\n"


def test_an_interrupt_ends_a_cell_that_shows_and_counts_the_rest(publisher: Publisher) -> None:
    output, sink = slow_cell(publisher, 60)
    main = threading.get_ident()

    def press() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: output.is_full)
        for number in range(100):
            output.receive(out(0, f"late {number}\n"))
        sink.let_go.set()

    output.receive(out(0, "line\n"))
    pressed = threading.Timer(0.3, press)
    pressed.start()
    with pytest.raises(KeyboardInterrupt):
        output.finish()
    pressed.join()
    wait_until(lambda: "not shown: " in sink.text())
    assert sink.text().startswith("[0] line\n") and "late 0\n" not in sink.text()
    assert "bytes of rank 0 (the last lines follow)" in sink.text() and sink.text().endswith("[0] late 99\n")


def test_a_cell_whose_output_nothing_takes_ends_with_a_notice(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell_output, "STALLED_S", 0.5)
    output, sink = slow_cell(publisher, 60)
    output.receive(out(0, "line\n"))
    output.finish()
    said = capsys.readouterr().err
    assert said.startswith("no output could be shown for 0.5 s, so the cell ends without the rest\n  all of it: ")
    assert "/logs/rank-0.log, /logs/rank-1.log; or %mesh logs -n 1000" in said
    sink.let_go.set()
