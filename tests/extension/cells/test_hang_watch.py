"""What a running cell says of itself when a rank holds the others up: on real ranks, without a command."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from patience import wait_until

from meshbook_extension.output.publisher import StreamSink

LOOK = "look: %mesh stacks    stop: interrupt\n"


@pytest.fixture
def run_until_told(notebook, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Run a cell, press interrupt when it has told something of itself; returns the notes."""
    notes: list[str] = []
    told = threading.Event()
    sign = "look: %mesh stacks"
    stream = StreamSink.stream

    def spy(sink: StreamSink, name: str, text: str) -> None:
        if "look: %mesh stacks" in text or notes:
            notes.append(text)
            if sign in text:
                told.set()
        stream(sink, name, text)

    monkeypatch.setattr(StreamSink, "stream", spy)

    def press(wait_s: float) -> None:
        told.wait(wait_s)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    def run(cell: str, wait_s: float = 40.0, until: str = sign) -> list[str]:
        nonlocal sign
        sign = until
        thread = threading.Thread(target=press, args=(wait_s,))
        thread.start()
        ran = notebook.try_to_run(cell)
        thread.join()
        assert "CallInterrupted" in ran.stdout
        return notes

    yield run
    wait_until(
        lambda: all(one.state == "idle" for one in notebook.shell._meshbook_session.mesh().status()), timeout_s=30
    )
    notebook.run("%%mesh\ndist.barrier()")


@pytest.mark.slow
def test_the_stack_of_the_rank_that_holds_others_up_follows(run_until_told) -> None:
    code = "def train():\n    while True: pass\nif rank == 2: train()\ndist.all_reduce(torch.ones(1))"
    first, *rest = run_until_told(f"%%mesh\n{code}", until="[2] busy")
    assert first.startswith("ranks 0,1,3 wait in all_reduce"), first
    stack = "".join(rest)
    assert re.match(r"\[2\] busy for [\d.]+ s, at cell \d+, line 3\n", stack), stack
    assert re.search(r"\n    cell \d+, line 3 +train +while True: pass\n", stack), stack


def test_a_rank_that_took_another_branch_is_named_and_all_are_freed(notebook) -> None:
    code = "%%mesh\nif rank == 1:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(1))"
    ran = notebook.try_to_run(code)
    said = r"ranks 0,2,3 and 1 disagree in operation \d+: all_reduce against barrier"
    assert re.search(
        rf"CallFailed.*{said};  ranks 0,2,3 at (cell \d+), line 5, rank 1 at \1, line 3", ran.stdout, re.S
    ), ran
    notebook.run("%%mesh\ndist.barrier()")


@pytest.mark.parametrize("is_job", [False, True])
def test_values_of_ranks_that_disagreed_are_not_shown(notebook, is_job: bool) -> None:
    option = " --async" if is_job else ""
    code = f"%%mesh{option}\nx = torch.ones(2, 2) if rank == 1 else torch.ones(4)\ndist.all_reduce(x)\nprint('ends')\nx"
    ran = notebook.try_to_run(code)
    if is_job:
        number = ran.stdout.partition("job ")[2].partition(" ")[0]  # ranks may have printed before
        ran = notebook.try_to_run(f"%mesh wait {number}")
    assert "disagree in all_reduce" in ran.stdout and "tensor(" not in str(ran), ran
    assert "  values of ranks 0-3 are not shown: they came of that operation" in ran.stdout
    assert notebook["_mesh"] is None


def test_a_rank_that_is_many_times_slower_is_named(run_until_told) -> None:
    loop = "while True:\n    time.sleep(0.3 if rank == 3 else 0.03)\n    dist.all_reduce(torch.ones(1))"
    code = f"%%mesh\nimport time\n{loop}"
    notes = run_until_told(code)
    assert re.fullmatch(
        r"rank 3 holds the others up: they wait \d\d% of the time, since it takes about \d+x as long for its part\n"
        rf"  it is (in|at) .*cell \d+, line [345]\)? just now    {LOOK}",
        notes[0],
    ), notes


def test_a_rank_in_native_code_that_holds_the_gil_is_named(run_until_told) -> None:
    code = (
        "%%mesh\nimport ctypes\nif rank == 0:\n    ctypes.PyDLL(None).usleep(9_000_000)\ndist.all_reduce(torch.ones(1))"
    )
    notes = run_until_told(code)
    assert re.fullmatch(
        r"ranks 1-3 wait in all_reduce \((cell \d+), line 5\), operation \d+;\n"
        rf"  rank 0 does not answer: native code holds the GIL \(\1, line 4\)\n  for \d+\.\d+ s now    {LOOK}",
        notes[0],
    ), notes


@pytest.mark.slow
def test_a_rank_that_runs_on_alone_is_named(run_until_told) -> None:
    notes = run_until_told("%%mesh\nimport time\nif rank == 1:\n    time.sleep(60)")
    assert re.fullmatch(
        r"ranks 0,2,3 have ended (cell \d+); rank 1 still runs it: it is in time.sleep \(\1, line 4\)\n"
        r"  look: %mesh stacks rank=1    stop: interrupt\n",
        notes[0],
    ), notes


@pytest.mark.slow
def test_a_healthy_cell_says_nothing(run_until_told) -> None:
    code = "%%mesh\nimport time\nwhile True:\n    time.sleep(0.02 * (1 + rank % 2))\n    dist.all_reduce(torch.ones(1))"
    assert run_until_told(code, wait_s=10.0) == []
