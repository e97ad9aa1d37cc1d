"""stdout and stderr of a rank, seen from its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshbook.shell.attribution import Attribution
from meshbook.shell.streams import BLOCK_LINES, RankStream, flush_streams
from meshbook.wire.messages import JOINS


@contextmanager
def another_thread_writes_the_half_line(path: Path) -> Iterator[RankStream]:
    """A stream with half a line, which the control thread has taken to write out: it goes on after a while."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    stream = RankStream("stdout", fd, Attribution(lambda stream, text, cell: None, lambda: None))
    write, entered, goes_on = stream._pipe.write, threading.Event(), threading.Event()

    def write_late(data: bytes) -> None:
        if threading.current_thread() is flusher:
            entered.set()
            assert goes_on.wait(20)
        write(data)

    stream._pipe.write = write_late  # type: ignore[method-assign]
    stream.write("begun, ")
    flusher, timer = threading.Thread(target=stream.flush), threading.Timer(0.2, goes_on.set)
    flusher.start()
    assert entered.wait(20)
    timer.start()
    yield stream
    flusher.join(20)
    timer.join(20)
    os.close(stream._pipe._kept)
    os.close(fd)


def test_a_line_follows_what_another_thread_writes_of_it(tmp_path: Path) -> None:
    """Half lines are written by the control thread now and then, while the main thread goes on with them."""
    with another_thread_writes_the_half_line(tmp_path / "out") as stream:
        stream.write("and ended\n")
    assert (tmp_path / "out").read_text() == "begun, and ended\n"


def test_lines_of_one_write_are_marked_on_their_way_to_the_agent(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "pipe", os.O_WRONLY | os.O_CREAT)
    stream = RankStream("stdout", fd, Attribution(lambda stream, text, cell: None, lambda: None))
    try:
        assert stream.write("a\nb") == 3 and stream.write("\n") == 1
        print("one", file=stream)
        stream.write("c\nd\n")
        stream.write("10%\r20%\n30%\n")
        stream.write("many\n" * (BLOCK_LINES + 1))
        elsewhere = os.open(tmp_path / "elsewhere", os.O_WRONLY | os.O_CREAT)
        os.dup2(elsewhere, fd)
        stream.write("e\nf\n")
        os.close(elsewhere)
    finally:
        os.close(stream._pipe._kept)
        os.close(fd)
    many = "many\n" * (BLOCK_LINES + 1)
    assert (tmp_path / "pipe").read_bytes().decode() == f"a{JOINS}\nb\none\nc{JOINS}\nd\n10%\r20%\n30%\n{many}"
    assert (tmp_path / "elsewhere").read_text() == "e\nf\n"


@pytest.mark.parametrize("flush", [RankStream.flush, lambda stream: flush_streams([stream])], ids=["one", "all"])
def test_a_flush_ends_when_all_is_written(tmp_path: Path, flush: Callable[[RankStream], None]) -> None:
    """What is displayed right behind half a line must not come before it."""
    with another_thread_writes_the_half_line(tmp_path / "out") as stream:
        flush(stream)
        assert (tmp_path / "out").read_text() == "begun, "
