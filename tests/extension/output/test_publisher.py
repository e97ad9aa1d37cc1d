"""The publisher's thread, and the sink for terminals."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from meshbook_extension.output.publisher import Publisher, StreamSink


class Output:
    """Publishes nothing, at given times."""

    def __init__(self, *again_s: float, fails: bool = False) -> None:
        self.again_s = list(again_s)
        self.fails = fails
        self.pumped: list[float] = []
        self.threads: set[str] = set()
        self.errors: list[Exception] = []
        self.called = threading.Event()

    def pump(self, now: float) -> float | None:
        self.pumped.append(now)
        self.threads.add(threading.current_thread().name)
        self.called.set()
        if self.fails:
            raise RuntimeError("the front end is gone")
        return now + self.again_s.pop(0) if self.again_s else None

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


def test_outputs_are_pumped_when_they_asked_to_be() -> None:
    publisher, output = Publisher(), Output(0.05)
    began = time.monotonic()
    publisher.schedule(output, began + 0.05)
    publisher.schedule(output, began + 10)
    while len(output.pumped) < 2 and time.monotonic() < began + 5:
        time.sleep(0.01)
    publisher.stop()
    assert output.pumped[0] >= began + 0.05
    assert output.pumped[1] >= output.pumped[0] + 0.05
    assert output.threads == {"meshbook.publish"}


def test_an_earlier_time_wins() -> None:
    publisher, output = Publisher(), Output()
    publisher.schedule(output, time.monotonic() + 30)
    publisher.schedule(output, time.monotonic())
    assert output.called.wait(5)
    publisher.stop()


def test_stop_publishes_what_waits_and_ends_the_thread() -> None:
    publisher, output = Publisher(), Output(30, 30)
    publisher.schedule(output, time.monotonic() + 30)
    publisher.stop()
    assert len(output.pumped) == 1
    assert "meshbook.publish" not in {thread.name for thread in threading.enumerate()}
    publisher.stop()
    publisher.schedule(output, 0)
    assert len(output.pumped) == 1


def test_no_thread_before_the_first_output() -> None:
    Publisher().stop()
    assert "meshbook.publish" not in {thread.name for thread in threading.enumerate()}


def test_a_fault_of_one_output_reaches_who_waits_and_leaves_others_alone(capsys: pytest.CaptureFixture[str]) -> None:
    publisher, bad, good = Publisher(), Output(fails=True), Output()
    publisher.schedule(bad, 0)
    publisher.schedule(good, 0)
    assert good.called.wait(5) and bad.called.wait(5)
    publisher.stop()
    assert [str(error) for error in bad.errors] == ["the front end is gone"]
    assert "the front end is gone" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_share_one_line_of_a_terminal_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    sink = StreamSink(lambda *args, **kwargs: None)
    sink.bars(["[0] 10%", "[1] 20%"])
    sink.bars(["[0] 30%", "[1] 40%"])
    sink.stream("stdout", "[0] hello\n")
    sink.bars([])
    assert sys.stdout.getvalue() == "[0] 10%  [1] 20%\r\x1b[K[0] 30%  [1] 40%\r\x1b[K[0] hello\n"  # type: ignore[attr-defined]


def test_bars_are_left_out_where_nothing_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    sink = StreamSink(lambda *args, **kwargs: None)
    sink.bars(["[0] 10%"])
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]


def test_late_output_goes_to_the_streams_of_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    sink = StreamSink(lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    sink.stream("stdout", "late\n")
    assert captured.getvalue() == "late\n"
