"""Text of two pipes and rich output of a socket, in the order in which a rank has shown them."""

from __future__ import annotations

import string
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.agent.output import RankOutput, ShownDisplay
from meshbook.agent.rank_log import RankLog
from meshbook.wire import messages as wire
from meshbook.wire.messages import PLACE, SHOWN_HERE

MARKER = b"\x1e0123456789abcdef:"
STREAMS = ("stdout", "stderr")


def shown(number: int, place: int = 1) -> ShownDisplay:
    return ShownDisplay(wire.DisplayData(wire.OWN_RANK, 7, False, False, place), [str(number).encode()])


def in_order(output: RankOutput) -> list[str]:
    """What would be sent, in order: text by lines, rich output as ``<number>``."""
    parts, _ = output.take(0.0, final=True)
    lines: list[str] = []
    for part in parts:
        lines += part.text.split() if isinstance(part, wire.StreamText) else [f"<{part.payload[0].decode()}>"]
    return lines


@pytest.fixture
def output(tmp_path: Path) -> Iterator[RankOutput]:
    log = RankLog(tmp_path / "rank-0.log")
    yield RankOutput(MARKER, log, now=0.0)
    log.close()


def test_text_behind_a_plot_waits_for_it(output: RankOutput) -> None:
    mark = MARKER + SHOWN_HERE + b"1\n"
    output.feed("stdout", b"before\n" + mark + b"after\n", 0.0)
    assert in_order(output) == ["before"]
    output.feed("stderr", mark, 0.0)
    assert in_order(output) == []
    output.show(shown(1))
    assert in_order(output) == ["<1>", "after"]


def test_a_plot_that_comes_before_its_mark_is_shown_at_once(output: RankOutput) -> None:
    output.feed("stdout", b"before\n", 0.0)
    output.show(shown(1))
    assert in_order(output) == ["before", "<1>"]
    for stream in STREAMS:
        output.feed(stream, MARKER + SHOWN_HERE + b"1\n" + b"after\n", 0.0)
    assert in_order(output) == ["after", "after"]


def test_what_waits_for_a_plot_that_is_lost_comes_when_the_rank_has_ended(output: RankOutput) -> None:
    output.feed("stdout", b"before\n" + MARKER + SHOWN_HERE + b"1\n" + b"after\n", 0.0)
    assert in_order(output) == ["before"]
    output.release()
    assert in_order(output) == ["after"]


def test_forged_marks_hold_back_no_more_than_a_megabyte(output: RankOutput) -> None:
    output.feed("stdout", MARKER + SHOWN_HERE + b"99\n", 0.0)
    for number in range(40):
        output.feed("stdout", b"%d\n" % number + b"x" * 65536 + b"\n", 0.0)
    assert "39" in in_order(output)


def test_lines_of_two_streams_at_one_place_say_so(output: RankOutput) -> None:
    output.feed("stdout", b"a\n" + MARKER + PLACE + b"1\n" + b"b\n", 0.0)
    output.feed("stderr", b"c\n" + MARKER + PLACE + b"1\n" + b"d\n", 0.0)
    parts, _ = output.take(0.0, final=True)
    places = {part.text: part.place for part in parts if isinstance(part, wire.StreamText)}
    assert places["a\n"] == places["c\n"] < places["b\n"] == places["d\n"]


class Worker:
    """What a worker writes, step by step: each step is one system call."""

    def __init__(self, program: list[str]) -> None:
        self.pipes = {"stdout": b"", "stderr": b""}
        self.sent: deque[tuple[int, int]] = deque()
        self.expected: list[str] = []
        self.steps = self._steps(program)

    def _steps(self, program: list[str]) -> deque[tuple[str, object]]:
        steps: deque[tuple[str, object]] = deque()
        last, place = "", 0
        for number, kind in enumerate(program):
            if kind == "display":
                place += 1
                steps.append(("socket", (place, number)))
                steps += [(stream, MARKER + SHOWN_HERE + b"%d\n" % place) for stream in STREAMS]
                self.expected.append(f"<{number}>")
            elif kind == "output":
                steps += [(stream, MARKER + b"%d\n" % number) for stream in STREAMS]
            else:
                if last not in ("", kind):
                    place += 1
                    steps += [(stream, MARKER + PLACE + b"%d\n" % place) for stream in STREAMS]
                last = kind
                letter = string.ascii_letters[number]  # one byte: a number of two digits may be read, and sent, in two
                steps.append((kind, letter.encode() + b"\n"))
                self.expected.append(letter)
        return steps

    def step(self) -> None:
        where, what = self.steps.popleft()
        if where == "socket":
            assert isinstance(what, tuple)
            self.sent.append(what)
        else:
            assert isinstance(what, bytes)
            self.pipes[where] += what


@given(
    st.lists(st.sampled_from(["stdout", "stderr", "display", "output"]), max_size=30),
    st.lists(st.tuples(st.sampled_from(["work", *STREAMS, "socket", "take"]), st.integers(1, 60)), max_size=200),
)
def test_whatever_is_read_first_the_order_is_that_of_the_code(
    program: list[str], socket_turn: list[tuple[str, int]]
) -> None:
    worker = Worker(program)
    output = RankOutput(MARKER, RankLog(Path("/dev/null")), now=0.0)
    got: list[str] = []

    def read(stream: str, size: int) -> None:
        data, worker.pipes[stream] = worker.pipes[stream][:size], worker.pipes[stream][size:]
        if data:
            output.feed(stream, data, 0.0)

    def hear() -> None:
        if worker.sent:
            place, number = worker.sent.popleft()
            for stream in STREAMS:
                read(stream, 1 << 20)
            output.show(shown(number, place))

    for turn, size in socket_turn:
        if turn == "work":
            for _ in range(min(size % 7, len(worker.steps))):
                worker.step()
        elif turn == "socket":
            hear()
        elif turn == "take":
            got += in_order(output)
        else:
            read(turn, size)
    while worker.steps:
        worker.step()
    for stream in STREAMS:
        read(stream, 1 << 20)
    while worker.sent:
        hear()
    assert got + in_order(output) == worker.expected
    assert not output.waits_for_pipes
    output.log.close()
