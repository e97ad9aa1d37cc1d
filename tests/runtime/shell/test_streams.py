"""stdout and stderr of a rank, seen from its threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from meshbook.shell.attribution import Attribution
from meshbook.shell.streams import RankStream


def test_a_line_follows_what_another_thread_writes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half lines are written by the control thread now and then, while the main thread goes on with them."""
    path = tmp_path / "out"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    stream = RankStream("stdout", fd, Attribution(lambda stream, text, cell: None, lambda: None))
    write, entered, goes_on = stream._pipe.write, threading.Event(), threading.Event()

    def write_late(data: bytes) -> None:
        if threading.current_thread() is flusher:
            entered.set()
            assert goes_on.wait(20)
        write(data)

    monkeypatch.setattr(stream._pipe, "write", write_late)
    stream.write("begun, ")
    flusher = threading.Thread(target=stream.flush)
    flusher.start()
    assert entered.wait(20)
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    stream.write("and ended\n")
    flusher.join(20)
    timer.join(20)
    assert path.read_text() == "begun, and ended\n"
    os.close(stream._pipe._kept)
    os.close(fd)
