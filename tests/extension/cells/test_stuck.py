"""What a person sees when ranks of a cell wait for others in vain: on real ranks."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from meshbook_extension.output.publisher import StreamSink

CHECK = "%%mesh\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == 4 and kept == rank"


@pytest.fixture
def whole(notebook) -> Iterator[None]:
    """Names and groups are there after the test as before."""
    notebook.run("%%mesh\nkept = rank")
    yield
    notebook.run(CHECK)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """The texts that were shown, each with the time since this moment."""
    texts: list[tuple[float, str]] = []
    started = time.monotonic()
    stream = StreamSink.stream

    def spy_stream(sink: StreamSink, name: str, text: str) -> None:
        texts.append((time.monotonic() - started, text))
        stream(sink, name, text)

    monkeypatch.setattr(StreamSink, "stream", spy_stream)
    return texts


def when(shown: list[tuple[float, str]], text: str) -> float:
    return next(at for at, seen in shown if text in seen)


def test_the_traceback_comes_at_once_and_the_verdict_with_the_prompt(notebook, whole, shown) -> None:
    code = "%%mesh\nt = torch.ones(1)\nif rank == 1:\n    raise ValueError('bad shard')\ndist.all_reduce(t)"
    started = time.monotonic()
    text = notebook.fail(code)
    took_s = time.monotonic() - started
    assert when(shown, "bad shard") < 2 and took_s < 5  # 0.05 s and 0.15 s on a quiet machine
    assert text.startswith("rank 1 raised ValueError: bad shard\n")
    assert text.count("Traceback (most recent call last)") == 1
    assert "GroupAborted" not in text
    first, second, third = text.splitlines()[-3:]
    number = re.search(r"cell (\d+), line 4", first)[1]
    assert first == f"CallFailed: rank 1 raised ValueError: bad shard (cell {number}, line 4)"
    waited = rf"  ranks 0,2,3 were waiting in all_reduce \(cell {number}, line 5\); freed after [0-9.]+ s"
    assert re.fullmatch(rf"{waited}, all variables kept", second)
    assert third == "  again: run the cell again; what it changed before stays changed"


def test_finished_ranks_are_told_apart_from_freed_ones(notebook, whole) -> None:
    text = notebook.fail("%%mesh\nif rank == 1:\n    1 / 0\nif rank == 0:\n    dist.recv(torch.ones(1), src=1)")
    last = text.splitlines()[-3:]
    assert last[0] == "  ranks 2,3 finished; results in _mesh"
    assert last[1].startswith("  rank 0 was waiting in recv from rank 1 (cell ")


def test_a_job_is_freed_and_says_so(notebook, whole) -> None:
    notebook.run("%%mesh --async\nif rank == 1:\n    raise ValueError('bad shard')\ndist.barrier()")
    number = notebook.run("%mesh jobs").stdout.split("job ")[-1].split(":")[0]
    text = notebook.fail(f"%mesh wait {number}")
    assert "ranks 0,2,3 were waiting in barrier (cell " in text
    assert f"job {number}: failed" in notebook.run("%mesh jobs").stdout


def test_waiting_in_vain_is_noted_once_and_an_interrupt_ends_it(notebook, whole, shown) -> None:
    threading.Timer(3.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    text = notebook.fail("%%mesh\nif rank != 0:\n    dist.barrier()")
    assert time.monotonic() - started < 8
    notes = [seen for _, seen in shown if "never entered" in seen]
    assert len(notes) == 1
    assert re.match(
        r"ranks 1-3 wait in barrier \(cell \d+, line 3\), which rank 0 never entered: it has ended cell \d+\n"
        r"  look: %mesh stacks    stop: interrupt\n",
        notes[0],
    )
    assert "CallInterrupted: interrupted" in text and "Traceback" not in text
