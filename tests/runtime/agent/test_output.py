"""A rank's pipes: attribution, limits, the log."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbook.agent.output import RankOutput, _Stream
from meshbook.agent.rank_log import PATIENCE_S, QUEUE_BYTES, RankLog
from meshbook.agent.worker import TRICKLE_S, AgentWorker
from meshbook.source.location import PACKAGE
from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import log_tail
from meshbook.wire.messages import OWN_RANK, StreamText

MARKER = b"\x1e0123456789abcdef:"


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankOutput]:
    monkeypatch.setattr("meshbook.agent.rank_log.SETTLE_S", 10.0)  # on a busy machine the thread may have to wait
    log = RankLog(tmp_path / "rank-0.log")
    yield RankOutput(MARKER, log, now=0.0)
    log.close()


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.binary(max_size=30).filter(lambda data: b"\x1e" not in data))),
    st.integers(1, 25),
)
def test_every_byte_belongs_to_the_output_that_was_marked(parts: list[tuple[int, bytes]], piece: int) -> None:
    written = b"".join(MARKER + b"%d\n" % output + data for output, data in parts)
    stream = _Stream("stdout", MARKER)
    split = [p for at in range(0, len(written), piece) for p in stream.split(written[at : at + piece])]
    expected: dict[int, bytes] = {}
    received: dict[int, bytes] = {}
    for output, data in parts:
        expected[output] = expected.get(output, b"") + data
    for output, data in split:
        received[output] = received.get(output, b"") + data
    assert received == {output: data for output, data in expected.items() if data}


def test_a_record_separator_of_the_users_own_passes(output: RankOutput) -> None:
    output.feed("stdout", MARKER + b"3\nleft\x1eright\n", 0.0)
    assert output.take(0.0) == ([StreamText(OWN_RANK, "stdout", "left\x1eright\n", 3)], {})


def test_a_character_cut_in_two_is_put_together(output: RankOutput) -> None:
    encoded = "naïve\n".encode()
    output.feed("stdout", MARKER + b"1\n" + encoded[:3], 0.0)
    output.feed("stdout", encoded[3:], 0.0)
    pieces, _ = output.take(0.0)
    assert "".join(piece.text for piece in pieces) == "naïve\n"


def test_the_tail_of_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none", 5) == ""
    (tmp_path / "log").write_text("a\nb\nc\n")
    assert log_tail(tmp_path / "log", 2) == "b\nc"
    assert log_tail(tmp_path / "log", 9, begin=4) == "c"


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_the_modules_and_common_frames_of_a_crash_report_are_in_the_log_only(output: RankOutput, piece: int) -> None:
    report = 'Fatal Python error: Aborted\n  File "a.py", line 3 in step\n'
    below = f'  File "/lib/IPython/core.py", line 1 in run_code\n  File "{PACKAGE}worker/worker.py", line 9 in main\n'
    output.feed("stderr", b"Fatal Python error: is what it prints\n", 0.0)
    written = (report + below + "Extension modules: numpy, torch._C (total: 2)\n" + "Extra\n").encode()
    for at in range(0, len(written), piece):
        output.feed("stderr", written[at : at + piece], 0.0)
    pieces, _ = output.take(0.0, final=True)
    assert "".join(one.text for one in pieces) == "Fatal Python error: is what it prints\n" + report + "Extra\n"
    output.log.settle()
    assert "Extension modules: numpy" in output.log.path.read_text() and below in output.log.path.read_text()


@pytest.mark.parametrize("first", ["Fatal Python error: ", "Fatal Python error: Abo"])
def test_a_crash_report_is_cut_also_where_its_first_line_comes_in_pieces(output: RankOutput, first: str) -> None:
    report = (
        f'Fatal Python error: Aborted\n\nStack (most recent call first)\n  File "{PACKAGE}worker.py", line 9 in main\n'
    )
    output.feed("stderr", f"before\n{first}".encode(), 0.0)
    output.feed("stderr", report.removeprefix(first).encode(), 0.0)
    pieces, _ = output.take(0.0, final=True)
    assert "".join(one.text for one in pieces) == "before\nFatal Python error: Aborted\n"


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[RankLog, int]]:
    """A log on a disk that takes nothing: a pipe that nobody reads, and the end at which it could be read."""
    path = tmp_path / "rank-0.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield RankLog(path), reader
    os.close(reader)


def read_some(reader: int) -> bytes:
    return os.read(reader, 1 << 20) if select.select([reader], [], [], 0.1)[0] else b""


def test_a_log_on_a_disk_that_hangs_holds_nobody_up_and_says_what_it_lacks(hanging: tuple[RankLog, int]) -> None:
    log, reader = hanging
    output = RankOutput(MARKER, log, now=0.0)
    piece = b"x" * (QUEUE_BYTES // 64)
    came: list[StreamText] = []
    for _ in range(3 * 64):
        output.feed("stdout", piece, 0.0)
        came += output.take(0.0, final=True)[0]
    told = [each.text for each in came if each.stream == "stderr"]
    assert told == ["its log is incomplete from here on: its disk does not keep up\n"]
    assert sum(len(each.text) for each in came if each.stream == "stdout") == 3 * QUEUE_BYTES
    written = b""
    while log.behind:
        written += read_some(reader)
    output.feed("stdout", b"the end", 0.0)
    while not written.endswith(b"the end"):
        written += read_some(reader)
    lacks = 3 * QUEUE_BYTES - written.count(b"x")
    assert lacks > QUEUE_BYTES
    gap = f"\n[meshbook: {lacks:,} bytes are missing here: its disk does not keep up]\nthe end"
    assert written == b"x" * (3 * QUEUE_BYTES - lacks) + gap.encode()
    log.close()


def test_a_rank_waits_for_its_disk_until_that_counts_as_hanging(hanging: tuple[RankLog, int]) -> None:
    log, reader = hanging
    assert not log.is_full(0.0)
    log.write(b"x" * (QUEUE_BYTES // 2), 0.0)
    assert log.is_full(0.0) and log.is_full(PATIENCE_S - 0.1)
    assert not log.is_full(PATIENCE_S + 0.1)
    while log.behind:
        read_some(reader)
    assert not log.is_full(PATIENCE_S + 0.1)
    log.write(b"x" * (QUEUE_BYTES // 2), 0.0)
    assert log.is_full(PATIENCE_S + 0.2)
    while log.behind:
        read_some(reader)
    log.close()


def test_a_rank_that_prints_line_after_line_is_read_many_lines_at_a_time(tmp_path: Path) -> None:
    loop = EventLoop()
    worker = AgentWorker(loop, Mock(), 0, "cpu", MARKER, tmp_path / "rank-0.log", time.monotonic())
    read: list[bytes] = []
    with patch.object(worker.output, "feed", lambda stream, data, now: read.append(data)):
        begun, lines = time.monotonic(), 0
        while time.monotonic() < begun + 20 * TRICKLE_S:
            for _ in range(10):
                os.write(worker.descriptors[-2], b"line\n")
            lines += 10
            loop.run_once()
        took_s = time.monotonic() - begun
        worker.drain()
    assert b"".join(read) == b"line\n" * lines
    assert 3 <= len(read) <= 2 * took_s / TRICKLE_S + 4  # every other read finds the one before long ago
    worker.close()
