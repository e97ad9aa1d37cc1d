"""Cells that close, redirect or change stdout and stderr: the rank lives on, and what it prints is shown."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collector import Collector

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint
from meshbook.mesh.rank_calls import start_cell


@pytest.fixture(scope="module")
def one(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 1}, name="pipes", device="cpu", group=False) as mesh:
        yield mesh


def _run(mesh: ProcMesh, code: str) -> tuple[str, str]:
    """What the cell prints: stdout, stderr."""
    collector = Collector()
    start_cell(mesh, code, on_output=collector).future.get(60)
    return collector.text(0), collector.text(0, "stderr")


class Loop(Actor):
    """An actor with an event loop."""

    @endpoint
    async def numbers(self) -> list[int]:
        loop: Any = asyncio.get_running_loop()
        return [loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()]


PRINTS = "import os, sys; print('out'); print('err', file=sys.stderr); os.system('echo child; echo bad >&2'); x = 1"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.close(1)",
        "import os; os.close(2)",
        "import os; os.close(1); os.close(2)",
        "import os; os.fdopen(1, 'w').close()",
    ],
)
def test_stdout_and_stderr_that_a_cell_closes_are_open_again_in_the_next(one: ProcMesh, code: str) -> None:
    _run(one, code)
    assert _run(one, PRINTS) == ("out\nchild\n", "err\nbad\n")
    assert one.run("x").get(30).values() == [1]


def test_what_is_printed_after_the_close_is_shown_too(one: ProcMesh) -> None:
    assert _run(one, "import os, sys; os.close(1); os.close(2); print('o'); print('e', file=sys.stderr)") == (
        "o\n",
        "e\n",
    )


def test_an_answer_in_shared_memory_does_not_take_the_place_of_stdout(one: ProcMesh) -> None:
    def close_and_answer() -> Any:
        os.close(1)
        return np.ones(4 << 20, dtype=np.uint8)

    got = one.execute(close_and_answer).get(30).values()[0]
    assert _run(one, "print('x' * 1000)")[0] == "x" * 1000 + "\n"
    assert got.min() == got.max() == 1


def test_text_goes_where_a_cell_leads_it_and_marks_go_to_the_agent(
    one: ProcMesh, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("redirect") / "text"
    _run(one, f"import os\nkept = os.dup(1)\nfile = os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT)\nos.dup2(file, 1)")
    assert _run(one, PRINTS) == ("", "err\nbad\n")
    assert _run(one, "os.dup2(kept, 1); os.close(kept); os.close(file); print('back')") == ("back\n", "")
    assert path.read_text() == "out\nchild\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nread, write = os.pipe(); os.dup2(write, 1); os.close(read); os.close(write)",
        "import os\nfull = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.close(full)",
        "import os\nnull = os.open('/dev/null', os.O_RDONLY); os.dup2(null, 1); os.close(null)",
    ],
    ids=["no-reader", "full-disk", "read-only"],
)
def test_text_that_cannot_go_where_it_was_led_is_shown(one: ProcMesh, code: str) -> None:
    assert _run(one, code + "\nprint('part', end='')")[0] == "part"
    assert _run(one, PRINTS)[0] == "out\nchild\n"


def test_a_full_pipe_that_a_child_made_non_blocking_costs_neither_rank_nor_text(one: ProcMesh) -> None:
    unblock = "import fcntl, os, sys\nfor fd in (1, 2): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_WRONLY)"
    for _ in range(5):  # each cell marks a pipe that is full of the one before
        _run(one, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {unblock!r}])\nprint('x' * 300_000)")
    assert one.run("import os; os.get_blocking(1)").get(30).values() == [False]


def test_stdin_that_a_cell_closes_is_open_again_in_the_next(one: ProcMesh) -> None:
    _run(one, "import os; os.close(0)")
    assert one.run("os.read(0, 1)").get(30).values() == [b""]


def test_an_event_loop_of_an_actor_does_not_take_the_place_of_stdout(one: ProcMesh) -> None:
    one.run("import os; os.close(1); held = __import__('time').sleep(0.3)")
    loops = one.spawn("loops", Loop)
    assert all(min(numbers) > 2 for numbers in loops.numbers.call().get(30).values())
